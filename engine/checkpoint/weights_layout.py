"""Lay out converted, packed and quantised weights in the memory that all workers read.

Invariant: daemon and workers come to the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import DTYPE_BYTES
from engine.checkpoint.packed_layouts import (
    CPU_FORMS,
    FORMS,
    FP8_ROWS,
    form_of,
    packed_shape,
    panels_shape,
)
from engine.checkpoint.tensor_info import TensorInfo

_NamedShape = tuple[str, tuple[int, ...]]
_CONTINUING = frozenset({"k_proj", "v_proj", "up_proj", "w3"})
"""Projections that read the same input as the one before them."""
ALIGNMENT_BYTES = 64  # a cache line; also what vector loads like best


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Where each weight lies in the arena of converted weights."""

    num_bytes: int
    offset_by_name: dict[str, int]
    shape_by_name: dict[str, tuple[int, ...]]
    source_by_packed: dict[str, str] = field(default_factory=dict)
    """The source tensor of each matrix that is packed in pairs."""


def weights_layout(
    checkpoint: Checkpoint, dtype: str, *, can_widen: bool = False
) -> WeightsLayout | None:
    """Lay out the arena for serving in `dtype`; None: the files can be mapped unchanged.

    can_widen: matrices of any dtype can be multiplied with float32; vectors are small, and each
    worker converts its own.
    """
    is_served_as_stored = all(
        tensor.dtype == dtype or (can_widen and (dtype == "float32" or len(tensor.shape) == 1))
        for tensor in checkpoint.tensors.values()
    )
    is_mapped = is_served_as_stored and checkpoint.is_mappable
    return None if is_mapped else arena_layout(checkpoint, dtype)


def arena_layout(checkpoint: Checkpoint, dtype: str) -> WeightsLayout:
    """Lay out all weights of a checkpoint in `dtype`, in the order of a forward pass."""
    return layout_of(((name, tensor.shape) for name, tensor in checkpoint.tensors.items()), dtype)


def layout_of(shapes: Iterable[_NamedShape], dtype: str) -> WeightsLayout:
    """Lay out tensors of these shapes, by name."""
    offset, offset_by_name, shape_by_name = 0, {}, dict(shapes)
    for name, shape in shape_by_name.items():
        if not _continues_matrix(name):
            offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offset_by_name[name] = offset
        offset += math.prod(shape) * DTYPE_BYTES[dtype]
    return WeightsLayout(offset, offset_by_name, shape_by_name)


def packed_layout(checkpoint: Checkpoint, dtype: str) -> WeightsLayout | None:
    """Lay out the arena of all multiplied matrices, packed in pairs; the rest stays in the files.

    A tied output projection is packed under the name that it would have. The embedding stays
    stored, because a step only looks up rows. None: no kernel reads pairs for `dtype`, or a file
    cannot be mapped.
    """
    if dtype != "bfloat16" or not checkpoint.is_mappable:
        return None
    embedding, head = _ends(checkpoint)
    source_by_packed = {
        name: name
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) == 2 and not is_embedding(name)
    }
    source_by_packed.setdefault(head, embedding)
    offset, offset_by_name = 0, {}
    shape_by_name: dict[str, tuple[int, ...]] = {}
    for name, source in source_by_packed.items():
        num_rows, depth = checkpoint.tensors[source].shape
        shape_by_name[name] = packed_shape(num_rows, depth)
        offset_by_name[name] = offset
        offset += math.prod(shape_by_name[name]) * DTYPE_BYTES[dtype]
    return WeightsLayout(offset, offset_by_name, shape_by_name, source_by_packed)


def is_embedding(name: str) -> bool:
    """Return whether a step looks up rows of a tensor."""
    return name.endswith(("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"))


def _ends(checkpoint: Checkpoint) -> tuple[str, str]:
    """Name the embedding and the output projection."""
    prefix = checkpoint.config.family.prefix
    return f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight"


def _continues_matrix(name: str) -> bool:
    """Say whether a tensor must follow its predecessor without a gap, as one matrix."""
    return name.rsplit(".", 2)[-2] in _CONTINUING


_SMALL_AND_DECISIVE = (
    *(".gate.weight", ".router.weight", ".router.proj.weight", ".shared_expert_gate.weight"),
    *(".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight"),
)
"""Matrices that are not quantised at start."""

