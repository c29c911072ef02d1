"""What is read of an inference request, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("grpc")

from kserve_requests import infer_request

from ortolan.errors import RequestError
from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb
from ortolan.runtime.params import SamplingParams
from ortolan.runtime.serve.kserve_call import OUTPUTS, field_of, read_call


def json_tensor(**settings: Any) -> tuple[str, str, list[int], list[bytes]]:
    return ("sampling_parameters", "BYTES", [1], [json.dumps(settings).encode()])


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_prompt_is_read_in_both_encodings_and_shapes(raw: bool, shape: list[int]) -> None:
    """Models with and without a batch dimension are called in these two ways."""
    text = "été \u2603"
    request = infer_request(("text_input", "BYTES", shape, [text.encode()]), text=None, raw=raw)
    call = read_call(request)
    assert call.prompt == text
    assert call.raw is raw


WANTED = {"max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 5, "stop": ("x",)}


@pytest.mark.parametrize(
    "request_",
    [
        # tritonclient sends no floating point numbers as parameters, so its users send texts.
        infer_request(max_tokens=7, temperature="0.5", top_k=3, top_p="0.75", seed=5, stop="x"),
        infer_request(max_tokens="7", temperature=0.5, top_k="3", top_p=0.75, seed="5", stop="x"),
        infer_request(
            json_tensor(max_tokens=7, temperature=0.5, top_k=3, top_p=0.75, seed=5, stop=["x"])
        ),
        infer_request(
            json_tensor(
                max_tokens="7", temperature="0.5", top_k="3", top_p="0.75", seed=5, stop="x", n=None
            )
        ),
        infer_request(
            ("max_tokens", "INT32", [1, 1], [7]),
            ("temperature", "FP32", [1, 1], [0.5]),
            ("top_k", "INT64", [1], [3]),
            ("top_p", "FP64", [1], [0.75]),
            ("random_seed", "UINT64", [1, 1], [5]),
            ("stop_words", "BYTES", [1, 2], [b"x", b""]),
            ("bad_words", "BYTES", [1, 1], [b""]),
            ("beam_width", "INT32", [1, 1], [1]),
        ),
        # As Triton's example for vLLM: the same in two places.
        infer_request(
            json_tensor(max_tokens="7", temperature="0.5", top_k="3", top_p="0.75", stop="x"),
            max_tokens="7",
            temperature="0.5",
            top_k="3",
            top_p="0.75",
            seed=5,
        ),
    ],
)
def test_settings_are_the_same_in_every_place(request_: pb.ModelInferRequest) -> None:
    """Triton's backends for language models take them in these ways."""
    sampling = read_call(request_).sampling
    assert sampling == WANTED
    SamplingParams(**sampling)


def test_lists_and_objects_come_in_the_json() -> None:
    call = read_call(
        infer_request(json_tensor(stop=["a", "b"], stop_token_ids=[1, 2], logit_bias={"3": -1}))
    )
    assert call.sampling == {"stop": ("a", "b"), "stop_token_ids": (1, 2), "logit_bias": {3: -1}}


def test_whole_answer_has_its_prompt_and_a_stream_does_not() -> None:
    """What Triton's backend for vLLM does, whose clients expect it."""
    assert read_call(infer_request()).echo
    assert not read_call(infer_request(exclude_input_in_output=True)).echo
    assert not read_call(infer_request(stream=True)).echo
    assert not read_call(infer_request(stream=True, exclude_input_in_output=True)).echo
    assert read_call(infer_request(("stream", "BOOL", [1], [True]))).stream


def test_outputs_are_all_unless_named_or_switched() -> None:
    assert read_call(infer_request()).outputs == tuple(OUTPUTS)
    assert read_call(infer_request(outputs=["text_output"])).outputs == ("text_output",)
    asked = infer_request(
        ("return_finish_reason", "BOOL", [1], [True]),
        outputs=["text_output"],
    )
    assert read_call(asked).outputs == ("text_output", "finish_reason")
    assert "num_input_tokens" not in read_call(infer_request(return_num_input_tokens=False)).outputs


def test_tritons_schedule_is_the_engines() -> None:
    """Triton's 1 goes before its 2, and its timeout is in microseconds; 0 is none of either."""
    call = read_call(infer_request(priority=1, timeout=1_500_000))
    assert (call.priority, call.timeout_s) == (-100, 1.5)
    assert read_call(infer_request(priority=100)).priority == -1
    call = read_call(infer_request(priority=0, timeout=0))
    assert (call.priority, call.timeout_s) == (0, None)


def _two_encodings() -> pb.ModelInferRequest:
    request = infer_request()
    request.inputs[0].contents.bytes_contents.append(b"other")
    return request


def _wrong_field() -> pb.ModelInferRequest:
    request = infer_request(raw=False)
    request.inputs[0].contents.int_contents.append(1)
    return request


def _missing_raw() -> pb.ModelInferRequest:
    request = infer_request(("stream", "BOOL", [1], [True]))
    del request.raw_input_contents[1]
    return request


def _raw(data: bytes) -> pb.ModelInferRequest:
    request = infer_request()
    request.raw_input_contents[0] = data
    return request


