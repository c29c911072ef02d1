"""Linear layers over float or blocked integer weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import nn
from onnxscript.nn import Parameter

from ortolan.graphs.formats import Projection, WeightFormat

MICROSOFT = "com.microsoft"

_TOKEN_STEPS = 127  # between zero and a token's largest number
ONNX_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int4": ir.DataType.INT4,
    "int8": ir.DataType.INT8,
}


def as_float32(op: Any, value: ir.Value, fmt: WeightFormat) -> ir.Value:
    """`value` itself, or its cast from a 16-bit float (exact)."""
    return value if fmt.dtype == "float32" else op.Cast(value, to=ir.DataType.FLOAT)


def block_sums(op: Any, x: ir.Value, inputs: int, block_size: int) -> ir.Value:
    """Sums of x over each block of inputs: [..., K] -> [..., blocks]; the last may be shorter.

    x has two dimensions before K.
    """
    num_blocks = -(-inputs // block_size)
    if missing := num_blocks * block_size - inputs:
        x = op.Pad(x, [0, 0, 0, 0, 0, missing])
    blocks = op.Reshape(x, [0, 0, num_blocks, block_size])
    return op.ReduceSum(blocks, [-1], keepdims=0)


def row_block_sums(op: Any, x: ir.Value, inputs: int, block_size: int) -> ir.Value:
    """The same for rows: [rows, K] -> [rows, blocks]."""
    num_blocks = -(-inputs // block_size)
    if missing := num_blocks * block_size - inputs:
        x = op.Pad(x, [0, 0, 0, missing])
    return op.ReduceSum(op.Reshape(x, [0, num_blocks, block_size]), [-1], keepdims=0)


@dataclass(frozen=True)
class TokenCodes:
    """x [..., K] as codes uint8, 128 standing for 0, and what 127 steps from there stand for.

    scale: of each token [..., 1].
    """

    codes: ir.Value
    scale: ir.Value


def round_tokens(op: Any, x: ir.Value, unit: ir.Value | None = None) -> TokenCodes:
    """x to 8 bits, symmetric, each token by its own largest number.

    unit: what x counts in, for each token [..., 1]; None stands for 1.

    No token's codes depend on those beside it. The product of codes is one of integers, so its
    bits do not depend on the number of rows either. Steps from -127 to 127 lie around a zero point:
    ONNX Runtime is slow where the first factor is signed. Dividing and then rounding by one scale
    takes as long as QuantizeLinear along an axis, which wants two dimensions. In a step of one
    token each node here costs as much as its arithmetic, so there are few: a token of zeros is
    divided by zero, since whatever codes it gets are multiplied by a scale of zero in the end.
    """
    largest = op.ReduceMax(op.Abs(x), [-1])
    codes = op.QuantizeLinear(op.Div(x, largest), _step(op), _token_zero(op))
    return TokenCodes(codes, largest if unit is None else op.Mul(largest, unit))


def _step(op: Any) -> ir.Value:
    return op.Constant(value_float=1 / _TOKEN_STEPS)


def _token_zero(op: Any) -> ir.Value:
    return op.Constant(value=ir.tensor(np.array(128, np.uint8)))


class Linear(nn.Module):
    """x [batch, chunk, K] -> [batch, chunk, N] by a weight stored as [K, N].

    With `rows`, x is [rows, K] instead, and offsets are added by Gemm: one node and one pass over
    the output less than a product and a sum, but Gemm takes two dimensions only.

    Blocked codes go through DequantizeLinear into MatMul: the standard form that ONNX Runtime
    fuses at load. An offset enters as blocksum(x) @ offsets, which keeps an affine block exact:
    sum_k x_k (s c_k + o) = sum_k x_k s c_k + o sum_k x_k.

    W8A8 is MatMulIntegerToFloat with the weights' scales, then a product with the tokens'. Given
    tokens' scales as well, that operator multiplies them in on one thread. With `standard` it is
    MatMulInteger -> Cast -> Mul, which ONNX Runtime fuses to that form.
    """

    def __init__(self, projection: Projection, rows: bool, standard: bool) -> None:
        super().__init__()
        self.projection = projection
        self.rows = rows
        self.standard = standard
        fmt, inputs, outputs = projection.format, projection.inputs, projection.outputs
        self.weight = Parameter([inputs, outputs], dtype=ONNX_DTYPES[fmt.dtype])
        if fmt.w8a8:
            self.weight_scale = Parameter([outputs])
        if fmt.blocked:
            self.weight_scale = Parameter([fmt.num_blocks(inputs), outputs])
        if fmt.affine:
            self.weight_offset = Parameter([fmt.num_blocks(inputs), outputs])
        if projection.bias:
            self.bias = Parameter([outputs])

    def forward(
        self,
        op: Any,
        x: ir.Value,
        sums: ir.Value | None = None,
        tokens: TokenCodes | None = None,
        scaled: bool = True,
    ) -> ir.Value:
        """scaled: whether a product of codes is multiplied with the tokens' scales; else they are
        what it counts in, and there is no bias.
        """
        y = self._product(op, x, sums) if tokens is None else self._steps(op, tokens, scaled)
        if not self.projection.bias:
            return y
        # ONNX Runtime 1.32 would take an Add into a product of integers that it fuses (`standard`),
        # and then multiply the bias by the token's scale, too. A Sum it leaves alone.
        return op.Add(y, self.bias) if tokens is None else op.Sum(y, self.bias)

    def _steps(self, op: Any, tokens: TokenCodes, scaled: bool) -> ir.Value:
        factors = tokens.codes, self.weight
        if not self.standard:
            scales = _step(op), self.weight_scale, _token_zero(op)
            y = op.MatMulIntegerToFloat(*factors, *scales, _domain=MICROSOFT)
            return op.Mul(y, tokens.scale) if scaled else y
        y = op.MatMulInteger(*factors, _token_zero(op))
        # In this order of products, and with the scales multiplied first, it fuses. The weights'
        # scales of a step are folded to a constant at load.
        scale = op.Mul(tokens.scale, op.Mul(self.weight_scale, _step(op)))
        return op.Mul(op.Cast(y, to=ir.DataType.FLOAT), scale)

    def _product(self, op: Any, x: ir.Value, sums: ir.Value | None) -> ir.Value:
        fmt = self.projection.format
        if not fmt.blocked:
            return op.MatMul(x, as_float32(op, self.weight, fmt))
        weight = op.DequantizeLinear(
            self.weight, self.weight_scale, axis=0, block_size=fmt.block_size
        )
        y = op.MatMul(x, weight)
        if fmt.affine and self.rows:
            y = op.Gemm(sums, self.weight_offset, y)
        elif fmt.affine:
            y = op.Add(y, op.MatMul(sums, self.weight_offset))
        return y


def add_linears(
    owner: nn.Module,
    projections: Sequence[Projection],
    *,
    rows: bool = False,
    standard: bool = False,
) -> list[Linear]:
    """Register a Linear for each projection under its own name; return them in order."""
    linears = []
    for projection in projections:
        linear = Linear(projection, rows, standard)
        setattr(owner, projection.name.rpartition(".")[2], linear)
        linears.append(linear)
    return linears


def apply_linears(op: Any, x: ir.Value, linears: Sequence[Linear]) -> list[ir.Value]:
    """Several linear layers on one input; its block sums, or codes, are computed once."""
    sums: dict[int, ir.Value] = {}
    tokens: TokenCodes | None = None
    outputs = []
    for linear in linears:
        fmt = linear.projection.format
        if fmt.w8a8:
            tokens = tokens or round_tokens(op, x)
            outputs.append(linear(op, x, tokens=tokens))
            continue
        if fmt.affine and fmt.block_size not in sums:
            inputs = linear.projection.inputs
            summed = row_block_sums if linear.rows else block_sums
            sums[fmt.block_size] = summed(op, x, inputs, fmt.block_size)
        outputs.append(linear(op, x, sums.get(fmt.block_size)))
    return outputs