AS_STORED = "stored"
AT_START = {"q8": ("q8_0", "q8_0"), "q4": ("q4_1", "q8_0"), "int8": ("int8_row", "q8_0")}
"""Forms to which matrices can be quantised at start, by the setting's value: the layers' form, then
the output projection's. The projection's errors are in every logit."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Where one quantised matrix lies in the arena, as panels."""

    offset: int
    """In the arena."""
    source: str
    """The tensor that it is made of."""
    form: str


@dataclass(frozen=True, slots=True)
class PanelsLayout:
    """Where weights lie in an arena of quantised matrices in panels."""

    num_bytes: int
    panels: dict[str, Panels]
    rest_offset: int
    rest: WeightsLayout
    """Layout of widened tensors, after the panels."""
    looked_up: frozenset[str]
    """Tensors that stay in the file, for rows of them are looked up."""


def gpu_layout(checkpoint: Checkpoint, dtype: str, packing: str) -> PanelsLayout | WeightsLayout:
    """Lay out all of a checkpoint's weights in a GPU's arena.

    Args:
        packing: `widened`; `panels`: quantised matrices with a form stay quantised; `fp8`: also lay
            out matrices for products of FP8 with FP8.
    """
    if packing == "widened":
        return arena_layout(checkpoint, dtype)
    has_fp8 = packing == "fp8" and dtype == "bfloat16"
    panels = panels_layout(checkpoint, dtype, is_on_gpu=True, has_fp8_products=has_fp8)
    return panels or arena_layout(checkpoint, dtype)


def panels_layout(
    checkpoint: Checkpoint,
    dtype: str,
    weights: str = AS_STORED,
    *,
    is_on_gpu: bool = False,
    has_fp8_products: bool = False,
) -> PanelsLayout | None:
    """Lay out the arena of a quantised checkpoint: panels, then the rest in `dtype`.

    The embedding stays in the file, because a step only looks up rows. A tied output projection is
    packed under the name that it would have. None: the kernels do not know `dtype`, or know no
    matrix's form.

    Args:
        weights: `stored`: matrices that are quantised in the files; or one of AT_START: all
            matrices of a checkpoint without quantised ones.
        is_on_gpu: nothing is read from files, and all dtypes are known.
        has_fp8_products: FP8 can be multiplied by FP8.
    """
    if dtype not in ("float32", "bfloat16") and not is_on_gpu:
        return None
    embedding, head = _ends(checkpoint)
    sources = {name: name for name in checkpoint.tensors if not is_embedding(name)}
    if head not in checkpoint.tensors:
        sources[head] = embedding
    offset, panels = 0, {}
    for name, source in sources.items():
        tensor = checkpoint.tensors[source]
        form = _form(tensor, weights, is_head=name == head)
        if form is None or (is_on_gpu and form in CPU_FORMS):
            continue
        if has_fp8_products and _is_of_fp8_products(tensor):
            form = FP8_ROWS
        panels[name] = Panels(offset, source, form)
        num_rows, depth = tensor.shape
        offset += math.prod(panels_shape(form, num_rows, depth))
        offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not panels:
        return None
    embeddings = {name for name in checkpoint.tensors if is_embedding(name)}
    looked_up = {name for name in embeddings if _stays_in_file(checkpoint.tensors[name])}
    if head not in checkpoint.tensors and head not in panels:
        looked_up -= {embedding}  # the product reads it, too
    if is_on_gpu:
        looked_up = set()
    rest = layout_of(
        (
            (name, tensor.shape)
            for name, tensor in checkpoint.tensors.items()
            if name not in panels and name not in looked_up
        ),
        dtype,
    )
    return PanelsLayout(offset + rest.num_bytes, panels, offset, rest, frozenset(looked_up))


def _form(tensor: TensorInfo, weights: str, *, is_head: bool) -> str | None:
    """Return the form of a matrix in panels; None: it is not packed."""
    if weights == AS_STORED:
        return form_of(tensor)
    if len(tensor.shape) != 2 or tensor.name.endswith(_SMALL_AND_DECISIVE):
        return None
    form = AT_START[weights][is_head]
    return None if tensor.shape[1] % FORMS[form].group else form


def _is_of_fp8_products(tensor: TensorInfo) -> bool:
    is_rounded = tensor.apart is not None and tensor.apart.rounds_inputs
    return is_rounded and tensor.dtype == "fp8" and all(size % 16 == 0 for size in tensor.shape)


def _stays_in_file(tensor: TensorInfo) -> bool:
    """Say whether rows can be read in the file: whole, in order, aligned."""
    if tensor.is_plain:
        return tensor.start % DTYPE_BYTES[tensor.dtype] == 0
    return tensor.is_in_blocks