def _tensor_parameter() -> pb.ModelInferRequest:
    request = infer_request()
    request.inputs[0].parameters["shared_memory_region"].string_param = "x"
    return request


def _empty_parameter() -> pb.ModelInferRequest:
    request = infer_request()
    request.parameters["seed"].SetInParent()
    return request


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (infer_request(text=None), "text_input", "is missing"),
        (infer_request(("text", "BYTES", [1], [b"x"])), "inputs", "'text'"),
        (infer_request(("text_input", "BYTES", [1], [b"x"])), "text_input", "twice"),
        (infer_request(("stream", "FP32", [1], [1.0])), "stream", "'FP32'.*BOOL"),
        (infer_request(("max_tokens", "BYTES", [1], [b"7"])), "max_tokens", "datatype"),
        (infer_request(("stream", "BOOL", [2], [True, True])), "stream", r"shape \[2\]"),
        (infer_request(("stream", "BOOL", [1, 1, 1], [True])), "stream", r"\[1, 1, 1\]"),
        (infer_request(("stream", "BOOL", [], [True])), "stream", r"shape \[\]"),
        (infer_request(("stream", "BOOL", [-1], [True])), "stream", r"shape \[-1\]"),
        (infer_request(("stop", "BYTES", [2, 1], [b"a", b"b"])), "stop", r"\[1, N\]"),
        (infer_request(("stop", "BYTES", [2**40], [b"a"])), "stop", "at most 1024"),
        (infer_request(("stop", "BYTES", [2], [b"a"])), "stop", "not 2 elements"),
        (infer_request(("stop", "BYTES", [2], [b"a"]), raw=False), "stop", "1 elements"),
        (_two_encodings(), "text_input", "contents beside raw_input_contents"),
        (_wrong_field(), "text_input", "int_contents"),
        (_missing_raw(), "raw_input_contents", "1 entries for 2 inputs"),
        (_raw(b"\x05\x00\x00\x00abc"), "text_input", "7 bytes"),
        (_raw(b"\x01\x00"), "text_input", "2 bytes"),
        (_raw(b"\xff\xff\xff\xffabc"), "text_input", "7 bytes"),
        (_raw(b"\x01\x00\x00\x00\xff"), "text_input", "UTF-8"),
        (_tensor_parameter(), "text_input", "has parameters"),
        (_empty_parameter(), "seed", "without a value"),
        (infer_request(temprature="1"), "parameters", "'temprature'"),
        (infer_request(**{"x" * 1000: 1}), "parameters", "'x{64}'"),
        (infer_request(json_tensor(logprobs=1)), "sampling_parameters", "'logprobs'"),
        (infer_request(temperature="warm"), "temperature", "a number"),
        (infer_request(max_tokens=1.5), "max_tokens", "a whole number"),
        (infer_request(max_tokens=True), "max_tokens", "a whole number"),
        (infer_request(seed="9" * 5000), "seed", "a whole number"),
        (infer_request(stream="yes"), "stream", "true or false"),
        (infer_request(stop=1), "stop", "text"),
        (infer_request(logit_bias="{}"), "logit_bias", "an object"),
        (infer_request(json_tensor(logit_bias={"x": 1})), "logit_bias", "a whole number"),
        (infer_request(json_tensor(seed=1), seed=2), "seed", "twice"),
        (infer_request(("seed", "INT64", [1], [1]), random_seed=2), "seed", "twice"),
        (infer_request(beam_width=4), "beam_width", "not supported"),
        (infer_request(return_logprobs=True), "return_logprobs", "not supported"),
        (
            infer_request(stream=True, exclude_input_in_output=False),
            "exclude_input_in_output",
            "stream is true",
        ),
        (infer_request(outputs=["text"]), "outputs", "'text'"),
        (infer_request(outputs=["text_output"] * 6), "outputs", "6 names"),
        (infer_request(priority=101), "priority", "101"),
        (infer_request(timeout=-1), "timeout", "out of range"),
        (infer_request(timeout="9" * 400), "timeout", "out of range"),
        (infer_request(temperature="9" * 400, request_id="x" * 1025), "id", "1025 characters"),
        (
            infer_request(("sampling_parameters", "BYTES", [1], [b"[]"])),
            "sampling_parameters",
            "JSON object",
        ),
        (
            infer_request(("sampling_parameters", "BYTES", [1], [b"{"])),
            "sampling_parameters",
            "JSON object",
        ),
        (
            infer_request(("sampling_parameters", "BYTES", [1], [b"[" * 60000])),
            "sampling_parameters",
            "JSON object",
        ),
        (
            infer_request(("sampling_parameters", "BYTES", [1], [b" " * 70000])),
            "sampling_parameters",
            "at most 65536",
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_refused_by_name(
    request_: pb.ModelInferRequest, field: str, said: str
) -> None:
    """A setting that is passed over in silence is found weeks later."""
    with pytest.raises(RequestError, match=said) as caught:
        read_call(request_)
    assert field_of(str(caught.value)) == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"top_p": 0}, "top_p"), ({"logit_bias": {1: 1000}}, "logit_bias"), ({"stop": ""}, "stop")],
)
def test_errors_of_the_runtime_name_the_setting_too(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    assert field_of(str(caught.value)) == field
    assert field_of("the prompt is empty; give at least one token") == "text_input"
