"""The requests of a round, and when they are made: by parameters, or from a recorded trace."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ortolan.errors import UsageError

_WARM_UP = "warm-up"  # stands for a round's number: prompts that no round has


@dataclass(frozen=True)
class LoadRequest:
    """One request: a prompt (text or token ids), and the most tokens of its answer."""

    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Recorded:
    """A request of a trace. arrival_s: seconds after the trace's first."""

    arrival_s: float
    request: LoadRequest


@dataclass(frozen=True)
class ServePlan:
    """The settings of a run. Raises UsageError naming the option.

    requests, prompt_words, output_tokens: the mix of one round; ranges include both ends.
    clients: so many, each of which sends its next request when the last one is answered.
    rate: requests per second, Poisson arrivals, whether others are answered or not. Of clients,
    rate and the trace's arrivals one holds. warm_up: requests to each server before the first
    round; None: as many as clients. timeout_s: after it a request counts as lost.
    """

    requests: int = 96
    prompt_words: tuple[int, int] = (8, 150)
    output_tokens: tuple[int, int] = (16, 64)
    seed: int = 0
    clients: int | None = None
    rate: float | None = None
    trace: tuple[Recorded, ...] = ()
    repeat: int = 5
    warm_up: int | None = None
    timeout_s: float = 300.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.clients is not None and self.rate is not None:
            raise UsageError("--clients and --rate are two ways to make load; give one of them")
        for option in ("prompt_words", "output_tokens"):
            low, high = getattr(self, option)
            if not 1 <= low <= high:
                raise UsageError(
                    f"--{option.replace('_', '-')} must be two numbers from 1 on, the smaller first"
                )

    @property
    def arrivals(self) -> str:
        """How requests arrive, in words."""
        if self.rate is not None:
            return f"Poisson, {self.rate:g} requests/s"
        if self.trace and self.clients is None:
            return "as recorded"
        return f"closed loop, {self.num_clients} clients"

    @property
    def closed_loop(self) -> bool:
        """Whether a request waits for the one before it."""
        return self.rate is None and (not self.trace or self.clients is not None)

    @property
    def num_clients(self) -> int:
        """Of the closed loop, and of the warm-up."""
        return self.clients or 16

    def round(self, turn: int) -> list[LoadRequest]:
        """The requests of a round: the same for every server, other prompts in every round.

        A trace has the same in every round.
        """
        if self.trace:
            return [one.request for one in self.trace]
        return self._mix(str(turn), self.requests)

    def warm_up_round(self) -> list[LoadRequest]:
        """Requests that are not measured."""
        return self._mix(_WARM_UP, self.num_clients if self.warm_up is None else self.warm_up)

    def arrivals_s(self, turn: int) -> list[float]:
        """When each request of a round is due, in seconds after its begin; not of a closed loop."""
        if self.rate is None:
            return [one.arrival_s for one in self.trace]
        chance, due_s, found = self._random(f"arrivals {turn}"), 0.0, []
        for _ in self.round(turn):
            found.append(due_s)
            due_s += chance.expovariate(self.rate)
        return found

    def _mix(self, name: str, count: int) -> list[LoadRequest]:
        # Words in random order: no prompt begins as another does, so what a server keeps of
        # earlier prompts makes no difference.
        chance, words = self._random(name), heldout_words()
        return [
            LoadRequest(
                " ".join(chance.choices(words, k=chance.randint(*self.prompt_words))),
                chance.randint(*self.output_tokens),
            )
            for _ in range(count)
        ]

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")


@cache
def heldout_words() -> Sequence[str]:
    """The words of the English held-out text, in its order."""
    return resources.files("ortolan").joinpath("heldout.txt").read_text(encoding="utf-8").split()


def read_trace(path: Path) -> tuple[Recorded, ...]:
    """A trace in JSON Lines, in order of arrival, the first at 0.

    A line: {"arrival_s": seconds, "prompt": text or token ids, "max_tokens": number}; other keys
    are ignored. Raises UsageError naming file, line and key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--trace {path} cannot be read ({error})") from error
    found = [
        _recorded(line, f"{path.name}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise UsageError(f"--trace {path} holds no request; give a file with one in each line")
    found.sort(key=lambda one: one.arrival_s)
    begin_s = found[0].arrival_s
    return tuple(Recorded(one.arrival_s - begin_s, one.request) for one in found)


def _recorded(line: str, where: str) -> Recorded:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} is no JSON object")
    fields: Any = (value.get(key) for key in ("arrival_s", "prompt", "max_tokens"))
    arrival_s, prompt, most = fields
    if not _is_number(arrival_s) or not 0 <= arrival_s < float("inf"):
        raise UsageError(f"{where}: arrival_s must be a number of seconds from 0 on")
    if isinstance(prompt, list) and prompt and all(_is_whole(token_id) for token_id in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple):
        raise UsageError(f"{where}: prompt must be text or a list of token ids")
    if not _is_whole(most) or most < 1:
        raise UsageError(f"{where}: max_tokens must be a whole number from 1 on")
    return Recorded(float(arrival_s), LoadRequest(prompt, most))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
