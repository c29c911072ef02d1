"""What a checkpoint's makers say about sampling, from a bundle's generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ortolan.errors import BundleError, RequestError
from ortolan.runtime.params import SamplingParams
from ortolan.runtime.text.tokenizer import read_generation_config

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_ASK_FOR_SAMPLING = ("top_k", "top_p", "min_p")


def sampling_defaults(bundle: Path, vocab_size: int) -> dict[str, Any]:
    """Fields of SamplingParams that generation_config.json sets, and no others.

    `do_sample` false is temperature 0; where it is true, or only filters are given, the
    temperature is 1, as in Hugging Face. A top_k above `vocab_size` is all tokens, as there.
    Raises BundleError for a value that SamplingParams refuses; the export refuses it too.
    """
    file = bundle / "generation_config.json"
    config = read_generation_config(file)
    found = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    do_sample = config.get("do_sample")
    if do_sample is False:
        found["temperature"] = 0.0
    elif do_sample or any(name in found for name in _ASK_FOR_SAMPLING):
        found.setdefault("temperature", 1.0)
    try:
        checked = SamplingParams(**found)
    except RequestError as error:
        raise BundleError(f"{file}: {error}; export the bundle again") from error
    values = {name: getattr(checked, name) for name in _FIELDS if name in found}
    if "top_k" in values:
        values["top_k"] = min(values["top_k"], vocab_size)
    return values
