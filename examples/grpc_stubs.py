"""An answer by grpcio and the generated stubs alone. Argument: the server's address.

Other languages generate theirs from proto/ortolan/v1/ortolan.proto, which is the documentation too.
"""

import sys

import grpc

from ortolan.proto.ortolan.v1 import ortolan_pb2 as pb
from ortolan.proto.ortolan.v1 import ortolan_pb2_grpc as pb_grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
request = pb.ChatRequest(
    messages=[
        pb.Message(role="system", content="Answer in one short sentence."),
        pb.Message(role="user", content="What is the capital of France?"),
    ],
    sampling=pb.SamplingParams(max_tokens=48, temperature=0),
)

with grpc.insecure_channel(address) as channel:
    stub = pb_grpc.InferenceServiceStub(channel)
    # The deadline is the request's: when it is over, the server stops computing.
    for response in stub.Chat(request, timeout=60):
        print(response.text, end="", flush=True)
        if response.HasField("usage"):
            print(f"\n{response.usage.completion_tokens} tokens")
