"""A checkpoint's weights into a weights file, in the forms that the graphs ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from ortolan.export.quantize import quantize
from ortolan.export.weights import Array, Weight, stack_rows
from ortolan.export.weights_file import SLAB_BYTES, WeightsFile, pack_int4
from ortolan.graphs.embedding import packed_width
from ortolan.graphs.flavor import Flavor
from ortolan.graphs.formats import (
    EMBEDDING,
    EMBEDDING_SCALE,
    FINAL_NORM,
    FLOAT32,
    LM_HEAD,
    QK_NORMS,
    Formats,
    Projection,
    WeightFormat,
    head_projection,
    layer_name,
    layer_norms,
    plan_layer,
)
from ortolan.graphs.linear import ONNX_DTYPES
from ortolan.graphs.manifest import ModelConfig, WeightGroup
from ortolan.graphs.rotary import config_rotary_tables, rope_tables


class Checkpoint(Protocol):
    """What a reader gives: the model's shape, and weights one at a time by state-dict name."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def formats(self) -> Mapping[str, WeightFormat]: ...

    def read(self, name: str) -> Weight: ...


@dataclass(frozen=True)
class Item:
    """One step of writing: its role and name, and what writes it, returning format and size.

    stored: what the graphs ask for; made: whether the values are this writer's own.
    """

    role: str
    name: str
    write: Callable[[], Written]
    stored: Projection | WeightFormat = FLOAT32
    made: bool = False


@dataclass(frozen=True)
class Written:
    """What one step wrote."""

    format: WeightFormat
    elements: int
    bytes: int


class WeightsWriter:
    """Writes every tensor that the graphs of one model need, one at a time.

    formats: what is stored; a matrix that the checkpoint holds in another format is rounded to
    it, or expanded slab by slab. made: names of weights that are not the source's own values but
    made of them. beside: a writer whose tensors are there already; what would be the same is left
    out.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        formats: Formats,
        file: WeightsFile,
        flavor: Flavor,
        made: Collection[str] = (),
        beside: WeightsWriter | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._formats = formats
        self._file = file
        self._flavor = flavor
        self._made = frozenset(made)
        self._beside = beside
        self._groups: dict[tuple[str, str], WeightGroup] = {}

    def items(self) -> Iterator[Item]:
        """The steps, for a caller that shows progress."""
        there = {} if self._beside is None else {item.name: item for item in self._beside.items()}
        for item in self._all_items():
            other = there.get(item.name)
            if other is None or item.made or other.made or item.stored != other.stored:
                yield item

    def _all_items(self) -> Iterator[Item]:
        yield Item("embedding", EMBEDDING, self._embedding, self._formats[EMBEDDING])
        if EMBEDDING_SCALE in self._formats:
            yield Item("embedding", EMBEDDING_SCALE, self._embedding_scale)
        yield Item("rotary", "model.rotary", self._rotary)
        for i in range(self._config.num_layers):
            plan = plan_layer(self._config, self._formats, i)
            norms = layer_norms(self._config).names
            for norm in (*norms, *QK_NORMS) if self._config.qk_norm else norms:
                yield self._norm(layer_name(i, norm))
            for projection in (*plan.qkv, plan.attention_out):
                yield self._projection("attention", projection)
            for projection in (*plan.gate_up, plan.down):
                yield self._projection("mlp", projection)
        yield self._norm(FINAL_NORM)
        if not self._config.tie_embeddings:
            yield self._projection("head", head_projection(self._config, self._formats))

    def run(self, item: Item) -> None:
        """Do one step and count it in its group."""
        written = item.write()
        key = (item.role, str(written.format))
        group = self._groups.get(key, WeightGroup(*key, tensors=0, elements=0, bytes=0))
        self._groups[key] = WeightGroup(
            *key,
            tensors=group.tensors + 1,
            elements=group.elements + written.elements,
            bytes=group.bytes + written.bytes,
        )

    @property
    def groups(self) -> list[WeightGroup]:
        return list(self._groups.values())

    def _read(self, name: str) -> Weight:
        """A weight whose stored format is blocked, in that format."""
        weight, fmt = self._checkpoint.read(name), self._formats[name]
        return weight if weight.format == fmt else quantize(weight, fmt)

    def _norm(self, name: str) -> Item:
        def write() -> Written:
            # Norms are small and always computed in float32.
            weight = self._checkpoint.read(name).as_float32()
            size = self._file.add(f"{name}.weight", weight.codes, ir.DataType.FLOAT)
            return Written(weight.format, weight.codes.size, size)

        return Item("norm", name, write, made=name in self._made)

    def _projection(self, role: str, projection: Projection) -> Item:
        def write() -> Written:
            name, fmt = projection.name, projection.format
            if fmt.w8a8:
                weight = stack_rows([self._read(part) for part in projection.parts])
                size = self._add_blocks(name, weight, weight.codes.T, lambda a: a[:, 0])
            elif fmt.blocked:
                weight = stack_rows([self._read(part) for part in projection.parts])
                size = self._add_blocks(name, weight, weight.codes.T, lambda a: a.T)
            else:
                parts = [self._checkpoint.read(part) for part in projection.parts]
                shape = projection.inputs, projection.outputs
                size = self._add_floats(name, fmt, shape, float_columns(parts, fmt))
            if projection.bias:
                biases = [self._checkpoint.read(f"{p}.bias").as_float32() for p in projection.parts]
                bias = stack_rows(biases).codes
                size += self._file.add(f"{projection.name}.bias", bias, ir.DataType.FLOAT)
            return Written(fmt, projection.inputs * projection.outputs, size)

        made = not self._made.isdisjoint(projection.parts)
        return Item(role, projection.name, write, projection, made)

    def _add_floats(
        self, name: str, fmt: WeightFormat, shape: tuple[int, int], slabs: Iterable[Array]
    ) -> int:
        size = shape[0] * shape[1] * fmt.bits // 8
        return self._file.add_slabs(f"{name}.weight", shape, ONNX_DTYPES[fmt.dtype], size, slabs)

    def _add_blocks(
        self, name: str, weight: Weight, codes: Array, layout: Callable[[Array], Array]
    ) -> int:
        """Codes as given, scales and offsets laid out by `layout` from [N, blocks]."""
        fmt = weight.format
        dtype = ir.DataType.UINT8 if codes.dtype == np.uint8 else ONNX_DTYPES[fmt.dtype]
        size = self._file.add(f"{name}.weight", codes, dtype)
        for suffix, part in (("scale", weight.scale), ("offset", weight.offset)):
            if part is not None:
                array = np.ascontiguousarray(layout(part), dtype=np.float32)
                size += self._file.add(f"{name}.weight_{suffix}", array, ir.DataType.FLOAT)
        return size

    def _embedding(self) -> Written:
        fmt = self._formats[EMBEDDING]
        shape = self._config.vocab_size, self._config.hidden_size
        if fmt.blocked:
            weight = self._read(EMBEDDING)
            codes = signed_rows(weight) if self._flavor.signed_table else unsigned_rows(weight)
            size = self._add_blocks(EMBEDDING, weight, codes, lambda a: a)
            if self._config.tie_embeddings:
                self._table_view(fmt)
        else:
            rows = float_rows(self._checkpoint.read(EMBEDDING), fmt)
            size = self._add_floats(EMBEDDING, fmt, shape, rows)
        return Written(fmt, shape[0] * shape[1], size)

    def _table_view(self, fmt: WeightFormat) -> None:
        """The embedding's bytes once more, as the tied head reads them."""
        vocab, blocks = self._config.vocab_size, fmt.num_blocks(self._config.hidden_size)
        names = f"{LM_HEAD}.weight", f"{EMBEDDING}.weight"
        if not self._flavor.signed_table:
            self._file.add_view(*names, (vocab, blocks, packed_width(fmt.block_size, fmt)))
            return
        self._file.add_view(*names, (vocab * blocks, fmt.block_size), ONNX_DTYPES[fmt.dtype])
        head_scale, table_scale = (f"{name}_scale" for name in names)
        self._file.add_view(head_scale, table_scale, (vocab * blocks,))

    def _embedding_scale(self) -> Written:
        weight = self._checkpoint.read(EMBEDDING_SCALE)
        size = self._file.add(EMBEDDING_SCALE, weight.codes, ir.DataType.FLOAT)
        return Written(weight.format, weight.codes.size, size)

    def _rotary(self) -> Written:
        elements = size = 0
        for rope in self._config.ropes:
            tables = config_rotary_tables(self._config, rope, self._config.max_context)
            for name, table in zip(rope_tables(rope), tables, strict=True):
                size += self._file.add(f"model.{name}", table, ir.DataType.FLOAT)
                elements += table.size
        return Written(WeightFormat("float32"), elements, size)


