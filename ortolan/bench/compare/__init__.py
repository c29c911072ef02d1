"""One bundle on several execution providers, each in an environment of its own.

`run.run_comparison` is the way in. What a child process does is in service.py and nothing else:
that environment needs what running a model needs, and no more.
"""
