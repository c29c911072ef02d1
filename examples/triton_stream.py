"""A continued text by Triton's client, over KServe v2. Arguments: address, the model's name.

It wants an environment of its own: one process cannot hold two copies of KServe's messages.
"""

import queue
import sys

import numpy as np
from tritonclient import grpc as triton

address, model = sys.argv[1], sys.argv[2]
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array([b"The capital of France is"], dtype=np.object_))
responses = queue.Queue()

with triton.InferenceServerClient(address) as client:
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer(
        model, [prompt], parameters={"stream": True, "max_tokens": 16, "temperature": 0}
    )
    final = False
    while not final:
        result, error = responses.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        if response.outputs:
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    print()
