"""What a run found, as a document of plain values; its keys are described in docs/bench.md."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ortolan.bench.machine import describe_machine, describe_versions, load_average
from ortolan.bench.serving.drive import Answered, Round
from ortolan.bench.serving.load import ServePlan
from ortolan.bench.serving.rounds import ServeResults
from ortolan.bench.serving.servers import OpenServer
from ortolan.bench.stats import Spread, percentile

SCHEMA = "1.0"
PERCENTS = (50, 90, 99)
Document = dict[str, Any]

_TIMES = ("ttft_ms", "token_ms", "end_to_end_ms")
CSV_COLUMNS = (
    *("system", "phase", "requests", "completed", "lost", "output_tokens", "tokens_from"),
    *("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "requests_per_s"),
    *(f"{name}_p{percent}" for name in _TIMES for percent in PERCENTS),
    *("late_ms_p99", "client_cores"),
    *("ratio", "ratio_low", "ratio_high", "ttft_ratio", "ttft_ratio_low", "ttft_ratio_high"),
)


def serve_document(results: ServeResults, when: str) -> Document:
    """The run as JSON values. when: the date, in ISO form."""
    ours = results.rounds[results.servers[0].name]
    return {
        "schema_version": SCHEMA,
        "date": when,
        "machine": {**describe_machine(), "load_average": load_average()},
        "versions": describe_versions(),
        "servers": {
            server.name: {
                "protocol": server.protocol,
                "model": server.model,
                "software": server.software,
            }
            for server in results.servers
        },
        "settings": _settings(results.plan),
        "results": [
            _row(results.plan, server, results.rounds[server.name], ours)
            for server in results.servers
        ],
    }


def _settings(plan: ServePlan) -> Document:
    mix: Document = {"requests": len(plan.round(0)), "trace": bool(plan.trace)}
    if not plan.trace:
        mix |= {
            "prompt_words": list(plan.prompt_words),
            "output_tokens": list(plan.output_tokens),
        }
    return {
        "arrivals": plan.arrivals,
        "clients": plan.num_clients if plan.closed_loop else None,
        "rate_per_s": plan.rate,
        **mix,
        "seed": plan.seed,
        "repeat": plan.repeat,
        "warm_up_requests": len(plan.warm_up_round()),
        "timeout_s": plan.timeout_s,
        "ignore_eos": plan.ignore_eos,
    }


def _row(
    plan: ServePlan, server: OpenServer, rounds: Sequence[Round], ours: Sequence[Round]
) -> Document:
    whole = [one for found in rounds for one in found.whole]
    lost = [one for found in rounds for one in found.answers if one.outcome.lost is not None]
    late_s = None if plan.closed_loop else [one.sent_s - one.due_s for one in whole + lost]
    return {
        "system": server.name,
        "phase": "serve",
        "requests": len(whole) + len(lost),
        "completed": len(whole),
        "lost": _lost(lost),
        "resent": sum(one.outcome.resent for one in whole + lost),
        "finish_reasons": dict(Counter(one.outcome.finish_reason for one in whole)),
        "output_tokens": sum(one.outcome.tokens for one in whole),
        "tokens_from": _tokens_from(whole),
        "tokens_per_s": _rates([tokens_per_s(found) for found in rounds]),
        "requests_per_s": _rates([len(found.whole) / found.seconds for found in rounds]),
        "ttft_ms": _percentiles([ttft_s(one) for one in whole]),
        "token_ms": _percentiles([s for one in whole if (s := token_s(one)) is not None]),
        "end_to_end_ms": _percentiles([one.outcome.end_s - one.due_s for one in whole]),
        "late_ms": _percentiles(late_s) if late_s is not None else None,
        "client_cores": sum(found.client_s for found in rounds)
        / sum(found.seconds for found in rounds),
        "ratio": None if rounds is ours else _ratios(ours, rounds),
    }


def tokens_per_s(found: Round) -> float:
    """Output tokens of the requests that were answered whole, over the round's time."""
    return sum(one.outcome.tokens for one in found.whole) / found.seconds


def ttft_s(one: Answered) -> float:
    """From when a request was due to its first token."""
    assert one.outcome.first_s is not None
    return one.outcome.first_s - one.due_s


def token_s(one: Answered) -> float | None:
    """Time per output token after the first; None for an answer of one token."""
    first_s, last_s, tokens = one.outcome.first_s, one.outcome.last_s, one.outcome.tokens
    if first_s is None or last_s is None or tokens < 2:
        return None
    return (last_s - first_s) / (tokens - 1)


def median_ttft_s(found: Round) -> float | None:
    """Of a round; None if no request was answered."""
    times_s = [ttft_s(one) for one in found.whole]
    return percentile(times_s, 50) if times_s else None


def _lost(lost: Sequence[Answered]) -> Document:
    """Kind -> how many, and what was said first."""
    found: Document = {}
    for one in lost:
        kind = found.setdefault(str(one.outcome.lost), {"count": 0, "first": one.outcome.detail})
        kind["count"] += 1
    return found


def _tokens_from(whole: Sequence[Answered]) -> str | None:
    kinds = {"usage" if one.outcome.from_usage else "events" for one in whole}
    return "both" if len(kinds) > 1 else next(iter(kinds), None)


def _percentiles(values_s: Sequence[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    return {f"p{percent}": percentile(values_s, percent) * 1e3 for percent in PERCENTS}


def _rates(values: Sequence[float]) -> Document:
    return {**_spread(Spread.of(values)), "samples": list(values)}


def _spread(spread: Spread) -> Document:
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def _ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> Document:
    """Round by round, above 1 where ours is better: more tokens per second, a shorter wait."""
    return {
        "tokens_per_s": _ratio(ours, theirs, tokens_per_s),
        "ttft": _ratio(theirs, ours, median_ttft_s),
    }


def _ratio(
    above: Sequence[Round], below: Sequence[Round], figure: Callable[[Round], float | None]
) -> Document | None:
    pairs = [(figure(a), figure(b)) for a, b in zip(above, below, strict=True)]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return _spread(Spread.of(ratios)) if ratios else None


def serve_csv(found: Document) -> str:
    """One line per server; what does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in found["results"]:
        writer.writerow(_flat(row))
    return text.getvalue()


def _flat(row: Document) -> Document:
    plain = {name: row[name] for name in CSV_COLUMNS if not isinstance(row.get(name, {}), dict)}
    plain |= {
        "lost": sum(kind["count"] for kind in row["lost"].values()),
        "tokens_per_s": row["tokens_per_s"]["median"],
        "tokens_per_s_low": row["tokens_per_s"]["low"],
        "tokens_per_s_high": row["tokens_per_s"]["high"],
        "requests_per_s": row["requests_per_s"]["median"],
        "late_ms_p99": (row["late_ms"] or {}).get("p99"),
    }
    for name in _TIMES:
        plain |= {f"{name}_p{p}": (row[name] or {}).get(f"p{p}") for p in PERCENTS}
    ratios = row["ratio"] or {}
    for name, prefix in (("tokens_per_s", "ratio"), ("ttft", "ttft_ratio")):
        ratio = ratios.get(name) or {}
        plain |= {
            prefix: ratio.get("median"),
            f"{prefix}_low": ratio.get("low"),
            f"{prefix}_high": ratio.get("high"),
        }
    return plain
