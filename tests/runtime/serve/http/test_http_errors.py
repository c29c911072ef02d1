"""What is refused, how it is said, and that it is said shortly."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_live import Live

from ortolan.runtime.serve.http_fields import IGNORED, REFUSED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SECRET = "a-secret-that-nobody-may-repeat"


def chat(server: Live, **fields: Any) -> Any:
    return server.post(CHAT, {"messages": HELLO, "max_tokens": 2, **fields})


def complete(server: Live, **fields: Any) -> Any:
    return server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 2, **fields})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_exist_is_refused_by_name(server: Live, name: str) -> None:
    """A tool or a schema that is silently ignored gives a wrong answer that looks right."""
    for value in ({"type": "x"}, ["x"], True, 7, "x"):
        answered = chat(server, **{name: value})
        assert answered.status == 400, answered.body
        assert answered.error["param"] == name
        assert answered.error["code"] == "unsupported_parameter"
        assert name in answered.error["message"]
    for harmless in (None, *REFUSED[name]):
        assert chat(server, **{name: harmless}).status == 200


def test_unknown_fields_are_refused_by_name(server: Live) -> None:
    """A misspelled setting must not be dropped."""
    answered = chat(server, temprature=0)
    assert (answered.status, answered.error["param"]) == (400, "temprature")
    answered = chat(server, **{"\n" + SECRET * 999: 1})
    assert len(answered.body) < 500
    for name in IGNORED:
        assert chat(server, **{name: {"any": "thing"}}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 301}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": "a" * 4097}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": 7}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 7}}, "stream_options.include_usage"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"model": 7}, "model"),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    server: Live, fields: dict[str, Any], param: str
) -> None:
    """vllm#16529, #54195, sglang#38712: none of these may reach the model, or pass unseen."""
    for answered in (chat(server, **fields), complete(server, **fields)):
        if "max_completion_tokens" in fields and "no field" in answered.error["message"]:
            continue
        assert answered.status == 400, answered.body
        assert answered.error["type"] == "invalid_request_error"
        assert answered.error["param"] == param, answered.error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "pilot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 7}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
)
def test_conversations_that_cannot_be_served(
    server: Live, fields: dict[str, Any], param: str
) -> None:
    """The caller's error is told as the caller's, with the place."""
    answered = chat(server, **fields)
    assert (answered.status, answered.error["param"]) == (400, param), answered.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, None),  # this tokenizer has a BOS, which is then the prompt
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x", 5]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [5.5]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[5], [10**30]], "echo": True}, "prompt"),
        ({"prompt": [5] * 3000}, "prompt"),
        ({"prompt": [[5]] * 129}, "n"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"echo": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_prompts_that_cannot_be_served(
    server: Live, fields: dict[str, Any], param: str | None
) -> None:
    """vllm#7283, llama.cpp#17284: refused at the door, and nothing waits for ever."""
    answered = complete(server, **fields)
    if param is None:
        assert answered.status == 200
    else:
        assert (answered.status, answered.error["param"]) == (400, param), answered.body


def test_tokens_that_do_not_exist_have_no_text(server: Live) -> None:
    """An id from nowhere must not reach the tokenizer's library."""
    for tokens in ([300], [-1], [10**30], ["x"], [True], "x", None):
        answered = server.post("/detokenize", {"tokens": tokens})
        assert (answered.status, answered.error["param"]) == (400, "tokens")
    for body in ({}, {"prompt": 7}, {"prompt": "x", "messages": HELLO}):
        assert server.post("/tokenize", body).error["param"] == "prompt"


def test_too_long_a_prompt_is_refused_with_both_numbers(server: Live) -> None:
    """Whoever has to shorten it needs to know by how much."""
    message = complete(server, prompt=[5] * 3000).error["message"]
    assert "3000" in message
    assert str(server.service.context) in message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"7", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"metadata": ' + b"[" * 31 + b"]" * 31 + b"}", 400),  # only the prompt is missing
        (b'{"prompt": "' + b"[" * 100 + b'\\"[", "max_tokens": 1}', 200),
        (b'{"prompt": "' + b"x" * (4 << 20) + b'"}', 413),
    ],
)
def test_bodies_are_bounded(server: Live, body: bytes, status: int) -> None:
    """llama.cpp#27434, vllm#49239: neither what comes in nor what goes out grows without end."""
    answered = server.call("POST", COMPLETIONS, body)
    assert answered.status == status, answered.body[:500]
    if status != 200:
        assert answered.error["message"]
        assert len(answered.body) < 800


def test_large_bodies_are_answered_like_small_ones(server: Live) -> None:
    """From 32 KiB on, parsing and checking happen on a thread."""
    filler = {"metadata": ["x" * 100] * 400}
    assert complete(server, echo=True, prompt=[5, 6], **filler).status == 200
    assert chat(server, logprobs=True, **filler).status == 200
    assert chat(server, messages="x", **filler).error["param"] == "messages"
    assert server.call("POST", COMPLETIONS, b"[" * 40_000).error["code"] == "invalid_json"


def test_depth_is_told_from_length(server: Live) -> None:
    """A flat body of many brackets is no deep one."""
    answered = server.post(COMPLETIONS, {"prompt": [[5]] * 40, "max_tokens": 0})
    assert answered.status == 200
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    answered = server.post(COMPLETIONS, {"prompt": "x", "metadata": deep})
    assert answered.error["code"] == "invalid_json"


def test_errors_never_echo_the_input(server: Live) -> None:
    """vllm#49239: an error travels into logs and other people's screens."""
    long = SECRET * 2000
    for path, body in [
        (COMPLETIONS, {"prompt": "x", "model": long}),
        (COMPLETIONS, {"prompt": "x", "temperature": long}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {long: 1}}),
        (COMPLETIONS, {"prompt": "x", "stop": [long]}),
        (CHAT, {"messages": [{"role": long, "content": ""}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "u": long}]}]}),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "name": long}]}),
    ]:
        answered = server.post(path, body)
        assert answered.status in (400, 404)
        assert len(answered.body) < 800
        assert SECRET.encode() not in answered.body


def test_wrong_doors(server: Live) -> None:
    """Errors of routing have the shape of all others; clients read them the same way."""
    for method, path, status in [
        ("GET", "/nothing", 404),
        ("POST", "/", 405),
        ("GET", "/v1/models/" + SECRET, 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health/live", 405),
    ]:
        answered = server.call(method, path)
        assert answered.status == status
        assert answered.error["message"]
        assert SECRET.encode() not in answered.body
    assert server.call("GET", COMPLETIONS).headers["allow"] == "POST"
    for headers in ({"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}):
        assert server.post(COMPLETIONS, {"prompt": "x"}, headers).status == 415


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    """A client with the wrong name must not get another model's answer."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
