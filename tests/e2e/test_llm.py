"""What a caller of the Python interface relies on, on the real model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import ortolan
from ortolan import LLM, SamplingParams
from ortolan.errors import BundleError, RequestError, TemplateError, UsageError

CONTEXT = 256
QUESTION = [{"role": "user", "content": "Name three colours."}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(smollm2_bundle: Path) -> Iterator[LLM]:
    with ortolan.load(smollm2_bundle, max_context=CONTEXT, max_slots=3) as llm:
        yield llm


def texts(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    return "".join(event.text for event in llm.stream(prompt, params))


def test_stream_and_generate_give_the_same_answer(llm: LLM) -> None:
    events = list(llm.stream("The three primary colours are", GREEDY))
    (whole,) = llm.generate(["The three primary colours are"], GREEDY)
    assert "".join(event.text for event in events) == whole.text
    assert tuple(event.token_id for event in events) == whole.token_ids
    assert [event.finish_reason for event in events] == [None] * 23 + ["length"]
    assert events[-1].usage == whole.usage or events[-1].usage is not None
    assert whole.usage.completion_tokens == len(whole.token_ids) == 24
    assert whole.text == llm.tokenizer.decode(whole.token_ids)


def test_ids_and_text_are_one_prompt(llm: LLM) -> None:
    ids = llm.encode("Once upon a time")
    assert [c.token_ids for c in llm.generate(ids, GREEDY)] == [
        c.token_ids for c in llm.generate("Once upon a time", GREEDY)
    ]


def test_several_prompts_come_back_in_their_order(llm: LLM) -> None:
    prompts = ["One, two, three,", "Red, green,", "One, two, three,"]
    first, second, third = llm.generate(prompts, GREEDY)
    assert first.token_ids == third.token_ids != second.token_ids


def test_chat_ends_with_the_end_token_outside_the_text(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SamplingParams(temperature=0))
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in llm.tokenizer.eos_ids
    assert "<|" not in answer.text


def test_ignore_eos_goes_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)
    assert llm.chat(QUESTION, params).finish_reason == "length"


def test_second_turn_reuses_the_first_prompt_and_says_so(llm: LLM) -> None:
    """`cached_tokens` counts what prefill wrote and no more (llama.cpp#26676, rule 1b)."""
    messages = [{"role": "user", "content": "My name is Ada. What is a lock?"}]
    first = llm.chat(messages, GREEDY)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And a key?"},
    ]
    second = llm.chat(messages, GREEDY)
    # The last tokens of the first prompt open the assistant's answer, so all of it is shared:
    # as many whole blocks as it filled.
    assert second.usage.cached_tokens == first.usage.prompt_tokens // 16 * 16 > 0


def test_seed_repeats_and_differs(llm: LLM) -> None:
    def drawn(seed: int) -> str:
        return texts(llm, "The weather today", SamplingParams(seed=seed, max_tokens=12))

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_stop_string_across_tokens_never_shows(llm: LLM) -> None:
    """vllm#3574: a stop string's start leaked when it straddled tokens."""
    prompt = "The three primary colours are"
    whole = texts(llm, prompt, GREEDY)
    stop = whole[15:26]  # begins and ends inside words
    assert " " in stop.strip()
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop])
    events = list(llm.stream(prompt, params))
    assert "".join(event.text for event in events) == whole[: whole.index(stop)]
    assert events[-1].finish_reason == "stop"


def test_stop_token_id_ends_the_answer(llm: LLM) -> None:
    prompt = "The three primary colours are"
    (whole,) = llm.generate(prompt, GREEDY)
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[whole.token_ids[5]])
    (cut,) = llm.generate(prompt, params)
    assert cut.token_ids == whole.token_ids[:6]
    assert cut.finish_reason == "stop"


def test_characters_are_never_cut(llm: LLM) -> None:
    """llama.cpp#4036: half a character must not be shown, whatever the tokens are."""
    emoji = llm.tokenizer.encode("🙂")
    assert len(emoji) > 1
    bias = dict.fromkeys(emoji, 100.0)
    params = SamplingParams(seed=3, max_tokens=30, logit_bias=bias, ignore_eos=True)
    events = list(llm.stream("Smile:", params))
    joined = "".join(event.text for event in events)
    assert joined == llm.tokenizer.decode([e.token_id for e in events if e.token_id is not None])


def test_context_is_the_limit_where_none_is_given(llm: LLM) -> None:
    """llama.cpp#3969: without max_tokens generation must end, and say why."""
    ids = llm.encode("word " * 300)[:250]
    (answer,) = llm.generate(ids, SamplingParams(temperature=0, ignore_eos=True))
    # The last token needs no room of its own: it is never read again.
    assert len(answer.token_ids) == CONTEXT - 250 + 1
    assert answer.finish_reason == "length"


def test_prompt_as_long_as_the_context_gets_one_token(llm: LLM) -> None:
    ids = llm.encode("word " * 300)[:CONTEXT]
    assert len(llm.generate(ids, GREEDY)[0].token_ids) == 1


