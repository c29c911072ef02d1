"""An answer by Ortolan's own client. Argument: the server's address."""

import sys

import ortolan

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
messages = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]

with ortolan.Client(address) as client:
    client.wait_ready(timeout_s=60)
    for event in client.stream_chat(messages, max_tokens=48, temperature=0):
        print(event.text, end="", flush=True)
        if event.usage is not None:
            print(f"\n{event.usage.completion_tokens} tokens")
