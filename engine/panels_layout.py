"""The arena of a checkpoint whose matrices are quantised: which go into panels, and where.

Owns: that choice.
Invariant: daemon and workers come to the same layout.
Never: reads tensor data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.checkpoint import ALIGNMENT_BYTES, Checkpoint, WeightsLayout, layout_of
from engine.panels import FORM_BY_KIND, panels_shape
from engine.tensor_info import BLOCKS


@dataclass(frozen=True, slots=True)
class PanelsLayout:
    """Where weights lie in an arena of quantised matrices in panels."""

    num_bytes: int
    panels: dict[str, tuple[int, str]]
    """By name: offset, and the tensor that it is made of."""
    rest_offset: int
    rest: WeightsLayout
    """Of tensors that are widened, from there on."""
    looked_up: frozenset[str]
    """Tensors that stay in the file, for rows of them are looked up."""


def panels_layout(checkpoint: Checkpoint, dtype: str) -> PanelsLayout | None:
    """The arena of a checkpoint whose matrices are quantised: panels, then the rest in `dtype`.

    The embedding, of which a step looks up rows, stays in the file; a tied output projection is
    packed under the name that it would have. None where no matrix has a form that the kernels know,
    or they do not know `dtype`.
    """
    if dtype not in ("float32", "bfloat16"):
        return None
    prefix = checkpoint.config.family.prefix
    embedding, head = f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight"
    source_by_packed = {
        name: name
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype in FORM_BY_KIND and name != embedding
    }
    if head not in checkpoint.tensors and checkpoint.tensors[embedding].dtype in FORM_BY_KIND:
        source_by_packed[head] = embedding
    if not source_by_packed:
        return None
    offset, panels = 0, {}
    for name, source in source_by_packed.items():
        tensor = checkpoint.tensors[source]
        panels[name] = offset, source
        offset += math.prod(panels_shape(FORM_BY_KIND[tensor.dtype], *tensor.shape))
        offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    looked_up = {embedding} if checkpoint.tensors[embedding].dtype in BLOCKS else set()
    if head not in checkpoint.tensors and head not in source_by_packed:
        looked_up = set()  # the product reads it, too
    rest = layout_of(
        (
            (name, tensor.shape)
            for name, tensor in checkpoint.tensors.items()
            if name not in source_by_packed and name not in looked_up
        ),
        dtype,
    )
    return PanelsLayout(offset + rest.num_bytes, panels, offset, rest, frozenset(looked_up))
