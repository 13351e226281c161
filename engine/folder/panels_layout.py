"""The arena of a checkpoint whose matrices are quantised: which go into panels, and where.

Owns: that choice.
Invariant: daemon and workers come to the same layout.
Never: reads tensor data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.folder.checkpoint import (
    ALIGNMENT_BYTES,
    Checkpoint,
    WeightsLayout,
    arena_layout,
    layout_of,
)
from engine.folder.model_config import DTYPE_BYTES
from engine.folder.panels import FORMS, FP8_ROWS, form_of, panels_shape
from engine.folder.tensor_info import TensorInfo

AS_STORED = "stored"
AT_START = {"q8": ("q8_0", "q8_0"), "q4": ("q4_1", "q8_0"), "int8": ("int8_row", "q8_0")}
"""What matrices that are not quantised can be quantised to, by the setting's word: the form of the
layers', then of the output projection, whose errors are in every logit."""


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
    """Of tensors that are widened, from there on."""
    looked_up: frozenset[str]
    """Tensors that stay in the file, for rows of them are looked up."""


def gpu_layout(checkpoint: Checkpoint, dtype: str, packing: str) -> PanelsLayout | WeightsLayout:
    """The arena of a checkpoint on a GPU, which holds all of its weights.

    Args:
        checkpoint: whose.
        dtype: to serve in.
        packing: `widened`; `panels`: quantised matrices stay so, where they have a form; `fp8`: and
            those whose products are of FP8 with FP8 are laid out for these.
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
    """The arena of a checkpoint whose matrices are quantised: panels, then the rest in `dtype`.

    The embedding, of which a step looks up rows, stays in the file; a tied output projection is
    packed under the name that it would have. None where no matrix has a form that the kernels know,
    or they do not know `dtype`.

    Args:
        checkpoint: whose.
        dtype: to serve in.
        weights: `stored`: matrices that are quantised in the files; or one of AT_START: all of a
            checkpoint that has none such.
        is_on_gpu: nothing is read from files, and all dtypes are known.
        has_fp8_products: FP8 can be multiplied by FP8.
    """
    if dtype not in ("float32", "bfloat16") and not is_on_gpu:
        return None
    prefix = checkpoint.config.family.prefix
    embedding, head = f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight"
    sources = {name: name for name in checkpoint.tensors if name != embedding}
    if head not in checkpoint.tensors:
        sources[head] = embedding
    offset, panels = 0, {}
    for name, source in sources.items():
        tensor = checkpoint.tensors[source]
        form = _form(tensor, weights, is_head=name == head)
        if form is None:
            continue
        if has_fp8_products and _is_of_fp8_products(tensor):
            form = FP8_ROWS
        panels[name] = Panels(offset, source, form)
        num_rows, depth = tensor.shape
        offset += math.prod(panels_shape(form, num_rows, depth))
        offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not panels:
        return None
    looked_up = {embedding} if _stays_in_file(checkpoint.tensors[embedding]) else set()
    if is_on_gpu or (head not in checkpoint.tensors and head not in panels):
        looked_up = set()  # the product reads it, too
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
    """That of a matrix in panels; None: it is not put into any."""
    if weights == AS_STORED:
        return form_of(tensor)
    is_router = tensor.name.endswith((".gate.weight", ".router.weight"))  # small, and decides much
    if len(tensor.shape) != 2 or is_router:
        return None
    form = AT_START[weights][is_head]
    return None if tensor.shape[1] % FORMS[form].group else form


def _is_of_fp8_products(tensor: TensorInfo) -> bool:
    is_rounded = tensor.apart is not None and tensor.apart.rounds_inputs
    return is_rounded and tensor.dtype == "fp8" and all(size % 16 == 0 for size in tensor.shape)


def _stays_in_file(tensor: TensorInfo) -> bool:
    """True of rows that are read where they are: whole, in order, values at their own places."""
    if tensor.is_plain:
        return tensor.start % DTYPE_BYTES[tensor.dtype] == 0
    return tensor.is_in_blocks
