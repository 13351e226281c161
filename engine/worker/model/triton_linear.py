"""Multiply by quantised matrices on a GPU with Triton, from the CPU's panel layout.

A program has some rows of a matrix and some tokens. Group by group it reads codes as words, makes
integers of them (or of FP8 and MXFP4 the small floats that they are), which every serving dtype
holds exactly, multiplies them by the tokens' values, and scales the sums, in float32. So a value is
never rounded to the serving dtype. Where a form's inputs are integers of one byte (int8_row),
products and sums are integers, up to one scale for each row and token at the end.
Invariant: nothing depends on a device value, so that a step can be captured in a graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere
import triton
import triton.language as tl

from engine.checkpoint.packed_layouts import FORMS, FP8_ROW_END_BYTES, FP8_ROWS, PANEL_ROWS, Form
from engine.worker.model.weight import PLAIN, Weight

_FEW_TOKENS, _MANY_TOKENS = 16, 64
"""Tokens of a program, for steps of few and of many: warming up meets both sizes."""
_FEW_ROWS, _MANY_ROWS = 32, 64
_FP8_MAX, _FP8_LEAST_SCALE = 448.0, 2.0**-100
_PLAIN, _HEADED, _SIXES, _POWER = range(4)
"""How a group's scale is stored.

Alone; as an integer factor of its block's head; as six such bits; as an exponent."""


class TritonLinear:
    """Matrices of one input, in panels or plain; outputs have the inputs' dtype."""

    def __init__(self, matrices: list[Weight], biases: list[torch.Tensor]) -> None:
        each: list[torch.Tensor | None] = [*biases] or [None] * len(matrices)
        self._parts = list(zip(matrices, each, strict=True))
        self._fp8 = {
            i: Fp8Rows(matrix) for i, matrix in enumerate(matrices) if matrix.scheme == FP8_ROWS
        }
        self._num_outputs = sum(matrix.shape[0] for matrix in matrices)

    def __call__(self, x: torch.Tensor, num_few: int | None = None) -> torch.Tensor:
        """Multiply [num_tokens, depth] to [num_tokens, rows of all matrices]."""
        x = x.contiguous()
        out, column = x.new_empty(len(x), self._num_outputs), 0
        for i, (matrix, bias) in enumerate(self._parts):
            end = column + matrix.shape[0]
            if matrix.scheme in PLAIN:
                out[:, column:end] = F.linear(x, matrix.values, bias)
            elif i in self._fp8:
                out[:, column:end] = self._fp8[i](x, bias)
            else:
                multiply(out, x, matrix, bias, column)
            column = end
        return out


