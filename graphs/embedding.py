"""The token embedding, and the output head that may share its bytes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn
from onnxscript.nn import Parameter

from ortolan.graphs.formats import WeightFormat
from ortolan.graphs.linear import MICROSOFT, ONNX_DTYPES, as_float32, block_sums


def packed_width(columns: int, fmt: WeightFormat) -> int:
    """Bytes of one row of unsigned codes, two to a byte where they have 4 bits."""
    return columns * fmt.bits // 8


class Embedding(nn.Module):
    """ids [batch, chunk] -> rows [batch, chunk, hidden] float32.

    A blocked table stays quantized: unsigned codes (code + 2^(bits-1)) packed along the row,
    read by GatherBlockQuantized, which dequantizes the gathered rows alone. Rows that do not end
    with a block are filled up with codes that are cut off again.
    """

    def __init__(self, vocab_size: int, hidden_size: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.format = fmt
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        if not fmt.blocked:
            self.weight = Parameter([vocab_size, hidden_size], dtype=ONNX_DTYPES[fmt.dtype])
            return
        blocks = fmt.num_blocks(hidden_size)
        shape = [vocab_size, packed_width(blocks * fmt.block_size, fmt)]
        self.weight = Parameter(shape, dtype=ir.DataType.UINT8)
        self.weight_scale = Parameter([vocab_size, blocks])
        if fmt.affine:
            self.weight_offset = Parameter([vocab_size, blocks])

    def forward(self, op: Any, ids: ir.Value) -> ir.Value:
        fmt = self.format
        if not fmt.blocked:
            return as_float32(op, op.Gather(self.weight, ids), fmt)
        rows = op.GatherBlockQuantized(
            self.weight,
            ids,
            self.weight_scale,
            bits=fmt.bits,
            block_size=fmt.block_size,
            quantize_axis=1,
            gather_axis=0,
            _domain=MICROSOFT,
        )
        num_blocks = fmt.num_blocks(self.hidden_size)
        width = num_blocks * fmt.block_size
        if fmt.affine:
            offsets = op.Unsqueeze(op.Gather(self.weight_offset, ids), [-1])
            blocks = op.Reshape(rows, [0, 0, num_blocks, fmt.block_size])
            rows = op.Reshape(op.Add(blocks, offsets), [0, 0, width])
        return rows if width == self.hidden_size else op.Slice(rows, [0], [self.hidden_size], [2])


def times_transposed(
    op: Any, x: ir.Value, table: ir.Value, width: int, vocab_size: int
) -> ir.Value:
    """x [batch, n, width] times the transpose of table [vocab, width]."""
    rows = op.Gemm(op.Reshape(x, [-1, width]), table, transB=1)
    shape = op.Concat(op.Shape(x, start=0, end=2), [vocab_size], axis=0)
    return op.Reshape(rows, shape)


class TiedHead(nn.Module):
    """x [batch, n, hidden] -> logits [batch, n, vocab] by the embedding's own table.

    A float table is multiplied by Gemm with transB, so that it is not stored transposed. A blocked
    one is multiplied by MatMulNBits, whose layout is the embedding's bytes seen as [vocab, blocks,
    bytes]: `weight` is that second view of the same stored tensor. (The transposed
    DequantizeLinear form is not fused by ONNX Runtime; and a table stored as [hidden, vocab],
    which would be, is gathered a hundred times slower.) MatMulNBits carries its accuracy level in
    the graph, where the fused products take it from the session: see runtime/engine/accuracy.py.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding.weight
        self.format = fmt = embedding.format
        self.hidden_size = embedding.hidden_size
        self.vocab_size = embedding.vocab_size
        if fmt.blocked:
            blocks = fmt.num_blocks(self.hidden_size)
            shape = [self.vocab_size, blocks, packed_width(fmt.block_size, fmt)]
            self.weight = Parameter(shape, dtype=ir.DataType.UINT8)
            self.scale = embedding.weight_scale
            self.offset = embedding.weight_offset if fmt.affine else None

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        fmt = self.format
        if not fmt.blocked:
            return times_transposed(
                op, x, as_float32(op, self.embedding, fmt), self.hidden_size, self.vocab_size
            )
        logits = op.MatMulNBits(
            x,
            self.weight,
            self.scale,
            K=self.hidden_size,
            N=self.vocab_size,
            bits=fmt.bits,
            block_size=fmt.block_size,
            accuracy_level=4,
            _domain=MICROSOFT,
        )
        if self.offset is None:
            return logits
        sums = block_sums(op, x, self.hidden_size, fmt.block_size)
        blocks = fmt.num_blocks(self.hidden_size)
        return op.Add(logits, times_transposed(op, sums, self.offset, blocks, self.vocab_size))