def test_max_tokens_zero_makes_none(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0)
    (event,) = llm.stream("Hello", params)
    assert (event.token_id, event.text, event.finish_reason) == (None, "", "length")
    assert llm.generate("Hello", params)[0].token_ids == ()


def test_one_token_prompt_works(llm: LLM) -> None:
    assert len(llm.generate([504], GREEDY)[0].token_ids) == 24


def test_empty_prompt_becomes_bos(llm: LLM) -> None:
    """vllm#7283: refused unless the model has a token to begin with, as this one has."""
    assert llm.encode("") == [llm.tokenizer.bos_id]


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, repetition_penalty=1.5)
    for event in llm.stream("One, two,", params):
        assert event.logprob is not None
        assert event.logprob.token_id == event.token_id
        assert len(event.top_logprobs) == 2
        assert event.top_logprobs[0].logprob >= event.logprob.logprob


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 49152], {}, "token id 49152"),
        ([-1], {}, "token id -1"),
        (["a"], {}, "must be text or a list of token ids"),
        ([1] * (CONTEXT + 1), {}, f"has {CONTEXT + 1} tokens; the context holds {CONTEXT}"),
        ("a", {"logit_bias": {60000: 1.0}}, "logit_bias holds the token id 60000"),
        ("a", {"stop_token_ids": [60000]}, "stop_token_ids holds the token id 60000"),
        ("a", {"top_k": 60000}, "top_k is 60000"),
    ],
)
def test_impossible_request_is_refused_at_once(
    llm: LLM, prompt: str | list[int], params: dict[str, object], said: str
) -> None:
    """Before the first event, and with the numbers that explain it (llama.cpp#17284)."""
    with pytest.raises(RequestError, match=said):
        llm.stream(prompt, SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[], [5, 49152], [5, -1], [5, 2**62], [1] * (CONTEXT + 1)])
def test_logits_of_impossible_ids_are_refused(llm: LLM, ids: list[int]) -> None:
    """Numbers for a token that does not exist would look like any others."""
    with pytest.raises(RequestError):
        llm.logits(ids)


def test_bundle_given_by_a_relative_path_survives_a_change_of_folder(
    smollm2_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services change their folder; files that are read later must still be found."""
    monkeypatch.chdir(smollm2_bundle.parent)
    with ortolan.load(smollm2_bundle.name, max_context=CONTEXT, max_slots=1) as llm:
        monkeypatch.chdir(tmp_path)
        assert llm.encode_chat(QUESTION)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 29}, r"past_key_values\.29\.key is"),
        ({"num_layers": 31}, r"past_key_values\.30\.key is missing"),
        ({"vocab_size": 60000}, "logits is"),
        ({"head_dim": 32}, "past_key_values"),
    ],
)
def test_manifest_that_contradicts_the_graphs_is_refused(
    smollm2_bundle: Path, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    """Buffers of the wrong shape would be read past their end, or fail without a reason."""
    manifest = json.loads((smollm2_bundle / "manifest.json").read_text())
    manifest["model"] |= change
    for file in smollm2_bundle.iterdir():
        if file.is_file() and file.name != "manifest.json":
            os.link(file, tmp_path / file.name)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=said):
        ortolan.load(tmp_path, max_context=CONTEXT, max_slots=1)


def test_roles_that_the_template_rejects_are_the_callers_error(llm: LLM) -> None:
    with pytest.raises((TemplateError, RequestError)):
        llm.stream_chat([{"content": "no role"}])


def test_streams_may_be_interleaved(llm: LLM) -> None:
    """Each holds a slot of its own, so the answers do not meet."""
    prompts = ["The three primary colours are", "Once upon a time"]
    alone = [texts(llm, prompt, GREEDY) for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    together = ["", ""]
    for _ in range(24):
        for index, stream in enumerate(streams):
            together[index] += next(stream).text
    assert together == alone


def test_abandoned_stream_frees_its_slot(llm: LLM) -> None:
    """A caller that stops reading must not leak KV memory."""
    open_streams = []
    for _ in range(3):
        stream = llm.stream("Once", GREEDY)
        next(stream)
        open_streams.append(stream)
    engine = llm._running()
    assert engine.stats().running == 3
    assert engine.stats().kv_tokens > 0
    for stream in open_streams:
        stream.close()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)


def test_closed_model_says_so(smollm2_bundle: Path) -> None:
    llm = ortolan.load(smollm2_bundle, max_context=CONTEXT, max_slots=1)
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.stream("Hello")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefill_chunk": 1}, "prefill_chunk is 1"),
        ({"max_slots": 0}, "max_slots is 0"),
        ({"max_context": 100_000}, "max_context is 100000"),
        ({"accuracy": "better"}, "accuracy is 'better'"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": "2"}, "threads is '2'"),
        ({"max_slots": 1.5}, r"max_slots is 1\.5"),
        ({"provider": None}, "provider is None"),
        ({"thread": 2}, "thread is no setting; there are provider, threads"),
    ],
)
def test_impossible_setting_is_refused(
    smollm2_bundle: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ortolan.load(smollm2_bundle, **settings)
