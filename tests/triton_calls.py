"""Runs in an environment of its own: calls a server with tritonclient; argv is its address.

Prints what came back as JSON.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

MODEL = "my-model"
SETTINGS = {"max_tokens": 12, "temperature": "0", "exclude_input_in_output": True}


def tensor(name: str, values: Any, datatype: str, shape: list[int] | None = None) -> Any:
    array = np.array(values).reshape(shape or [len(values)])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def text(prompt: str, shape: list[int] | None = None) -> Any:
    return tensor("text_input", np.array([prompt.encode()], dtype=object), "BYTES", shape)


def flag(name: str, value: bool = True) -> Any:
    return tensor(name, np.array([value]), "BOOL")


def first(result: Any, name: str = "text_output") -> Any:
    value = result.as_numpy(name).reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else int(value)


def refused(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as error:
        return [str(error.status()), str(error.message())]
    return ["no error", ""]


def with_sync(client: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model ready": client.is_model_ready(MODEL, "1"),
        "server": client.get_server_metadata().name,
        "inputs": [one.name for one in client.get_model_metadata(MODEL).inputs],
        "unknown model": refused(lambda: client.infer("other", [text("x")])),
        "unknown ready": refused(lambda: client.is_model_ready("other")),
        "unknown version": refused(lambda: client.infer(MODEL, [text("x")], model_version="9")),
        "unknown input": refused(lambda: client.infer(MODEL, [text("x"), flag("nothing")])),
        "bad setting": refused(lambda: client.infer(MODEL, [text("x")], parameters={"top_p": "7"})),
    }
    result = client.infer(MODEL, [text("the red fox")], request_id="5", parameters=SETTINGS)
    found["id"] = result.get_response().id
    found["outputs"] = {
        name: first(result, name)
        for name in ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
    }
    as_json = np.array([json.dumps(SETTINGS).encode()], dtype=object)
    found["json"] = first(
        client.infer(MODEL, [text("the red fox"), tensor("sampling_parameters", as_json, "BYTES")])
    )
    tensors = [
        text("the red fox", [1, 1]),
        tensor("max_tokens", np.array([12], np.int32), "INT32", [1, 1]),
        tensor("temperature", np.array([0], np.float32), "FP32", [1, 1]),
        tensor("stop_words", np.array([b""], dtype=object), "BYTES", [1, 1]),
    ]
    outputs = [triton.InferRequestedOutput("text_output")]
    result = client.infer(MODEL, tensors, outputs=outputs)
    found["tensors"] = first(result)
    found["asked outputs"] = [one.name for one in result.get_response().outputs]
    return found


def with_stream(client: Any) -> dict[str, Any]:
    """Three requests at once; the second of them is wrong."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: came.put((result, error)))
    for request_id, stream, settings in (
        ("1", True, SETTINGS),
        ("2", True, {"top_p": "7"}),
        ("3", False, SETTINGS),
    ):
        inputs = [text("the red fox"), flag("stream", stream)]
        client.async_stream_infer(MODEL, inputs, request_id=request_id, parameters=settings)
    client.stop_stream()
    found: dict[str, Any] = {"errors": [], "texts": {"1": [], "3": []}, "final": {}}
    while not came.empty():
        result, error = came.get()
        if error is not None:
            found["errors"].append(str(error))
            continue
        response = result.get_response()
        found["texts"][response.id].append(first(result))
        final = response.parameters["triton_final_response"].bool_param
        found["final"].setdefault(response.id, []).append(final)
    return found


def with_cancel(client: Any) -> str:
    """A stream that its client gives up."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: came.put((result, error)))
    endless = {"ignore_eos": True, "temperature": "1"}
    client.async_stream_infer(MODEL, [text("the"), flag("stream")], parameters=endless)
    came.get(timeout=30)
    client.stop_stream(cancel_requests=True)
    error = None
    while not came.empty():
        error = came.get()[1]
    return str(error and error.status())


async def with_asyncio(address: str) -> dict[str, Any]:
    async with triton_aio.InferenceServerClient(address) as client:

        async def requests() -> Any:
            for index in range(3):
                yield {
                    "model_name": MODEL,
                    "inputs": [text("the red fox"), flag("stream")],
                    "request_id": str(index),
                    "parameters": SETTINGS,
                }

        streamed: dict[str, str] = {}
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            request_id = result.get_response().id
            streamed[request_id] = streamed.get(request_id, "") + first(result)
        whole = await client.infer(MODEL, [text("the red fox")], parameters=SETTINGS)
        return {
            "ready": await client.is_model_ready(MODEL),
            "streamed": streamed,
            "whole": first(whole),
        }


def main() -> None:
    address = sys.argv[1]
    with triton.InferenceServerClient(address) as client:
        found = {
            "sync": with_sync(client),
            "stream": with_stream(client),
            "cancel": with_cancel(client),
            "asyncio": asyncio.run(with_asyncio(address)),
        }
    print(json.dumps(found))  # noqa: T201  (a test reads it)


main()
