"""Chat completions, judged by the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from http_live import Live

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]


def ask(client: openai.OpenAI, **given: Any) -> Any:
    """A short greedy answer."""
    settings = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**{**settings, **given})


def text_of(events: Any, choice: int = 0) -> str:
    return "".join(
        part.delta.content or ""
        for event in events
        for part in event.choices
        if part.index == choice
    )


def test_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    """A client that switches streaming on must not get another answer."""
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert whole.object == "chat.completion"
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert text_of(events) == whole.choices[0].message.content != ""
    assert events[0].choices[0].delta.role == "assistant"
    assert whole.choices[0].message.role == "assistant"
    reasons = [event.choices[0].finish_reason for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert whole.choices[0].finish_reason == "length"
    assert len({event.id for event in events}) == 1


def test_usage_counts_what_was_processed_and_cached(client: openai.OpenAI) -> None:
    """llama.cpp#26676: whoever pays by usage must see what the cache saved."""
    messages = [{"role": "user", "content": "the usage of a prompt that nobody asked before. " * 4}]
    first = ask(client, messages=messages).usage
    assert first.completion_tokens == 12
    assert first.total_tokens == first.prompt_tokens + 12
    assert first.prompt_tokens_details.cached_tokens == 0
    events = list(
        ask(client, messages=messages, stream=True, stream_options={"include_usage": True})
    )
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].choices == []
    second = events[-1].usage
    assert second.prompt_tokens == first.prompt_tokens
    assert 16 <= second.prompt_tokens_details.cached_tokens < second.prompt_tokens


def test_choices_of_a_stream_are_told_apart(client: openai.OpenAI) -> None:
    """n answers share one stream; a client sorts them by index."""
    given = {"n": 3, "temperature": 1.5, "seed": 7}
    whole = ask(client, **given)
    events = list(ask(client, stream=True, **given))
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [text_of(events, index) for index in range(3)] == texts
    assert len(set(texts)) > 1
    assert whole.usage.completion_tokens == 36
    assert sum(part.finish_reason == "length" for e in events for part in e.choices) == 3


def test_async_clients_stream_side_by_side(server: Live) -> None:
    """Twelve at once on four slots: each gets the answer that it gets alone."""

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=16, seed=seed, stream=True
                )
                return text_of([event async for event in stream])

            together = await asyncio.gather(*(one(i % 6) for i in range(12)))
            return [*together, *[await one(i) for i in range(6)]]

    texts = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert texts[:6] == texts[6:12] == texts[12:]
    assert len(set(texts)) == 6


def test_logprobs_carry_bytes(client: openai.OpenAI) -> None:
    """vllm#6626: a token that is a part of a character has no text, but it has bytes."""
    whole = ask(client, logprobs=True, top_logprobs=3, max_tokens=24, temperature=1.5, seed=1)
    content = whole.choices[0].logprobs.content
    assert len(content) == 24
    for entry in content:
        assert entry.token == bytes(entry.bytes).decode("utf-8", "replace")
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    shown = b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")
    assert shown == whole.choices[0].message.content
    assert "\ufffd" in shown  # random weights do not know what a character is
    events = ask(client, logprobs=True, max_tokens=24, temperature=1.5, seed=1, stream=True)
    streamed = [e for event in events for e in event.choices[0].logprobs.content]
    assert [e.bytes for e in streamed] == [e.bytes for e in content]
    assert all(e.top_logprobs == [] for e in streamed)


def test_stop_string_never_shows(client: openai.OpenAI) -> None:
    """vllm#3574: a stop string that straddles tokens must not leak its start."""
    text = ask(client, max_tokens=40).choices[0].message.content
    stop = text[11:14]
    cut = text[: text.index(stop)]
    whole = ask(client, max_tokens=40, stop=[stop, "\0never"])
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (cut, "stop")
    assert text_of(ask(client, max_tokens=40, stop=stop, stream=True)) == cut


def test_sampling_fields_reach_the_sampler(client: openai.OpenAI) -> None:
    """A setting that is accepted and dropped is worse than one that is refused."""
    plain = ask(client).choices[0].message.content
    forced = ask(client, logit_bias={"40": 100}).choices[0].message.content
    assert forced == forced[:1] * 12
    assert forced != plain
    assert ask(client, temperature=2, extra_body={"top_k": 1}).choices[0].message.content == plain
    assert ask(client, temperature=2, extra_body={"min_p": 1.0}).choices[0].message.content == plain
    assert ask(client, temperature=2, top_p=1e-6).choices[0].message.content == plain
    for penalty in (
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"extra_body": {"repetition_penalty": 1.5}},
    ):
        punished = ask(client, max_tokens=40, **penalty).choices[0].message.content
        assert not punished.startswith(ask(client, max_tokens=40).choices[0].message.content)


def test_stop_tokens_and_end_tokens(client: openai.OpenAI) -> None:
    """An id that ends an answer ends it; `ignore_eos` writes past the end token."""
    forced: dict[str, Any] = {"logit_bias": {"40": 100}}
    stopped = ask(client, **forced, extra_body={"stop_token_ids": [40]})
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 1)
    ended = ask(client, logit_bias={"2": 100})
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("", "stop")
    ignored = ask(client, logit_bias={"2": 100}, extra_body={"ignore_eos": True})
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (12, "length")


def test_both_spellings_of_the_limit(client: openai.OpenAI) -> None:
    """New clients send one, old ones the other; both at once must not contradict."""
    settings = {"model": "tiny", "messages": HELLO}
    new = client.chat.completions.create(**settings, max_completion_tokens=3)
    old = client.chat.completions.create(**settings, max_tokens=3)
    assert new.usage.completion_tokens == old.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens and max_tokens differ"):
        client.chat.completions.create(**settings, max_completion_tokens=3, max_tokens=4)


def test_no_limit_is_the_context(client: openai.OpenAI, server: Live) -> None:
    """llama.cpp#3969: without max_tokens the context is the limit, and the reason is length."""
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, logit_bias={"40": 100}, extra_body={"ignore_eos": True}
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == server.service.context + 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
        [{"role": "developer", "content": "Be brief."}, *HELLO],
        [*HELLO, {"role": "assistant", "content": None}, *HELLO],
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}, *HELLO],
        [{"role": "user", "content": "Say hello.", "name": "Ann"}],
        [{"role": "user", "content": [{"type": "text", "text": "Say "}] * 2}],
    ],
)
def test_messages_in_all_their_spellings(client: openai.OpenAI, messages: Any) -> None:
    """llama.cpp#13471: a conversation that another server accepted goes on here."""
    assert ask(client, messages=messages).usage.completion_tokens == 12


def test_developer_is_system(server: Live) -> None:
    """The newer word for a role must not be a role of its own to the template."""
    ids = [
        server.post("/tokenize", {"messages": [{"role": role, "content": "x"}]}).json["tokens"]
        for role in ("system", "developer")
    ]
    assert ids[0] == ids[1]
