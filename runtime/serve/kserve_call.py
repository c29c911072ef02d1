"""What an inference request asks for: a prompt in a tensor, and settings in three places.

A setting is a parameter of the request, a tensor of its own name, or in the JSON object of the
tensor sampling_parameters, as Triton's backends for language models take them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ortolan.errors import RequestError
from ortolan.proto.inference.v2 import grpc_predict_v2_pb2 as pb
from ortolan.runtime.params import MAX_PRIORITY
from ortolan.runtime.serve.kserve_tensors import NUMBERS, WHOLE, Kind, read_inputs, shown

PROMPT = "text_input"
JSON = "sampling_parameters"
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "num_cached_tokens": "UINT32",
}

# It goes into every response.
MAX_ID_CHARACTERS = 1024
# Longer than any list of settings is; parsing it takes a millisecond.
_MAX_JSON_BYTES = 64 << 10


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("text")


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, value if isinstance(value, list) else [value]))


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def _whole(value: Any) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    raise ValueError("a whole number")


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, int | float) and not isinstance(number, bool):
        return number
    raise ValueError("a number")


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(map(_whole, value if isinstance(value, list) else [value]))


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f"an object in {JSON}, from token ids to numbers")
    return {_whole(key): _number(bias) for key, bias in value.items()}


@dataclass(frozen=True)
class _Setting:
    """How a setting is read, and as which tensor it may come.

    only: values that ask for nothing; all others are refused. None: every value counts.
    """

    read: Callable[[Any], Any]
    tensor: Kind | None
    only: tuple[Any, ...] | None = None


def _settings(read: Callable[[Any], Any], tensor: Kind | None, names: str) -> dict[str, _Setting]:
    return {name: _Setting(read, tensor) for name in names.split()}


_NUMBER, _FLAG, _LIST = Kind(NUMBERS), Kind(("BOOL",)), Kind(("BYTES",), many=True)
_RETURNS = {f"return_{name}": name for name in OUTPUTS if name != "text_output"}
_SAMPLING = {
    **_settings(_whole, Kind(WHOLE), "max_tokens top_k n seed"),
    **_settings(
        _number,
        _NUMBER,
        "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty",
    ),
    **_settings(_texts, _LIST, "stop"),
    **_settings(_ids, Kind(WHOLE, many=True), "stop_token_ids"),
    **_settings(_bias, None, "logit_bias"),
    **_settings(_flag, _FLAG, "ignore_eos"),
}
# Other spellings, of TensorRT-LLM's backend.
_ALIASES = {"stop_words": "stop", "random_seed": "seed"}
_SETTINGS = {
    **_SAMPLING,
    **{alias: _SAMPLING[name] for alias, name in _ALIASES.items()},
    **_settings(_flag, _FLAG, "stream exclude_input_in_output"),
    **_settings(_flag, _FLAG, " ".join(_RETURNS)),
    **_settings(_whole, None, "priority timeout"),
    **_settings(_text, None, "cache_salt"),
    # What clients send as a matter of course, and what does not exist here.
    "beam_width": _Setting(_whole, Kind(WHOLE), only=(1,)),
    "length_penalty": _Setting(_number, _NUMBER, only=(0, 1)),
    "bad_words": _Setting(_texts, _LIST, only=((), ("",))),
    **{
        name: _Setting(_flag, _FLAG, only=(False,))
        for name in (
            "early_stopping",
            "use_beam_search",
            "return_logprobs",
            "return_cumulative_logprob",
            "return_log_probs",
            "return_context_logits",
            "return_generation_logits",
        )
    },
    # The last response of a request says so anyway.
    "triton_enable_empty_final_response": _Setting(_flag, None, only=(False, True)),
}
_KINDS = {
    PROMPT: Kind(("BYTES",)),
    JSON: Kind(("BYTES",)),
    **{name: setting.tensor for name, setting in _SETTINGS.items() if setting.tensor is not None},
}
# What a client has to know of; the spellings of others are accepted beside it.
INPUTS = {
    name: kind
    for name, kind in _KINDS.items()
    if name not in _ALIASES and (name not in _SETTINGS or _SETTINGS[name].only is None)
}


@dataclass(frozen=True)
class InferCall:
    """A request, read. prompt: text.

    sampling: arguments of SamplingParams. stream: a response for each event, else one. echo: the
    answer begins with the prompt. outputs: names. raw: how the response holds them.
    timeout_s: None or above 0.
    """

    prompt: str
    sampling: Mapping[str, Any]
    stream: bool
    echo: bool
    outputs: tuple[str, ...]
    raw: bool
    priority: int
    timeout_s: float | None
    salt: str


def read_call(request: pb.ModelInferRequest) -> InferCall:
    """Raises RequestError naming what is unknown, of another type, or said in two ways."""
    if len(request.id) > MAX_ID_CHARACTERS:
        raise RequestError(
            f"id has {len(request.id)} characters; at most {MAX_ID_CHARACTERS} may be given"
        )
    tensors = read_inputs(request, _KINDS)
    if PROMPT not in tensors:
        raise RequestError(f"{PROMPT} is missing; give it as a BYTES tensor of shape [1]")
    prompt = _decoded(PROMPT, tensors.pop(PROMPT)[0])
    settings = _read_settings(request, tensors)
    stream = settings.get("stream", False)
    # As in Triton's backend for vLLM: a whole answer begins with its prompt unless told otherwise.
    echo = not settings.get("exclude_input_in_output", stream)
    if stream and echo:
        raise RequestError(
            "exclude_input_in_output is false, and stream is true; a stream never has the prompt"
        )
    timeout_us = settings.get("timeout", 0)
    if not 0 <= timeout_us < 2**63:
        raise RequestError("timeout is out of range; it must be microseconds, or 0 for none")
    return InferCall(
        prompt=prompt,
        sampling={name: settings[name] for name in _SAMPLING if name in settings},
        stream=stream,
        echo=echo,
        outputs=_outputs(request, settings),
        raw=bool(request.raw_input_contents),
        priority=_priority(settings.get("priority", 0)),
        timeout_s=timeout_us / 1e6 or None,
        salt=settings.get("cache_salt", ""),
    )


def _read_settings(
    request: pb.ModelInferRequest, tensors: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Setting -> value, from all three places; what is said twice must be the same."""
    settings: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        setting = _SETTINGS[name]
        try:
            value = setting.read(value)
        except ValueError as error:
            raise RequestError(f"{name} has a value of another kind; it must be {error}") from None
        if setting.only is not None:
            if value not in setting.only:
                raise RequestError(f"{name} is not supported; leave it out")
            return
        if name == "stop_words":
            value = tuple(filter(None, value))  # as TensorRT-LLM's clients say that there are none
        name = _ALIASES.get(name, name)
        if settings.setdefault(name, value) != value:
            raise RequestError(f"{name} is given twice, with different values; give it once")

    for name, parameter in request.parameters.items():
        if name not in _SETTINGS:
            raise RequestError(f"parameters has {shown(name)}, which is no setting here")
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise RequestError(f"{name} is a parameter without a value")
        put(name, getattr(parameter, choice))
    for name, values in tensors.items():
        if name == JSON:
            for key, value in _object(_decoded(JSON, values[0])).items():
                put(key, value)
        else:
            listed = [_decoded(name, item) if isinstance(item, bytes) else item for item in values]
            put(name, listed if _KINDS[name].many else listed[0])
    return settings


