"""What `ortolan bench` measures with: cases, runs, bounds, peers, reports.

`run.run_bench` is the way in. Processes that compute are children of the one that asks: the thread
pool of a process is set once, and peers bring an ONNX Runtime of their own.
"""
