"""Sessions, KV cache, sampler and the loop that makes tokens."""

import os

# ONNX Runtime keeps a device id and records events unless told otherwise before it starts.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