def _object(text: str) -> dict[str, Any]:
    """The settings of the JSON tensor; null is as good as absent."""
    if len(text) > _MAX_JSON_BYTES:
        raise RequestError(
            f"{JSON} has {len(text)} characters; at most {_MAX_JSON_BYTES} may be given"
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{JSON} is not a JSON object; send one, such as {{}}")
    for name in value:
        if name not in _SETTINGS:
            raise RequestError(f"{JSON} has {shown(name)}, which is no setting here")
    return {name: item for name, item in value.items() if item is not None}


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{name} is not UTF-8; encode the text so") from None


def _outputs(request: pb.ModelInferRequest, settings: Mapping[str, Any]) -> tuple[str, ...]:
    if len(request.outputs) > len(OUTPUTS):
        raise RequestError(f"outputs has {len(request.outputs)} names; there are {len(OUTPUTS)}")
    names = {output.name: None for output in request.outputs} or dict.fromkeys(OUTPUTS)
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise RequestError(
                f"outputs has {shown(output.name)}, which is no output of this model"
            )
        if output.parameters:
            raise RequestError(
                f"outputs has parameters for {output.name}; outputs take none here, such as "
                "classification"
            )
    for setting, name in _RETURNS.items():
        if settings.get(setting):
            names[name] = None
        elif setting in settings:
            names.pop(name, None)
    return tuple(names)


def _priority(priority: int) -> int:
    """Triton's, whose 1 goes first and whose 0 is none, as the engine's: lower ones go first."""
    if not 0 <= priority <= MAX_PRIORITY:
        raise RequestError(f"priority is {priority}; it must be from 0 to {MAX_PRIORITY}")
    return priority - MAX_PRIORITY - 1 if priority else 0


def field_of(message: str) -> str:
    """The request's field that an error's message is about; ours begin with its name."""
    first = message.partition(" ")[0]
    if first in _KINDS or first in _SETTINGS or first in _OTHER_FIELDS:
        return first
    for word in message.partition(";")[0].split(" "):
        if word in _SAMPLING:
            return word
    return _RUNTIMES.get(first, PROMPT)


_OTHER_FIELDS = {"id", "inputs", "outputs", "parameters", "raw_input_contents", "model_version"}
# Names of the runtime's Request.
_RUNTIMES = {"salt": "cache_salt", "timeout_s": "timeout"}
