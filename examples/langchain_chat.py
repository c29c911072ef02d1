"""An answer by LangChain, from a prompt with a gap in it. Argument: the server's address."""

import json
import os
import sys
from urllib.request import Request, urlopen

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = os.environ.get("OPENAI_API_KEY", "none")
models = Request(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"})
with urlopen(models) as answer:
    model = json.load(answer)["data"][0]["id"]

llm = ChatOpenAI(
    base_url=f"{address}/v1",
    api_key=key,
    model=model,
    max_tokens=48,
    temperature=0,
    stream_usage=True,
)
prompt = ChatPromptTemplate(
    [("system", "Answer in one short sentence."), ("user", "What is the capital of {country}?")]
)
chain = prompt | llm
for chunk in chain.stream({"country": "France"}):
    print(chunk.text, end="", flush=True)
    if chunk.usage_metadata:
        print(f"\n{chunk.usage_metadata['output_tokens']} tokens")