class Fp8Rows:
    """An FP8 matrix that rounds its inputs to FP8, by torch's scaled products."""

    def __init__(self, matrix: Weight) -> None:
        num_rows, depth = matrix.shape
        rows = matrix.data.view(-1, depth + FP8_ROW_END_BYTES)[:num_rows]
        self._codes = rows[:, :depth].view(torch.float8_e4m3fn).t()
        self._scales = rows[:, depth : depth + 4].contiguous().view(torch.float32).view(1, -1)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Inputs [num_tokens, depth], bfloat16, to [num_tokens, rows]."""
        codes, scales = rounded_to_fp8(x)
        kind = F.ScalingType.RowWise
        out = F.scaled_mm(
            codes, self._codes, scales, kind, self._scales, kind, output_dtype=x.dtype
        )
        return out if bias is None else out.add_(bias)


def rounded_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs [num_tokens, depth] to E4M3; a scale for each token, float32 [num_tokens, 1].

    The scale is the token's largest magnitude over the largest of the format's, 448.
    """
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp_(min=_FP8_LEAST_SCALE)
    return (wide / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales


def multiply(
    out: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, column: int
) -> None:
    """Multiply x [num_tokens, depth] by a matrix in panels, to columns of out from `column` on.

    Args:
        out: [num_tokens, columns], of x's dtype.
        x: contiguous.
        weight: of a scheme that ends in `_panels`.
        bias: float32 or x's dtype, [rows of the matrix].
        column: where the matrix's rows begin in out.
    """
    num_tokens, depth = x.shape
    if not num_tokens:
        return
    name = weight.scheme.removesuffix("_panels")
    form, num_rows = FORMS[name], weight.shape[0]
    is_few = num_tokens <= _FEW_TOKENS
    tokens = _FEW_TOKENS if is_few else _MANY_TOKENS
    rows = _FEW_ROWS if is_few or form.group > 32 else _MANY_ROWS  # a group stays in registers
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens))
    panels, panel_bytes = weight.data, weight.data.shape[1]
    shared = (num_tokens, num_rows, depth, panel_bytes)
    if form.rounds_inputs:
        codes, scales = rounded_inputs(x)
        _bytes_kernel[grid](
            out, codes, scales, panels, panels.view(torch.float32), x if bias is None else bias,
            out.stride(0), column, *shared,
            HAS_BIAS=bias is not None, TOKENS=tokens, ROWS=rows, PANEL_ROWS=PANEL_ROWS, STEP=64,
            num_warps=4,
        )  # fmt: skip
        return
    _panels_kernel[grid](
        out, x, panels, panels.view(torch.int32), panels.view(torch.float16),
        panels.view(torch.float32), x if bias is None else bias, out.stride(0), column, *shared,
        CODE_BITS=form.code_bits, GROUP=form.group, SCALE=_scale_kind(name, form),
        SCALE_BYTES=_scale_bytes(name, form),
        HAS_MINIMUM=name in ("q4_1", "q5_1"), HAS_ZERO=name.startswith("int4"),
        ZERO={"q4_0": 8, "q5_0": 16, "q6_k": 32}.get(name, 0),
        HEAD_BYTES=form.head_bytes, GROUP_BYTES=form.group * form.code_bits // 8 + form.scale_bytes,
        IS_FLOAT4=name == "mxfp4", IS_FLOAT8=name.startswith("fp8"),
        HAS_BIAS=bias is not None, TOKENS=tokens, ROWS=rows, PANEL_ROWS=PANEL_ROWS, num_warps=4,
    )  # fmt: skip


def rounded_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [num_tokens, depth] to int8 with a scale for each token, float32 [num_tokens].

    The scale is the token's largest magnitude over 127; codes are the nearest, ties to even.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    divisors = torch.where(scales < torch.finfo(torch.float32).tiny, torch.inf, scales)
    return (wide / divisors[:, None]).round().to(torch.int8), scales


def _scale_kind(name: str, form: Form) -> int:
    if form.has_sixes:
        return _SIXES
    if form.head_bytes:
        return _HEADED
    return _POWER if name == "mxfp4" else _PLAIN


def _scale_bytes(name: str, form: Form) -> int:
    if form.has_sixes:
        return 0
    return 4 if name.startswith(("int", "fp8")) else form.scale_bytes // (1 + name.endswith("_1"))


