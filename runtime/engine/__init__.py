"""Sessions, KV cache, sampling and the step loop."""
