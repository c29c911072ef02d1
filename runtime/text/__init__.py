"""Tokenizer, detokenizer, chat template, stop strings."""
