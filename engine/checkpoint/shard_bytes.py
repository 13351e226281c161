"""Count the bytes that the processes of a group hold: of weights, and of sums.

Invariant: what is counted is what engine.worker.model.shards loads; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import DTYPE_BYTES
from engine.checkpoint.packed_layouts import packed_shape, panels_shape
from engine.checkpoint.shards import cut_of, kept_form, num_shards
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.weights_layout import is_embedding

MOST_STEP_TOKENS = 2048
"""Prompt tokens of the largest step that is ever timed."""
NUM_PLACES = 2
"""The places of parts of sums: attention's, and the feed-forward's."""


class GroupBytes(NamedTuple):
    """What one worker of several processes holds besides its pool."""

    mapped: int
    """Bytes of the model's files, which all processes of all workers share."""
    own: tuple[int, ...]
    """Each process's own weights."""
    sums: int
    """Bytes of the parts of sums, which its processes share."""


class HeldPart(NamedTuple):
    """What is held of a tensor, or of a shard's part of it."""

    num_bytes: int
    is_mapped: bool


def group_bytes(checkpoint: Checkpoint, dtype: str, width: int, *, is_packed: bool) -> GroupBytes:
    """Count what a worker of `width` processes holds.

    Args:
        is_packed: matrices that are multiplied are packed in pairs.
    """
    count = num_shards(checkpoint)
    mapped, own = 0, [0] * width
    for name, tensor in sources(checkpoint):
        parts = list(held_parts(checkpoint, count, name, tensor, dtype, is_packed=is_packed))
        if name in checkpoint.tensors:  # a tied head is mapped as the embedding
            mapped += sum(part.num_bytes for part in parts if part.is_mapped)
        for rank in range(width):
            of_rank = parts if len(parts) == 1 else parts[rank * count // width :][: count // width]
            own[rank] += sum(part.num_bytes for part in of_rank if not part.is_mapped)
    row_bytes = checkpoint.config.hidden_size * DTYPE_BYTES[dtype]
    return GroupBytes(mapped, tuple(own), NUM_PLACES * count * MOST_STEP_TOKENS * row_bytes)


def sources(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorInfo]]:
    """Yield tensors by the names that they are used under; a tied output projection has its own."""
    yield from checkpoint.tensors.items()
    prefix = checkpoint.config.family.prefix
    head = f"{prefix}lm_head.weight"
    if head not in checkpoint.tensors:
        yield head, checkpoint.tensors[f"{prefix}model.embed_tokens.weight"]


def held_parts(
    checkpoint: Checkpoint,
    count: int,
    name: str,
    tensor: TensorInfo,
    dtype: str,
    *,
    is_packed: bool,
) -> Iterator[HeldPart]:
    """Yield what each of `count` shards holds of a tensor, or the one part that all have."""
    cut = cut_of(checkpoint.config, name, tensor.shape)
    rows, depth = tensor.shape[0], math.prod(tensor.shape[1:])
    how = name, tensor, dtype, is_packed
    if cut is None:
        yield _held(*how, rows, depth, is_in_place=True)
        return
    for shard in range(count):
        if cut.by == "rows":
            runs = [end - first for first, end in cut.spans(shard, count)]
            yield _held(*how, sum(runs), depth, is_in_place=len(runs) == 1)
        else:
            columns = depth // count if cut.by == "columns" else depth
            yield _held(*how, rows, columns, is_in_place=cut.by == "none" and cut.has(shard))


def _held(
    name: str,
    tensor: TensorInfo,
    dtype: str,
    is_packed: bool,
    num_rows: int,
    depth: int,
    *,
    is_in_place: bool,
) -> HeldPart:
    """Say what is held of rows that may lie in the file as they are used."""
    form = kept_form(name, tensor)
    if form is not None:
        return HeldPart(math.prod(panels_shape(form, num_rows, depth)), is_mapped=False)
    if is_embedding(name) and tensor.is_in_blocks:
        return HeldPart(tensor.num_bytes, is_mapped=True)
    if is_packed and len(tensor.shape) == 2 and not is_embedding(name):
        packed_bytes = math.prod(packed_shape(num_rows, depth)) * DTYPE_BYTES["bfloat16"]
        return HeldPart(packed_bytes, is_mapped=False)
    is_widened = dtype == "float32" and len(tensor.shape) > 1  # kernels widen
    is_kept = tensor.is_plain and (is_embedding(name) or is_widened)
    kept_dtype = tensor.dtype if is_kept else dtype
    is_mapped = is_in_place and tensor.is_plain and tensor.dtype == kept_dtype
    return HeldPart(num_rows * depth * DTYPE_BYTES[kept_dtype], is_mapped)
