"""Calls on a tiny real model: what comes back is what the library gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_serving import NO_RETRY, in_loop, serving

from ortolan.client.aio import AsyncClient
from ortolan.errors import RequestError, TemplateError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.llm import LLM
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.serve.service import Service

CHAT = [{"role": "user", "content": "the cat <|im_end|>"}]


@asynccontextmanager
async def tiny_serving(bundle: Path) -> AsyncIterator[tuple[Service, AsyncClient]]:
    service = Service(Bundle.open(bundle), EngineConfig(max_slots=4))
    await service.warm_up()
    async with serving(service) as address, AsyncClient(address, retry=NO_RETRY) as client:
        yield service, client


def library(bundle: Path) -> LLM:
    return LLM(Bundle.open(bundle), EngineConfig(max_slots=4))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.0001, "seed": 1},
        {"seed": 7, "top_p": 0.9, "n": 3},
        {"temperature": 0, "stop": "e", "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "logit_bias": {70: 5.5, 71: -100}, "frequency_penalty": 1.5},
        {"max_tokens": 0, "prompt_logprobs": 3},
    ],
)
@in_loop
async def test_answer_is_the_librarys(tiny_bundle: Path, settings: dict[str, Any]) -> None:
    """What is lost or changed on the wire would be lost in every language."""
    settings = {"max_tokens": 12, **settings}
    async with tiny_serving(tiny_bundle) as (_, client):
        answers = await client.generate("the red fox", **settings)
    with library(tiny_bundle) as llm:
        expected = llm.generate("the red fox", SamplingParams(**settings))
    assert len(answers) == len(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.text == other.text
        assert answer.token_ids == other.token_ids
        assert answer.finish_reason == other.finish_reason
        assert answer.usage.prompt_tokens == other.usage.prompt_tokens
        assert answer.usage.completion_tokens == other.usage.completion_tokens
        assert plain(answer.logprobs) == plain(other.logprobs)
        assert plain(answer.prompt_logprobs) == plain(other.prompt_logprobs)


def plain(positions: Any) -> list[Any]:
    """Positions of either kind, comparable."""
    return [
        position
        and [(one.token_id, one.bytes, one.logprob) for one in (position.chosen, *position.top)]
        for position in positions
    ]


@in_loop
async def test_chat_is_the_librarys_and_its_texts_stay_text(tiny_bundle: Path) -> None:
    """vllm#31735: what a user spells as a control token is text on every way in."""
    async with tiny_serving(tiny_bundle) as (_, client):
        answer = await client.chat(CHAT, max_tokens=8, temperature=0)
        ids = await client.tokenize(CHAT)
    with library(tiny_bundle) as llm:
        expected = llm.chat(CHAT, SamplingParams(max_tokens=8, temperature=0))
        assert ids == llm.encode_chat(CHAT)
    assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)


@in_loop
async def test_prompt_goes_on_in_its_answer_and_a_chat_does_not(tiny_bundle: Path) -> None:
    """A leading space belongs to a continued text, and not to an answer."""
    async with tiny_serving(tiny_bundle) as (service, client):
        asked = []
        submit = service.submit

        async def noted(request: Request) -> Any:
            asked.append(request.continues)
            return await submit(request)

        service.submit = noted  # type: ignore[method-assign]
        await client.generate("the", max_tokens=1)
        await client.chat(CHAT, max_tokens=1)
        assert asked == [True, False]


@in_loop
async def test_unset_settings_are_the_checkpoints_and_set_ones_win(tiny_bundle: Path) -> None:
    """An unset top_p is not 0, and a temperature that is set to 0 is not unset."""
    async with tiny_serving(tiny_bundle) as (service, client):
        service.sampling_defaults = {"temperature": 0.0}
        greedy = (await client.generate("the", max_tokens=10))[0].token_ids
        assert greedy == (await client.generate("the", max_tokens=10, temperature=0))[0].token_ids
        service.sampling_defaults = {"temperature": 50.0}
        assert greedy == (await client.generate("the", max_tokens=10, temperature=0))[0].token_ids
        assert greedy != (await client.generate("the", max_tokens=10, seed=1))[0].token_ids
        (model,) = await client.models()
        assert dict(model.sampling_defaults) == {"temperature": 50.0}


