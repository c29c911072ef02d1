"""Generated stubs of the wire formats."""
