"""An answer by OpenAI's client. Argument: the server's address."""

import os
import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))

stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 40},  # what OpenAI's interface does not have
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens")