@triton.jit
def _unpacked(
    words, codes, there, rows_at, group, is_row,
    CODE_BITS: tl.constexpr, GROUP: tl.constexpr, PANEL_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Unpack codes of a group, int32 [GROUP, ROWS]: bytes with a sign, or fewer bits from 0 on."""
    values = tl.arange(0, GROUP)
    if CODE_BITS == 8:
        places = there[None, :] + group + values[:, None] * PANEL_ROWS + rows_at[None, :]
        return tl.load(codes + places, mask=is_row[None, :], other=0).to(tl.int8).to(tl.int32)
    eights = tl.arange(0, GROUP // 8)
    places = (there + group)[None, :] // 4 + eights[:, None] * PANEL_ROWS + rows_at[None, :]
    packed = tl.load(words + places, mask=is_row[None, :], other=0)
    shifts = 4 * tl.arange(0, 8)
    spread = (packed[:, None, :] >> shifts[None, :, None]) & 15
    low = tl.reshape(spread, (GROUP, ROWS))
    if CODE_BITS == 4:
        return low
    high_at = (there + group + GROUP * PANEL_ROWS // 2) // 4 + rows_at
    high = tl.load(words + high_at, mask=is_row, other=0)
    bits = values % 8 // 2 * 8 + (CODE_BITS - 4) * (values // 8 * 2 + values % 2)
    above = (high[None, :] >> bits[:, None]) & ((1 << (CODE_BITS - 4)) - 1)
    return low | (above << 4)


@triton.jit
def _small_floats(codes, IS_FLOAT4: tl.constexpr):
    """Widen codes of MXFP4 and FP8 (E4M3) to float32."""
    if IS_FLOAT4:
        magnitude = codes & 7
        more = tl.maximum((magnitude >> 1) - 1, 0)
        doubled = tl.where(magnitude < 2, magnitude, (2 + (magnitude & 1)) << more)
        value = doubled.to(tl.float32) * 0.5
        return tl.where((codes & 8) != 0, -value, value)
    # as float16, whose exponent has one bit more, they are 256 times too small
    halves = ((codes & 128) << 8) | ((codes & 127) << 7)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _sixes(words, head, rows_at, number, is_row, PANEL_ROWS: tl.constexpr):
    """Read scales and minimums of group `number` of eight, integers of six bits; as in forms.h."""
    at = (head + 4 * PANEL_ROWS) // 4 + rows_at
    low = tl.load(words + at, mask=is_row, other=0)
    middle = tl.load(words + at + PANEL_ROWS, mask=is_row, other=0)
    high = tl.load(words + at + 2 * PANEL_ROWS, mask=is_row, other=0)
    shift = number % 4 * 8
    if number < 4:
        scale, minimum = (low >> shift) & 63, (middle >> shift) & 63
    else:
        scale = ((high >> shift) & 15) | ((low >> (shift + 2)) & 48)
        minimum = ((high >> (shift + 4)) & 15) | ((middle >> (shift + 2)) & 48)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _scales(
    words, codes, halves, floats, head, at, rows_at, number, is_row,
    SCALE: tl.constexpr, SCALE_BYTES: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    PANEL_ROWS: tl.constexpr,
):  # fmt: skip
    """Read scales and minimums of rows, float32 [ROWS]; they are at `at`, or in the head."""
    minimum = tl.zeros_like(rows_at).to(tl.float32)
    if SCALE == 2:
        scale, minimum = _sixes(words, head, rows_at, number, is_row, PANEL_ROWS)
        scale *= tl.load(halves + head // 2 + rows_at, mask=is_row, other=0.0).to(tl.float32)
        least = tl.load(halves + head // 2 + PANEL_ROWS + rows_at, mask=is_row, other=0.0)
        minimum *= -least.to(tl.float32)
    elif SCALE == 1:
        integers = tl.load(codes + at + rows_at, mask=is_row, other=0).to(tl.int8)
        scale = tl.load(halves + head // 2 + rows_at, mask=is_row, other=0.0).to(tl.float32)
        scale *= integers.to(tl.float32)
    elif SCALE == 3:
        exponents = tl.load(codes + at + rows_at, mask=is_row, other=0).to(tl.int32)
        bits = tl.where(exponents == 0, 0x400000, exponents << 23)
        scale = bits.to(tl.float32, bitcast=True)
    elif SCALE_BYTES == 4:
        scale = tl.load(floats + at // 4 + rows_at, mask=is_row, other=0.0)
    else:
        scale = tl.load(halves + at // 2 + rows_at, mask=is_row, other=0.0).to(tl.float32)
    if HAS_MINIMUM:
        behind = at // 2 + PANEL_ROWS + rows_at
        minimum = tl.load(halves + behind, mask=is_row, other=0.0).to(tl.float32)
    return scale, minimum


# views of a step's tensors begin anywhere, and no step may wait for a compiler
@triton.jit(do_not_specialize=["num_tokens", "column"], do_not_specialize_on_alignment=["x", "out"])
def _panels_kernel(
    out, x, codes, words, halves, floats, bias, out_stride, column,
    num_tokens, num_rows, depth, panel_bytes,
    CODE_BITS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_ZERO: tl.constexpr, ZERO: tl.constexpr,
    HEAD_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr,
    IS_FLOAT4: tl.constexpr, IS_FLOAT8: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PANEL_ROWS: tl.constexpr,
):  # fmt: skip
    """Run a program for ROWS rows of the matrix and TOKENS tokens."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = rows < num_rows, tokens < num_tokens
    there = (rows // PANEL_ROWS).to(tl.int64) * panel_bytes
    rows_at = rows % PANEL_ROWS
    values = tl.arange(0, GROUP)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for g in range(tl.cdiv(depth, GROUP)):
        head = there
        if HEAD_BYTES > 0:
            block = g * GROUP // 256
            number = g - block * (256 // GROUP)
            behind_blocks = block * ((HEAD_BYTES + 256 // GROUP * GROUP_BYTES) * PANEL_ROWS)
            head = there + behind_blocks
            group = behind_blocks + (HEAD_BYTES + number * GROUP_BYTES) * PANEL_ROWS
        else:
            number = 0
            group = g * GROUP_BYTES * PANEL_ROWS
        code = _unpacked(
            words, codes, there, rows_at, group, is_row, CODE_BITS, GROUP, PANEL_ROWS, ROWS
        )
        at = there + group + CODE_BITS * GROUP * PANEL_ROWS // 8
        scale, minimum = _scales(
            words, codes, halves, floats, head, at, rows_at, number, is_row,
            SCALE, SCALE_BYTES, HAS_MINIMUM, PANEL_ROWS,
        )  # fmt: skip
        if HAS_ZERO:
            zeros = tl.load(codes + at + SCALE_BYTES * PANEL_ROWS + rows_at, mask=is_row, other=0)
            code -= zeros.to(tl.int32)[None, :]
        if IS_FLOAT4 or IS_FLOAT8:
            weights = _small_floats(code, IS_FLOAT4)
        else:
            weights = (code - ZERO).to(tl.float32)
        columns = g * GROUP + values
        is_there = is_token[:, None] & (columns < depth)[None, :]
        places = tokens.to(tl.int64)[:, None] * depth + columns[None, :]
        inputs = tl.load(x + places, mask=is_there, other=0.0)
        part = tl.dot(inputs, weights.to(inputs.dtype), input_precision="ieee")
        sums += part * scale[None, :]
        if HAS_MINIMUM or SCALE == 2:
            sums += tl.sum(inputs.to(tl.float32), 1)[:, None] * minimum[None, :]
    _store(out, sums, bias, tokens, rows, is_token, is_row, out_stride, column, HAS_BIAS)


@triton.jit
def _store(
    out, sums, bias, tokens, rows, is_token, is_row, out_stride, column, HAS_BIAS: tl.constexpr
):
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    places = tokens.to(tl.int64)[:, None] * out_stride + column + rows[None, :]
    is_there = is_token[:, None] & is_row[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_tokens", "column"], do_not_specialize_on_alignment=["out"])
def _bytes_kernel(
    out, x, x_scales, codes, floats, bias, out_stride, column,
    num_tokens, num_rows, depth, panel_bytes,
    STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PANEL_ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply byte inputs with a byte matrix; each token and each row has a scale."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = rows < num_rows, tokens < num_tokens
    there = (rows // PANEL_ROWS).to(tl.int64) * panel_bytes
    rows_at = rows % PANEL_ROWS
    values = tl.arange(0, STEP)
    sums = tl.zeros((TOKENS, ROWS), tl.int32)
    for first in range(0, depth, STEP):
        columns = first + values
        is_value = columns < depth
        places = tokens.to(tl.int64)[:, None] * depth + columns[None, :]
        inputs = tl.load(x + places, mask=is_token[:, None] & is_value[None, :], other=0)
        at = there[None, :] + 4 * PANEL_ROWS + columns[:, None] * PANEL_ROWS + rows_at[None, :]
        w = tl.load(codes + at, mask=is_value[:, None] & is_row[None, :], other=0)
        sums += tl.dot(inputs, w.to(tl.int8, bitcast=True), out_dtype=tl.int32)
    scale = tl.load(floats + there // 4 + rows_at, mask=is_row, other=0.0)
    token_scale = tl.load(x_scales + tokens, mask=is_token, other=0.0)
    found = sums.to(tl.float32) * (scale[None, :] * token_scale[:, None])
    _store(out, found, bias, tokens, rows, is_token, is_row, out_stride, column, HAS_BIAS)
