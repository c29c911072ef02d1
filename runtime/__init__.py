"""Bundle to tokens."""
