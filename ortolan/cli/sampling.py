"""The options that become SamplingParams, over what the checkpoint says about sampling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ortolan.cli.options import default_of, option_name, utf8, with_option_name
from ortolan.errors import RequestError, UsageError
from ortolan.runtime.params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])


class TokenBias(click.ParamType[tuple[int, float]]):
    """ID=BIAS."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f'{value!r} is not a token id, "=" and a number, as in 42=-5', param, ctx)


# Field -> type, help. A field without a default in its help is off by default.
_CHECKPOINTS = "  [default: the checkpoint's, else off]"
_NUMBERS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "Most tokens to generate.  [default: until the context is full]"),
    "temperature": (
        float,
        "0 takes the likeliest token, more is more varied.  [default: the checkpoint's, else 0, "
        f"or {default_of(SamplingParams, 'temperature')} with --top-k, --top-p, --min-p, --seed "
        "or -n]",
    ),
    "top_k": (int, "Choose among the N likeliest tokens." + _CHECKPOINTS),
    "top_p": (
        float,
        "Choose among the likeliest tokens that have this probability together." + _CHECKPOINTS,
    ),
    "min_p": (
        float,
        "Leave out tokens with less than this times the likeliest's probability." + _CHECKPOINTS,
    ),
    "repetition_penalty": (
        float,
        "Above 1: tokens of prompt and answer become less likely." + _CHECKPOINTS,
    ),
    "presence_penalty": (float, "Taken from the logits of tokens already in the answer."),
    "frequency_penalty": (float, "The same, times how often each occurs."),
    "seed": (int, "Makes a random answer repeatable."),
}
_ASK_FOR_SAMPLING = ("top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class GivenSampling:
    """The fields of SamplingParams that options set, each checked already."""

    fields: Mapping[str, Any]

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams of these, then of `defaults` (LLM.sampling_defaults), then the fields'.

        Only the temperature differs: where nobody says one, the command line is greedy unless an
        option asks to sample, so that a command run twice says the same. Such an option also
        wins over a checkpoint that is greedy by default.
        """
        values = {**defaults, **self.fields}
        if "temperature" not in self.fields:
            several = self.fields.get("n", 1) != 1  # greedy ones would be the same
            if several or any(name in self.fields for name in _ASK_FOR_SAMPLING):
                usual = default_of(SamplingParams, "temperature")
                values["temperature"] = defaults.get("temperature") or usual
            else:
                values.setdefault("temperature", 0.0)
        return SamplingParams(**values)


def sampling_options(command: Function) -> Function:
    """The fields of SamplingParams as options; the command receives them as `sampling`."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        names = [item.name for item in dataclasses.fields(SamplingParams) if item.name in values]
        given = {name: values.pop(name) for name in names}
        try:
            return command(sampling=given_sampling(given), **values)
        except RequestError as error:
            # What only the model could judge begins with the field's name too.
            message = with_option_name(str(error), given)
            if message == str(error):
                raise
            raise UsageError(message) from error

    options = [
        click.option(
            option_name(name),
            type=kind,
            metavar="N" if kind is int else "X",
            help=text,
        )
        for name, (kind, text) in _NUMBERS.items()
    ]
    options += [
        click.option("--stop", metavar="TEXT", multiple=True, help="End before this; repeatable."),
        click.option(
            "--logit-bias",
            type=TokenBias(),
            multiple=True,
            help="Added to a token's logit; repeatable.",
        ),
        click.option(
            "--stop-token-ids",
            metavar="ID",
            type=int,
            multiple=True,
            help="End after this token; repeatable.",
        ),
        click.option("--ignore-eos", is_flag=True, help="Go on after an end token."),
    ]
    for option in reversed(options):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls by keyword


def answers_options(command: Function) -> Function:
    """The fields that ask for more than one answer's text; below `sampling_options`."""
    options = [
        click.option("-n", "--n", metavar="N", type=int, help="Answers to each prompt."),
        click.option(
            "--logprobs",
            metavar="N",
            type=int,
            help="In JSON: log-probabilities of the answer's tokens, and of the N likeliest.",
        ),
        click.option(
            "--prompt-logprobs", metavar="N", type=int, help="The same for the prompt's tokens."
        ),
    ]
    for option in reversed(options):
        option(command)
    return command


def given_sampling(given: dict[str, Any]) -> GivenSampling:
    """The options that are not None. Raises UsageError naming the option."""
    fields = {name: value for name, value in given.items() if value is not None}
    fields["stop"] = tuple(utf8(text, "--stop") for text in fields.get("stop", ()))
    pairs = fields.pop("logit_bias", ())
    if len(dict(pairs)) < len(pairs):
        raise UsageError("--logit-bias names a token id twice; name each once")
    fields["logit_bias"] = dict(pairs)
    try:
        SamplingParams(**fields)  # now, before a model is loaded
    except RequestError as error:
        message = str(error).removeprefix("a token id in ")
        raise UsageError(with_option_name(message, given)) from error
    return GivenSampling(fields)