@in_loop
async def test_no_limit_given_ends_at_the_context(tiny_bundle: Path) -> None:
    """llama.cpp#3969: an answer without a limit ends with `length`, not with an error."""
    async with tiny_serving(tiny_bundle) as (service, client):
        (answer,) = await client.generate("the", temperature=0, ignore_eos=True)
        assert answer.finish_reason == "length"
        used = answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert used == service.context + 1  # the last token needs no place


@in_loop
async def test_cached_tokens_are_counted_apart(tiny_bundle: Path) -> None:
    """llama.cpp#26676: whoever pays by token wants to know."""
    async with tiny_serving(tiny_bundle) as (_, client):
        prompt = list(range(10, 50))
        first, second, salted = [
            (await client.generate(prompt, max_tokens=1, cache_salt=salt))[0].usage
            for salt in ("a", "a", "b")
        ]
        assert (first.cached_tokens, salted.cached_tokens) == (0, 0)
        assert second.cached_tokens >= 16
        assert second.prompt_tokens == 40


@in_loop
async def test_empty_prompt_is_bos(tiny_bundle: Path) -> None:
    """vllm#7283: an empty text is a request only where the model has a BOS."""
    async with tiny_serving(tiny_bundle) as (service, client):
        assert await client.tokenize("") == [service.tokenizer.bos_id]
        service.tokenizer.bos_id = None
        with pytest.raises(RequestError, match="empty"):
            await client.generate("")


@in_loop
async def test_what_the_template_refuses_is_the_callers(tiny_bundle: Path) -> None:
    """jan#6254: the template's words help; an internal error does not."""
    async with tiny_serving(tiny_bundle) as (_, client):
        with pytest.raises(TemplateError, match="at least one message"):
            await client.chat([])
        assert await client.chat([{"role": "user", "content": None}], max_tokens=1)


@in_loop
async def test_tokenize_and_detokenize_are_each_others_reverse(tiny_bundle: Path) -> None:
    """The counts that clients make beforehand must be the server's."""
    async with tiny_serving(tiny_bundle) as (_, client):
        text = "the brown fox: 狐 🦊"
        ids = await client.tokenize(text)
        assert await client.detokenize(ids) == text
        (answer,) = await client.generate(text, max_tokens=1)
        assert answer.usage.prompt_tokens == len(ids)
        with pytest.raises(RequestError, match="300"):
            await client.detokenize([300])


@in_loop
async def test_model_says_what_is_served(tiny_bundle: Path) -> None:
    """Clients plan by these numbers."""
    async with tiny_serving(tiny_bundle) as (service, client):
        (model,) = await client.models()
        assert (model.name, model.architecture) == ("tiny", "llama")
        assert (model.vocab_size, model.context_len) == (300, service.context)
        assert (model.has_tokenizer, model.has_chat_template) == (True, True)
        assert model.max_slots == 4
        stats = await client.stats()
        assert stats.ended == {"length": 1}  # the warm-up
        assert stats.not_ready == ""


@in_loop
async def test_sixteen_calls_at_once_get_their_own_answers(tiny_bundle: Path) -> None:
    """vllm#23138: what else is running must not show."""
    async with tiny_serving(tiny_bundle) as (_, client):
        prompts = [[10 + i, 20 + i, 30 + i] for i in range(16)]
        alone = [await client.generate(ids, max_tokens=10, temperature=0) for ids in prompts]
        together = await asyncio.gather(
            *(client.generate(ids, max_tokens=10, temperature=0) for ids in prompts)
        )
        assert [a[0].token_ids for a in alone] == [a[0].token_ids for a in together]
