"""Other engines, measured in the same interleaved run: one small file for each."""
