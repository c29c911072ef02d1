"""Plain completions, judged by the official client: prompts in four shapes, echo, scoring."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_live import Live

PROMPT = "once upon a time in the "


def complete(client: openai.OpenAI, **given: Any) -> Any:
    settings = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    return client.completions.create(**{**settings, **given})


def text_of(events: Any, choice: int = 0) -> str:
    return "".join(part.text for event in events for part in event.choices if part.index == choice)


def ids_of(server: Live, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text}).json["tokens"]
    return ids


def test_text_and_ids_are_the_same_prompt(client: openai.OpenAI, server: Live) -> None:
    """vllm#6699: one rule for what surrounds a prompt, however it comes."""
    ids = ids_of(server, PROMPT)
    whole = complete(client)
    assert whole.object == "text_completion"
    assert complete(client, prompt=ids).choices[0].text == whole.choices[0].text
    assert text_of(complete(client, stream=True)) == whole.choices[0].text != ""
    assert whole.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_are_numbered_in_order(
    client: openai.OpenAI, server: Live, stream: bool
) -> None:
    """A client that sends a batch finds answer k of prompt p at p * n + k."""
    texts = ["once", "upon a time", "in the end of it"]
    alone = [complete(client, prompt=text).choices[0].text for text in texts]
    for prompts in (texts, [ids_of(server, text) for text in texts]):
        answer = complete(client, prompt=prompts, n=2, stream=stream)
        if stream:
            events = list(answer)
            assert [text_of(events, i) for i in range(6)] == [a for a in alone for _ in "12"]
        else:
            assert [choice.index for choice in answer.choices] == list(range(6))
            assert [choice.text for choice in answer.choices] == [a for a in alone for _ in "12"]
            assert answer.usage.prompt_tokens == sum(len(ids_of(server, t)) for t in texts)
            assert answer.usage.completion_tokens == 6 * 8


def test_echo_puts_the_prompt_first(client: openai.OpenAI, server: Live) -> None:
    """With echo the text is the prompt's own, not what its tokens decode to by chance."""
    answer = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + answer
    assert text_of(complete(client, echo=True, stream=True)) == PROMPT + answer
    ids = ids_of(server, PROMPT)
    assert complete(client, prompt=ids, echo=True).choices[0].text == PROMPT + answer


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_scores_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    """vllm#6521: evaluation programs ask for nothing but the prompt's logprobs."""
    answer = complete(client, echo=True, max_tokens=0, logprobs=2, stream=stream)
    if stream:
        (answer,) = answer
    (choice,) = answer.choices
    found = choice.logprobs
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert "".join(found.tokens) == PROMPT
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(logprob < 0 for logprob in found.token_logprobs[1:])
    for token, logprob, top in zip(
        found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
    ):
        assert len(top) in (2, 3)
        assert top[token] == logprob
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert PROMPT[offset : offset + len(token)] == token
    if not stream:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            len(found.tokens),
            0,
        )


def test_score_of_a_prompt_is_what_writing_it_said(client: openai.OpenAI, server: Live) -> None:
    """Scoring and writing must agree on how likely a token is."""
    ids = ids_of(server, PROMPT)
    written = complete(client, prompt=ids, logprobs=0, logit_bias={"40": 100}).choices[0]
    scored = complete(client, prompt=ids + [40] * 8, echo=True, max_tokens=0, logprobs=0)
    assert scored.choices[0].logprobs.token_logprobs[-8:] == pytest.approx(
        written.logprobs.token_logprobs, abs=0.01
    )


def test_parts_of_characters_are_told_apart(client: openai.OpenAI) -> None:
    """vllm#6626: two halves of characters spelled alike would be one key of the likeliest."""
    answer = complete(client, logprobs=5, max_tokens=60, temperature=1.5, seed=3).choices[0]
    parts = [token for token in answer.logprobs.tokens if token.startswith("bytes:\\x")]
    assert parts
    for top in answer.logprobs.top_logprobs:
        assert len(top) in (5, 6)
    for token, offset in zip(answer.logprobs.tokens, answer.logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert answer.text[offset : offset + len(token)] == token
    events = complete(client, logprobs=5, max_tokens=60, temperature=1.5, seed=3, stream=True)
    streamed = [event.choices[0].logprobs for event in events]
    assert [o for s in streamed for o in s.text_offset] == answer.logprobs.text_offset
    assert [t for s in streamed for t in s.tokens] == answer.logprobs.tokens


def test_no_likeliest_were_asked_for(client: openai.OpenAI) -> None:
    """logprobs 0 is the tokens' own, and not a switch that is off."""
    found = complete(client, logprobs=0).choices[0].logprobs
    assert len(found.token_logprobs) == 8
    assert found.top_logprobs is None
    assert complete(client).choices[0].logprobs is None


def test_tokens_and_back(server: Live) -> None:
    """What /tokenize says is what a completion counts, and /detokenize undoes it."""
    answered = server.post("/tokenize", {"prompt": PROMPT}).json
    assert answered["count"] == len(answered["tokens"])
    assert answered["max_model_len"] == server.service.context
    assert server.post("/detokenize", {"tokens": answered["tokens"]}).json == {"prompt": PROMPT}
    spelled = server.post("/tokenize", {"prompt": "<|im_end|>"}).json["tokens"]
    assert 2 not in spelled  # vllm#31735: a user's text is text


def test_models_are_listed(client: openai.OpenAI) -> None:
    """Clients choose a model from the list, and look it up by name."""
    (listed,) = client.models.list().data
    assert listed.id == "tiny"
    assert client.models.retrieve("tiny").created == listed.created > 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")
