"""What is measured: cases, and the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from ortolan.errors import UsageError

Phase = Literal["prefill", "decode", "generate"]


@dataclass(frozen=True)
class Case:
    """One thing to time, with so many threads.

    prefill: read a prompt of `tokens` in chunks into an empty slot, logits after the last.
    decode: `tokens` steps of `batch` rows, each of which holds `context` tokens already.
    generate: one request through the front door, `context` prompt tokens and `tokens` answered,
    with greedy or full sampling.
    """

    phase: Phase
    threads: int
    batch: int
    context: int
    tokens: int
    sampling: Literal["", "greedy", "full"] = ""

    @property
    def name(self) -> str:
        """Unique among the cases of one number of threads."""
        if self.phase == "prefill":
            return f"prefill {self.tokens}"
        if self.phase == "decode":
            return f"decode {self.batch} x 1 at {self.context}"
        return f"generate {self.sampling} after {self.context}"

    @property
    def needed_context(self) -> int:
        """Positions that a slot must have."""
        return self.context + self.tokens


@dataclass(frozen=True)
class Plan:
    """The settings of a run; sequences are swept.

    steps: tokens per decode and generate case and repeat. contexts: tokens that a row holds before
    decode. repeat: rounds, each of which runs
    every case once. quick: small measurements of the machine, for tests.
    Raises UsageError naming the option.
    """

    threads: Sequence[int]
    batches: Sequence[int] = (1, 4, 16)
    prompts: Sequence[int] = (128, 512)
    contexts: Sequence[int] = (128, 1024)
    steps: int = 32
    repeat: int = 5
    quick: bool = False
    profile: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("threads", "batches", "prompts", "contexts"):
            values = getattr(self, name)
            option = {"batches": "batch", "prompts": "prompt", "contexts": "context"}.get(
                name, name
            )
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise UsageError(f"--{option} must be different whole numbers of at least 1")
        if self.steps < 2 or self.repeat < 1:
            raise UsageError("--steps must be at least 2 and --repeat at least 1")

    def cases(self, threads: int, max_context: int) -> list[Case]:
        """The cases for a model of `max_context` positions, and for so many threads.

        Prompts and contexts too long for it are left out. Raises UsageError if none is left.
        """
        prompts = [length for length in self.prompts if length <= max_context]
        contexts = [length for length in self.contexts if length + self.steps <= max_context]
        for option, left, shortest in (
            ("prompt", prompts, min(self.prompts)),
            ("context", contexts, min(self.contexts)),
        ):
            if not left:
                steps = "" if option == "prompt" else f" and {self.steps} steps"
                raise UsageError(
                    f"--{option} {shortest}{steps} do not fit into {max_context} positions, "
                    "which is all that the bundle has; give shorter ones"
                )
        cases = [Case("prefill", threads, 1, 0, prompt) for prompt in prompts]
        cases += [
            Case("decode", threads, batch, context, self.steps)
            for batch, context in product(self.batches, contexts)
        ]
        answered = [prompt for prompt in prompts if prompt + self.steps <= max_context]
        cases += [Case("generate", threads, 1, prompt, self.steps, "greedy") for prompt in answered]
        if answered:
            cases.append(Case("generate", threads, 1, answered[0], self.steps, "full"))
        return cases

    def left_out(self, max_context: int) -> list[str]:
        """What does not fit into so many positions, as options."""
        prompts = [f"--prompt {length}" for length in self.prompts if length > max_context]
        return prompts + [
            f"--context {length}" for length in self.contexts if length + self.steps > max_context
        ]


@dataclass(frozen=True)
class Sample:
    """One run of one case, in seconds.

    total_s: the whole phase (of generate, all tokens after the first). steps_s: every step of
    decode and generate. ttft_s: generate only. session_s: of generate's steps, what was spent in
    the decoder's session; the rest is scheduling, sampling, detokenizing.
    """

    total_s: float
    steps_s: tuple[float, ...] = ()
    ttft_s: float | None = None
    session_s: float | None = None
