"""The token embedding and the tied head of the `onnx` flavor: standard operators alone."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn
from onnxscript.nn import Parameter

from ortolan.graphs.embedding import packed_width, times_transposed
from ortolan.graphs.formats import WeightFormat
from ortolan.graphs.linear import ONNX_DTYPES, as_float32, block_sums


class OnnxEmbedding(nn.Module):
    """ids [batch, chunk] -> rows [batch, chunk, hidden] float32.

    A blocked table stays quantized: signed codes, gathered and then dequantized. Those of 4 bits
    are stored two to a byte along the row, the first low, since Gather knows no 4-bit type.
    """

    def __init__(self, vocab_size: int, hidden_size: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.format = fmt
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.blocks = fmt.num_blocks(hidden_size) if fmt.blocked else 0
        # Whole blocks: what the last one has beyond the hidden size is cut off again.
        self.width = self.blocks * fmt.block_size or hidden_size
        shape, dtype = [vocab_size, self.width], ONNX_DTYPES[fmt.dtype]
        if fmt.dtype == "int4":
            shape, dtype = [vocab_size, packed_width(self.width, fmt)], ir.DataType.UINT8
        self.weight = Parameter(shape, dtype=dtype)
        if fmt.blocked:
            self.weight_scale = Parameter([vocab_size, self.blocks])
            if fmt.affine:
                self.weight_offset = Parameter([vocab_size, self.blocks])

    def forward(self, op: Any, ids: ir.Value) -> ir.Value:
        fmt = self.format
        codes = op.Gather(self.weight, ids)
        if not fmt.blocked:
            return as_float32(op, codes, fmt)
        if fmt.dtype == "int4":
            codes = self._unpacked(op, codes)
        scale = op.Gather(self.weight_scale, ids)
        rows = op.DequantizeLinear(codes, scale, axis=-1, block_size=fmt.block_size)
        if fmt.affine:
            offsets = op.Unsqueeze(op.Gather(self.weight_offset, ids), [-1])
            blocks = op.Reshape(rows, [0, 0, self.blocks, fmt.block_size])
            rows = op.Reshape(op.Add(blocks, offsets), [0, 0, self.width])
        return self.trimmed(op, rows, axis=2)

    def trimmed(self, op: Any, rows: ir.Value, axis: int) -> ir.Value:
        """Without what fills up the last block."""
        if self.width == self.hidden_size:
            return rows
        return op.Slice(rows, [0], [self.hidden_size], [axis])

    def _unpacked(self, op: Any, packed: ir.Value) -> ir.Value:
        """Bytes of two signed 4-bit codes -> int8 codes."""
        four, low_bits, sign = (
            op.Constant(value=ir.tensor([number], dtype=ir.DataType.UINT8)) for number in (4, 15, 8)
        )
        low = op.Unsqueeze(op.BitwiseAnd(packed, low_bits), [-1])
        high = op.Unsqueeze(op.BitShift(packed, four, direction="RIGHT"), [-1])
        pairs = op.Reshape(op.Concat(low, high, axis=-1), [0, 0, self.width])
        # (n xor 8) - 8 extends the sign: 0..7 stay, 8..15 become -8..-1.
        shifted = op.Cast(op.BitwiseXor(pairs, sign), to=ir.DataType.INT8)
        return op.Sub(shifted, op.Constant(value=ir.tensor([8], dtype=ir.DataType.INT8)))


class OnnxTiedHead(nn.Module):
    """x [batch, n, hidden] -> logits [batch, n, vocab] by the embedding's own table.

    A blocked table is expanded at every call, which takes most of a decode step of a small model:
    no standard form multiplies by a blocked table that is stored row by row. `weight` and
    `weight_scale` are second views of the same stored bytes, with a row and a scale for each block:
    ONNX Runtime dequantizes that form three times as fast as blocks along a row.
    """

    def __init__(self, embedding: OnnxEmbedding) -> None:
        super().__init__()
        self.table = embedding
        fmt = embedding.format
        if fmt.blocked:
            rows = embedding.vocab_size * embedding.blocks
            self.weight = Parameter([rows, fmt.block_size], dtype=ONNX_DTYPES[fmt.dtype])
            self.weight_scale = Parameter([rows])

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        table, fmt = self.table, self.table.format
        hidden, vocab_size = table.hidden_size, table.vocab_size
        if not fmt.blocked:
            return times_transposed(op, x, as_float32(op, table.weight, fmt), hidden, vocab_size)
        blocks = op.DequantizeLinear(self.weight, self.weight_scale, axis=0)
        weight = table.trimmed(op, op.Reshape(blocks, [vocab_size, table.width]), axis=1)
        logits = self._product(op, x, weight)
        if not fmt.affine:
            return logits
        sums = block_sums(op, x, hidden, fmt.block_size)
        offsets = times_transposed(op, sums, table.weight_offset, table.blocks, vocab_size)
        return op.Add(logits, offsets)

    def _product(self, op: Any, x: ir.Value, weight: ir.Value) -> ir.Value:
        # One row alone times a computed matrix has other bits than one of several in ONNX Runtime:
        # a row of zeros keeps it company.
        rows = op.Pad(op.Reshape(x, [-1, self.table.hidden_size]), [0, 0, 1, 0])
        logits = op.Slice(op.Gemm(rows, weight, transB=1), [0], [-1], [0])
        shape = op.Concat(op.Shape(x, start=0, end=2), [self.table.vocab_size], axis=0)
        return op.Reshape(logits, shape)
