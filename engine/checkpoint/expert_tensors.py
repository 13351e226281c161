"""Find one expert's tensor within a tensor that holds all experts'.

Invariant: what is returned lies wholly inside that tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from engine.checkpoint.family import ExpertNames
from engine.checkpoint.tensor_info import TensorInfo

_NAME = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)")
_BLOCK_BYTES = 16
_QUANTISED = "mxfp4_pairs"


def expert_tensor(
    found: Mapping[str, TensorInfo], names: ExpertNames, name: str
) -> TensorInfo | None:
    """Find one expert's tensor by the name that it would have alone.

    Returns:
        None: the files have no such stack, or its shape differs.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return found.get(name)
    prefix, number, part, kind = match[1], int(match[2]), match[3], match[4]
    is_pair = part in (names.gate, names.up)
    stack = f"{prefix}.{'gate_up_proj' if is_pair else names.down}"
    step, first = (2, int(part == names.up)) if is_pair else (1, 0)
    if kind == "bias":
        return _of_vector(found.get(f"{stack}_bias"), name, number, first, step)
    if stack in found and names.stack == "rows":
        return _of_rows(found[stack], name, number, first, step)
    if stack in found:
        return _of_matrix(found[stack], name, number, first, step)
    blocks, scales = (found.get(f"{stack}_{kind}") for kind in ("blocks", "scales"))
    if blocks is None or scales is None:
        return None
    is_sound = (blocks.dtype, scales.dtype) == ("U8", "U8") and len(blocks.shape) == 4
    if not is_sound or blocks.shape != (*scales.shape, _BLOCK_BYTES):
        return None
    return _of_blocks(blocks, scales, name, number, first, step)


def _of_vector(
    stack: TensorInfo | None, name: str, expert: int, first: int, step: int
) -> TensorInfo | None:
    if stack is None or len(stack.shape) != 2 or expert >= stack.shape[0]:
        return None
    width, item = stack.shape[1], stack.num_bytes // prod(stack.shape)
    return replace(
        stack,
        name=name,
        shape=(width // step,),
        start=stack.start + (expert * width + first) * item,
        num_bytes=width // step * item,
        strides=(step, 1),
    )


def _of_rows(
    stack: TensorInfo, name: str, expert: int, part: int, num_parts: int
) -> TensorInfo | None:
    if len(stack.shape) != 3 or expert >= stack.shape[0] or stack.shape[1] % num_parts:
        return None
    experts, rows, depth = stack.shape
    num_bytes = stack.num_bytes // (experts * num_parts)
    start = stack.start + (expert * num_parts + part) * num_bytes
    shape = (rows // num_parts, depth)
    return replace(stack, name=name, shape=shape, start=start, num_bytes=num_bytes)


def _of_matrix(
    stack: TensorInfo, name: str, expert: int, first: int, step: int
) -> TensorInfo | None:
    if len(stack.shape) != 3 or expert >= stack.shape[0]:
        return None
    _, inputs, width = stack.shape
    item = stack.num_bytes // prod(stack.shape)
    return replace(
        stack,
        name=name,
        shape=(width // step, inputs),
        start=stack.start + (expert * inputs * width + first) * item,
        num_bytes=width // step * inputs * item,
        strides=(step, width),
    )


def _of_blocks(
    blocks: TensorInfo, scales: TensorInfo, name: str, expert: int, first: int, step: int
) -> TensorInfo | None:
    num_experts, rows, count = scales.shape
    if expert >= num_experts:
        return None

    def part(tensor: TensorInfo, item: int) -> TensorInfo:
        return replace(
            tensor,
            name=name,
            dtype=_QUANTISED,
            shape=(rows // step, count * 32),
            start=tensor.start + (expert * rows + first) * count * item,
            num_bytes=rows // step * count * item,
            strides=(step * count, 1),
        )

    return replace(part(blocks, _BLOCK_BYTES), scales=part(scales, 1))
