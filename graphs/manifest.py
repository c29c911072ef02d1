"""What a bundle says of itself: `ModelConfig`, `Manifest`, and their JSON form.

manifest.json is written last and read first. Its schema has a version `major.minor`: a newer
minor is readable (keys it adds are ignored), a newer major is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ortolan.errors import BundleError
from ortolan.graphs.contract import DECODE_MANY, FloatDtype, KvDtype

SCHEMA_MAJOR = 1
# 1: what weights were rounded from, typed accuracy reports; 2: Gemma, OLMo2; 3: dtypes.
SCHEMA_MINOR = 3
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights.bin"
PACKED_NAME = ".packed"  # the runtime's cache of packed weights
W8A8_PRECISION = "int8 per channel, activations int8 per token"
TEXT_NAMES = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
_HASH_CHUNK = 1 << 20

RopeName = Literal["global", "local"]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-style decoder, and how it differs from plain Llama.

    max_context: positions, which are the rows of the rotary tables.
    rope_theta, rope_divisors, rope_magnitude: pair i of a head turns by
    position * theta ** (-2 i / rotary_dim) / divisors[i], and its sine and cosine are multiplied by
    the magnitude. Every rope scaling comes down to these; rope_kind is its name in the source.
    rotary_dim: leading dimensions of a head that turn; 0 stands for all of them.
    sliding_window: positions that a query sees, itself included; 0 for all. window_layers and
    rope_layers say which layers have a window, or turn at all; None stands for all layers.
    window_rope_theta: the theta of layers with a window, which have no divisors and no magnitude;
    None stands for the same as in all layers.
    qk_norm: q and k have a norm, for each head or, with qk_norm_joint, over all heads at once.
    attention_scale: what scores are multiplied by; None stands for head_dim ** -0.5.
    activation: of the gate, "silu" or "gelu_tanh".
    pre_norms: of what attention and MLP read; post_norms: of what they give, before it is added.
    residual_multiplier: for what attention and MLP add; logits are divided by logits_divisor.
    attention_softcap, logits_softcap: x becomes cap * tanh(x / cap); 0 for none. Scores are capped
    before they are masked.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    tie_embeddings: bool
    rope_kind: str = "default"
    rope_divisors: list[float] | None = None
    rope_magnitude: float = 1.0
    rotary_dim: int = 0
    rope_layers: list[bool] | None = None
    sliding_window: int = 0
    window_layers: list[bool] | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    qk_norm_joint: bool = False
    activation: str = "silu"
    pre_norms: bool = True
    post_norms: bool = False
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    window_rope_theta: float | None = None

    def layer_window(self, layer: int) -> int:
        """That layer's sliding window, or 0."""
        windowed = self.window_layers is None or self.window_layers[layer]
        return self.sliding_window if windowed else 0

    def layer_turns(self, layer: int) -> bool:
        """Whether that layer has rotary embedding."""
        return self.rope_layers is None or self.rope_layers[layer]

    def layer_rope(self, layer: int) -> RopeName:
        """Which of the model's rotary tables that layer turns by."""
        local = self.window_rope_theta is not None and self.layer_window(layer)
        return "local" if local else "global"

    @property
    def ropes(self) -> list[RopeName]:
        """The rotary tables that the model has, sorted."""
        return sorted({self.layer_rope(i) for i in range(self.num_layers)})


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: bytes and SHA-256 in lower-case hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """An input or output of a graph; symbolic dimensions are strings."""

    name: str
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True)
class GraphEntry:
    """One graph: its file and its contract."""

    file: str
    inputs: list[TensorEntry]
    outputs: list[TensorEntry]


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one role and precision, with their bytes in the weights file.

    phase: "decode" or "prefill" in a bundle whose phases differ. What both use is decode's.
    """

    role: str  # embedding, attention, mlp, norm, head
    precision: str  # "float32", "int4 block 32 + offsets", ...
    tensors: int
    elements: int
    bytes: int
    phase: str = ""


@dataclass(frozen=True)
class Source:
    """Where the weights came from. format: "gguf" or "safetensors"."""

    name: str
    format: str
    sha256: str


@dataclass(frozen=True)
class TextAccuracy:
    """How next-token distributions differ from the reference's over one text.

    Divergences are KL(reference || bundle) in nats, the mean and the 99th percentile over the
    tokens; top1_agreement is the share of tokens after which both find the same token likeliest.
    Perplexities are of the text's own tokens.
    """

    text: str
    tokens: int
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True)
class AccuracyReport:
    """The price of a bundle's precision, measured on texts that nothing was calibrated on.

    accuracy: what products were computed in, "default" or "exact". reference: what it is compared
    with. runtime: what computed both. total: over all of `texts`. phase: whose weights read the
    texts, "prefill" or "decode", in a bundle where these differ.
    """

    accuracy: str
    reference: str
    runtime: str
    total: TextAccuracy
    texts: list[TextAccuracy]
    phase: str = ""


@dataclass(frozen=True)
class Dtypes:
    """What a bundle's decoder graphs compute in, and what they keep of each token.

    activations: everything between the embedding's rows and the logits, which are float32.
    kv: the activations' own dtype or, with "int8", codes with a scale for each layer, KV head and
    dimension, which are constants of the graphs.
    """

    activations: FloatDtype = "float32"
    kv: KvDtype = "float32"


DEFAULT_DTYPES = Dtypes()


@dataclass(frozen=True)
class Manifest:
    """Everything that a runtime or a reader needs to know before it opens a graph.

    rounded_from: precisions of those source weights that are stored rounded; empty if none are.
    preset: what its precisions were asked for as, or empty.
    no_report: why there is no accuracy report; None where there is one, or nothing to report.
    """

    schema_version: str
    ortolan_version: str
    model: ModelConfig
    attention: str
    graphs: dict[str, GraphEntry]
    weights: list[WeightGroup]
    files: dict[str, FileEntry]
    source: Source
    rounded_from: list[str] = field(default_factory=list)
    accuracy_reports: list[AccuracyReport] = field(default_factory=list)
    no_report: str | None = None
    dtypes: Dtypes = field(default_factory=Dtypes)
    preset: str = ""

    @property
    def quantized(self) -> bool:
        """Whether some weights are stored as integer codes."""
        return self.w8a8 or any(" block " in group.precision for group in self.weights)

    @property
    def phases_differ(self) -> bool:
        """Whether prefill and decode have weights of their own."""
        return DECODE_MANY in self.graphs

    @property
    def w8a8(self) -> bool:
        """Whether some products are of integers, with activations rounded to 8 bits."""
        return any(group.precision == W8A8_PRECISION for group in self.weights)

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Write manifest.json whole or not at all; a reader finds the old one or this one."""
        draft = folder / f".{MANIFEST_NAME}.{os.getpid()}"
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(folder / MANIFEST_NAME)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a bundle's folder.

        Raises BundleError if the folder is no bundle, the JSON is damaged, or the schema's major
        version is not ours.
        """
        path = folder / MANIFEST_NAME
        if not folder.is_dir():
            raise BundleError(
                f"{folder}: no such folder; make a bundle with: ortolan export SOURCE {folder}"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BundleError(
                f"{folder}: not a bundle, it has no {MANIFEST_NAME}; "
                "make one with: ortolan export SOURCE BUNDLE"
            ) from None
        except (OSError, ValueError) as exc:
            raise BundleError(f"{path}: cannot be read ({exc}); export the bundle again") from exc
        _check_schema(path, raw)
        try:
            return typing.cast(Manifest, _parse(cls, raw, ""))
        except (TypeError, ValueError) as exc:
            raise BundleError(f"{path}: {exc}; export the bundle again") from exc


def _check_schema(path: Path, raw: object) -> None:
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    major = str(version).partition(".")[0]
    if not major.isdecimal():
        raise BundleError(
            f"{path}: schema_version is {version!r}, expected {SCHEMA_MAJOR}.x; "
            "export the bundle again"
        )
    if int(major) != SCHEMA_MAJOR:
        raise BundleError(
            f"{path}: schema {version} is not readable by this version, which reads "
            f"{SCHEMA_MAJOR}.x; update Ortolan, or export the bundle again with this version"
        )


def _parse(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, which is built of dataclasses, containers and plain types.

    Unknown keys of a dataclass are ignored: a newer minor may add some.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{where or 'the manifest'} is not an object")
        hints = get_type_hints(kind)
        found = {}
        for item in dataclasses.fields(kind):
            inner = f"{where}.{item.name}" if where else item.name
            if item.name in value:
                found[item.name] = _parse(hints[item.name], value[item.name], inner)
            elif item.default is item.default_factory is dataclasses.MISSING:
                raise TypeError(f"{inner} is missing")
        return typing.cast(Callable[..., Any], kind)(**found)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where} is {value!r}, this version knows {', '.join(args)}")
        return value
    if origin is list and isinstance(value, list):
        return [_parse(args[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _parse(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if origin in (Union, types.UnionType):  # X | None, or int | str
        if value is None and type(None) in args:
            return None
        others = [arg for arg in args if arg is not type(None)]
        if len(others) == 1:
            return _parse(others[0], value, where)
    plain = args if origin in (Union, types.UnionType) else (kind,)
    if type(value) not in plain:
        raise TypeError(f"{where} is {value!r}, expected {kind}")
    return value


def file_entry(path: Path) -> FileEntry:
    """Size and hash of a file, read in pieces."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_HASH_CHUNK):
            digest.update(piece)
            size += len(piece)
    return FileEntry(size, digest.hexdigest())
