"""Whether an engine computes what it should, by results that something else computed.

The reference may be a golden file's (ortolan/cli/golden.py), or the same bundle's on the CPU with
float32 activations, which every build of ONNX Runtime can run: that is how a provider is judged
where there is no golden file, and before a server says that it is ready.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import EngineError
from ortolan.runtime.bundle import Bundle
from ortolan.runtime.params import EngineConfig, Request, SamplingParams
from ortolan.runtime.text.no_tokenizer import NoTokenizer
from ortolan.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ortolan.runtime.engine.engine import Engine

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.floating[Any]]

# Read together, so that rows of unlike lengths decode side by side.
_TEXTS = (
    "The capital of France is",
    "A list of three numbers: 1, 2,",
    "def add(a, b):\n    # The sum of two numbers, which may be of any kind that knows how to\n"
    "    # add another to itself; nothing is checked.\n    return",
)
_GREEDY_TOKENS = 12


@dataclass(frozen=True)
class Limits:
    """What a case must keep to, besides the greedy tokens that are owed.

    None: not judged. KL is in nats, of the whole last row.
    """

    max_abs_error: float | None
    kl: float | None


# KL at default accuracy: 0.003 to 0.017 were measured on the seven cases of SmolLM2-135M with its
# Q4_1 weights, where 0.35 was the mean of weights rounded a second time, to symmetric int4.
LIMITS = {
    "exact": Limits(max_abs_error=2e-3, kl=None),
    "default": Limits(max_abs_error=None, kl=0.05),
}


@dataclass(frozen=True)
class Expected:
    """What should come out of one prompt.

    logits: float32 [vocab] after it. greedy_ids: what follows; greedy_gaps: the distance between
    the best and the second-best logit at each of these steps.
    """

    name: str
    prompt_ids: list[int]
    logits: FloatArray
    greedy_ids: list[int]
    greedy_gaps: list[float]


@dataclass(frozen=True)
class Outcome:
    """How one prompt came out; `failures` has a sentence for each limit that was not kept."""

    name: str
    max_abs_error: float
    kl: float
    greedy_equal: int
    greedy_owed: int
    failures: tuple[str, ...]


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Log-probabilities of rows of logits [..., vocab], float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def kl_rows(log_p: FloatArray, log_q: FloatArray) -> FloatArray:
    """KL(p || q) in nats of rows of log-probabilities [..., vocab]."""
    return np.asarray(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))


def kl_divergence(reference: FloatArray, ours: FloatArray) -> float:
    """KL(reference || ours) in nats of the distributions that two rows of logits stand for."""
    return float(kl_rows(log_softmax(reference), log_softmax(ours)))


def owed_tokens(gaps: Sequence[float], max_abs_error: float) -> int:
    """How many leading greedy tokens must match.

    An error of e on every logit can turn the order of two that lie at most 2 e apart; what
    follows such a step may rightly differ, so nothing after it is counted.
    """
    owed = 0
    while owed < len(gaps) and gaps[owed] > 2 * max_abs_error:
        owed += 1
    return owed


def equal_from_start(expected: Sequence[int], found: Sequence[int]) -> int:
    """The length of the common beginning."""
    equal = 0
    while equal < min(len(expected), len(found)) and expected[equal] == found[equal]:
        equal += 1
    return equal


def failures_of(
    limits: Limits,
    max_abs_error: float,
    kl: float | None,
    wanted: Sequence[int],
    found: Sequence[int],
) -> list[str]:
    """A sentence for each limit that is not kept. wanted, found: greedy tokens that are owed."""
    failures = []
    # Written so that NaN fails.
    if limits.max_abs_error is not None and not max_abs_error <= limits.max_abs_error:
        failures.append(f"logits are off by {max_abs_error:.2g}, allowed {limits.max_abs_error:g}")
    if limits.kl is not None and kl is not None and not kl <= limits.kl:
        failures.append(f"KL is {kl:.2g}, allowed {limits.kl:g}")
    equal = equal_from_start(wanted, found)
    if equal < len(wanted):
        got = found[equal] if equal < len(found) else "missing"
        failures.append(f"greedy token {equal} is {got}, expected {wanted[equal]}")
    return failures


def expected_by_cpu(bundle: Bundle, config: EngineConfig, tokenizer: Tokenizer) -> list[Expected]:
    """What the CPU gives for a few prompts, with float32 activations. Raises what opening does.

    config: threads and the cache folder are taken from it.
    """
    from ortolan.runtime.engine.opening import open_engine

    context = min(bundle.manifest.model.max_context, config.max_context or 128)
    plain = EngineConfig(
        threads=config.threads,
        cache_dir=config.cache_dir,
        max_slots=len(_TEXTS),
        max_context=context,
        prefix_cache_mb=0,
        accuracy="exact",
    )
    engine = open_engine(bundle, plain, tokenizer)
    prompts = _prompts(tokenizer, bundle.manifest.model.vocab_size, context)
    answers = _greedy(engine, prompts, [_GREEDY_TOKENS] * len(prompts))
    found = []
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = [*prompt, *answer]
        rows = engine.logits(ids, range(len(prompt) - 1, len(ids) - 1))
        best = np.partition(rows, -2, axis=-1)[:, -2:]
        gaps = (best[:, 1] - best[:, 0]).tolist()
        found.append(Expected(f"prompt {place + 1}", prompt, rows[0], answer, gaps))
    return found


def compare(engine: Engine, cases: Sequence[Expected], limits: Limits) -> list[Outcome]:
    """Read every prompt, and continue all of them together."""
    rows = [engine.logits(case.prompt_ids, [len(case.prompt_ids) - 1])[0] for case in cases]
    errors = [float(np.abs(row - case.logits).max()) for row, case in zip(rows, cases, strict=True)]
    owed = [owed_tokens(case.greedy_gaps, error) for case, error in zip(cases, errors, strict=True)]
    answers = _greedy(engine, [case.prompt_ids for case in cases], owed)
    outcomes = []
    for case, row, error, count, answer in zip(cases, rows, errors, owed, answers, strict=True):
        kl, wanted = kl_divergence(case.logits, row), case.greedy_ids[:count]
        failures = failures_of(limits, error, kl, wanted, answer)
        equal = equal_from_start(wanted, answer)
        outcomes.append(Outcome(case.name, error, kl, equal, count, tuple(failures)))
    return outcomes


def self_test(engine: Engine, cases: Sequence[Expected], config: EngineConfig) -> None:
    """Raises EngineError if the engine's results are not those of `cases`."""
    outcomes = compare(engine, cases, LIMITS[config.accuracy])
    failures = [f"{one.name}: {sentence}" for one in outcomes for sentence in one.failures]
    logger.info("self-test", extra={"outcomes": [dataclasses.asdict(one) for one in outcomes]})
    if failures:
        raise EngineError(
            f"provider {config.provider} does not compute what the CPU does ({failures[0]}); use "
            "another provider or version of it, or see more with: ortolan verify BUNDLE "
            f"--provider {config.provider}"
        )


def _prompts(tokenizer: Tokenizer, vocab_size: int, context: int) -> list[list[int]]:
    """A few, of lengths that differ; without a tokenizer, of ids at hand."""
    most = max(context - _GREEDY_TOKENS, 1)
    if isinstance(tokenizer, NoTokenizer):
        sizes = (5, 12, 40)
        return [[7 * (i + n) % vocab_size for i in range(min(n, most))] for n in sizes]
    return [tokenizer.encode(text)[:most] for text in _TEXTS]


def _greedy(engine: Engine, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
    """So many greedy tokens after each prompt, all of them made together."""
    handles = []
    for prompt, count in zip(prompts, counts, strict=True):
        # An end token is compared like any other.
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        request = Request(prompt, params)
        while not engine.has_room(request):  # of a server that lets few wait
            engine.step()
        handles.append(engine.submit(request))
    while any(not handle.done for handle in handles):
        engine.step()
    for handle in handles:
        if handle.error is not None:
            raise handle.error
    return [[i for event in handle.events for i in event.token_ids] for handle in handles]
