"""Serving: the engine behind gRPC and HTTP."""