def float_rows(weight: Weight, fmt: WeightFormat) -> Iterator[Array]:
    """Slabs of the matrix [N, K] in an unblocked format, so that it is never expanded at once."""
    outputs, inputs = weight.codes.shape
    step = max(1, SLAB_BYTES // (4 * inputs))
    for start in range(0, outputs, step):
        yield _floats(weight.rows(start, start + step), fmt)


def float_columns(parts: Sequence[Weight], fmt: WeightFormat) -> Iterator[Array]:
    """Slabs of the parts side by side, transposed: [K, N of all] in an unblocked format."""
    inputs = parts[0].codes.shape[1]
    outputs = sum(len(part.codes) for part in parts)
    # Every part's blocks divide the largest: sizes are powers of two.
    whole = max(1, *(part.format.block_size for part in parts))
    step = max(1, SLAB_BYTES // (4 * outputs * whole)) * whole
    for start in range(0, inputs, step):
        stop = min(start + step, inputs)
        slabs = [_floats(part.columns(start, stop), fmt).T for part in parts]
        yield slabs[0] if len(slabs) == 1 else np.concatenate(slabs, axis=1)


def _floats(weight: Weight, fmt: WeightFormat) -> Array:
    return weight.codes if weight.format == fmt else weight.dequantized()


def signed_rows(weight: Weight) -> Array:
    """Codes [N, K] int8 or, of 4 bits, two to a byte along K: uint8 [N, K / 2], the first low.

    A last block that is shorter than the others is filled up with zeros.
    """
    fmt, codes = weight.format, weight.codes
    if missing := -codes.shape[1] % fmt.block_size:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    return codes if fmt.bits == 8 else pack_int4(codes).reshape(len(codes), -1)


def unsigned_rows(weight: Weight) -> Array:
    """Codes as GatherBlockQuantized and MatMulNBits read them: uint8 [N, K * bits / 8].

    Unsigned with the middle as zero point; 4-bit codes two to a byte along K, the first low. A
    last block that is shorter than the others is filled up with codes that stand for zero.
    """
    fmt, codes = weight.format, weight.codes
    if missing := -codes.shape[1] % fmt.block_size:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    if fmt.bits == 8:
        rows: Array = (codes.view(np.uint8) ^ 0x80).reshape(codes.shape)
        return rows
    unsigned = (codes + 8).astype(np.uint8)
    packed: Array = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return packed
