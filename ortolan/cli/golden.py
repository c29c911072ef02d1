"""Comparing a bundle with reference results that an implementation which is not ours computed.

A golden file is JSON: `reference` says what computed it, and each of `cases` has a `name`,
`prompt_ids`, the chat `messages` or plain `text` they came from, `last_logits_top20` (`ids` and
`values` after the last prompt token), `greedy_ids`, and `greedy_top2_gap`, the distance between
the best and the second-best logit at each of these steps. NAME_last_logits.npz beside NAME.json
may hold the whole last rows, float32 [vocab_size], by case.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortolan.errors import UsageError
from ortolan.runtime.params import SamplingParams
from ortolan.runtime.reference import (
    FloatArray,
    Limits,
    equal_from_start,
    failures_of,
    kl_divergence,
    owed_tokens,
)

if TYPE_CHECKING:
    from ortolan.runtime.llm import LLM


@dataclass(frozen=True)
class GoldenCase:
    """One prompt with its reference results. last_logits: float32 [vocab_size], or None."""

    name: str
    prompt_ids: list[int]
    messages: list[dict[str, Any]] | None
    text: str | None
    top_ids: list[int]
    top_logits: list[float]
    greedy_ids: list[int]
    greedy_gaps: list[float]
    last_logits: FloatArray | None


@dataclass(frozen=True)
class CaseResult:
    """How one case came out. `failures` has a sentence for each limit that was not kept.

    kl: None where the reference's whole row is not known.
    greedy_owed: leading greedy tokens whose stated gap exceeds twice the error of the logits.
    greedy_equal: how many of these, from the first, came out the same.
    """

    name: str
    prompt_equal: bool
    max_abs_error: float
    kl: float | None
    top1_equal: bool
    greedy_equal: int
    greedy_owed: int
    greedy_stated: int
    failures: tuple[str, ...]


def read_golden(path: Path) -> tuple[str, list[GoldenCase]]:
    """What computed the reference, and the cases. Raises UsageError if it is no golden file."""
    rows_path = path.with_name(f"{path.stem}_last_logits.npz")
    try:
        content = json.loads(path.read_bytes())
        rows = dict(np.load(rows_path)) if rows_path.exists() else {}
        return str(content["reference"]), [_case(item, rows) for item in content["cases"]]
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    except (KeyError, TypeError) as error:
        problem = f"is not a golden file: a key is missing or of another kind ({error})"
    except (ValueError, zipfile.BadZipFile) as error:
        problem = f"is damaged, or {rows_path.name} is ({error})"
    raise UsageError(f"--golden {path}: {problem}; give the JSON file of reference results")


def _case(item: Mapping[str, Any], rows: Mapping[str, FloatArray]) -> GoldenCase:
    case = GoldenCase(
        name=item["name"],
        prompt_ids=[int(token_id) for token_id in item["prompt_ids"]],
        messages=item.get("messages"),
        text=item.get("text"),
        top_ids=[int(token_id) for token_id in item["last_logits_top20"]["ids"]],
        top_logits=[float(value) for value in item["last_logits_top20"]["values"]],
        greedy_ids=[int(token_id) for token_id in item["greedy_ids"]],
        greedy_gaps=[float(gap) for gap in item["greedy_top2_gap"]],
        last_logits=rows.get(item["name"]),
    )
    if not (
        case.prompt_ids
        and len(case.top_ids) == len(case.top_logits) > 0
        and len(case.greedy_ids) == len(case.greedy_gaps)
    ):
        raise ValueError(f"the lists of case {case.name} are empty or of unequal length")
    return case


def check_vocabulary(path: Path, cases: Sequence[GoldenCase], vocab_size: int) -> None:
    """Raises UsageError if the reference results are plainly another model's."""
    for case in cases:
        largest = max(*case.prompt_ids, *case.top_ids, *case.greedy_ids)
        row = vocab_size if case.last_logits is None else len(case.last_logits)
        if largest >= vocab_size or row != vocab_size:
            found = max(largest + 1, row)
            raise UsageError(
                f"--golden {path}: case {case.name} has a vocabulary of at least {found} tokens, "
                f"the bundle's has {vocab_size}; give the reference results of this model"
            )


def check_case(llm: LLM, case: GoldenCase, limits: Limits) -> CaseResult:
    """Run one case: tokenize its text, read its prompt, continue it greedily."""
    prompt_equal = _prompt_ids(llm, case) == case.prompt_ids
    row = llm.logits(case.prompt_ids, positions=[len(case.prompt_ids) - 1])[0]
    if case.last_logits is None:
        errors = row[case.top_ids] - np.array(case.top_logits)
        kl = None
    else:
        errors = row - case.last_logits
        kl = kl_divergence(case.last_logits, row)
    max_abs_error = float(np.abs(errors).max())
    owed = owed_tokens(case.greedy_gaps, max_abs_error)
    generated = _greedy_ids(llm, case, owed)
    equal = equal_from_start(case.greedy_ids[:owed], generated)

    failures = []
    if not prompt_equal:
        failures.append("the tokenizer or the chat template gives other prompt ids")
    failures += failures_of(limits, max_abs_error, kl, case.greedy_ids[:owed], generated)
    return CaseResult(
        name=case.name,
        prompt_equal=prompt_equal,
        max_abs_error=max_abs_error,
        kl=kl,
        top1_equal=int(row.argmax()) == case.top_ids[0],
        greedy_equal=equal,
        greedy_owed=owed,
        greedy_stated=len(case.greedy_ids),
        failures=tuple(failures),
    )


def _prompt_ids(llm: LLM, case: GoldenCase) -> list[int]:
    if case.messages is not None:
        return llm.encode_chat(case.messages)
    # A case of token ids alone has nothing to tokenize.
    return case.prompt_ids if case.text is None else llm.tokenizer.encode(case.text)


def _greedy_ids(llm: LLM, case: GoldenCase, count: int) -> Sequence[int]:
    if count == 0:
        return ()
    # An end token is compared like any other: the reference lists it.
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return llm.generate(case.prompt_ids, params)[0].token_ids
