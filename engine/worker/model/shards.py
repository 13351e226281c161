"""Load some of a model's shards, and compute a layer's block or the logits by them.

Invariant: a shard's products are the same whichever process computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.packed_layouts import PANEL_ROWS, panels_shape
from engine.checkpoint.shards import Cut, cut_of, kept_form
from engine.checkpoint.weights_layout import is_embedding
from engine.errors import WorkerFailed
from engine.kernels.cpu import Kernels
from engine.worker.model.buffers import fresh
from engine.worker.model.finite import check_blocks
from engine.worker.model.linear import CompiledLinear, Linear, Linears
from engine.worker.model.reduction import ATTENTION, Reduction
from engine.worker.model.stored_tensors import Stored, StoredPart
from engine.worker.model.weight import (
    _PIECE_VALUES,
    Weight,
    pack_panels,
    packed_in_pairs,
)
from engine.worker.model.weights import map_files

Weights = dict[str, Weight]
_PROVED_ROWS, _PROVED_DEPTH = 3, 32
_MOST_ERROR = 2**-6
"""As much as bfloat16 rounds."""
Block = Callable[[torch.Tensor, Any], torch.Tensor]
"""A layer's attention or feed-forward: a step's rows, and what its layers share."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of one process."""

    config: ModelConfig
    """Of one shard."""
    weights: Mapping[int, Weights]
    """Each shard's weights by its number, including what all have."""
    reduction: Reduction

    def joined(
        self,
        place: int,
        kind: str,
        linears: Linears,
        make: Callable[[Weights, Linears, int], Block],
    ) -> Block:
        """Make one block of the shards' blocks, whose results are added up over the group.

        Args:
            place: of the parts, by the kind of block.
            kind: of the results of a shard's block, as it asks for room.
            make: makes a shard's block.
        """
        blocks = []
        for shard, weights in self.weights.items():
            own = replace(linears, take=self._taking(place, shard, kind, linears))
            blocks.append((shard, make(weights, own, shard)))
        reduction = self.reduction

        def block(x: torch.Tensor, step: Any) -> torch.Tensor:
            for shard, own in blocks:
                part = own(x, step)
                assert part.data_ptr() == reduction.part(place, shard, 1).data_ptr()
            return reduction.sum(place, len(x), linears.take)

        return block

    def _taking(
        self, place: int, shard: int, kind: str, linears: Linears
    ) -> Callable[[str, int, int, torch.dtype], torch.Tensor]:
        """Give results of a kind room among the parts of sums, and all others the usual."""

        def take(asked: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            if asked != kind:
                return linears.take(asked, num_rows, width, dtype)
            return self.reduction.part(place, shard, num_rows)

        return take

    def head(self, name: str, linears: Linears) -> Linear:
        """Make the output projection: the first process gets all logits, the others none."""
        vocab_size, count = self.config.vocab_size, self.reduction.shape.num_shards
        heads = [
            (vocab_size * shard // count, linears.make(weights, [name], is_kept=True))
            for shard, weights in self.weights.items()
        ]

        def head(x: torch.Tensor, num_few: int | None = None) -> torch.Tensor:
            parts = [(first, own(x, num_few)) for first, own in heads]
            return self.reduction.gathered(parts, len(x))

        return head


def prove(reduction: Reduction, kernels: Kernels) -> None:
    """Compute sums, and a product that is cut by columns, together with the other processes.

    Raises:
        WorkerFailed: a number is wrong.
    """
    reduction.prove()
    shape = reduction.shape
    depth = _PROVED_DEPTH * shape.num_shards
    matrix = _pattern(shape.hidden_size, depth).to(shape.dtype)
    x = _pattern(_PROVED_ROWS, depth).to(shape.dtype)
    for shard in shape.own_shards(reduction.rank):
        columns = slice(shard * _PROVED_DEPTH, (shard + 1) * _PROVED_DEPTH)
        part = reduction.part(ATTENTION, shard, _PROVED_ROWS)
        weight = Weight.plain(matrix[:, columns].contiguous())
        CompiledLinear(kernels, [weight], [], lambda *_, part=part: part)(x[:, columns])
    made = reduction.sum(ATTENTION, _PROVED_ROWS, fresh).float()
    expected = x.float() @ matrix.float().T
    error = float((made - expected).abs().max() / expected.abs().max())
    reduction.wait()
    if not error < _MOST_ERROR:
        what = f"a product over the group is wrong by {error:.1e} of its largest value"
        raise WorkerFailed(what, where="self-test", hint="penstock doctor --self-test")


def _pattern(num_rows: int, depth: int) -> torch.Tensor:
    """Make numbers from -1 to 1, the same in each process."""
    return (torch.arange(num_rows * depth).view(num_rows, depth) * 37 % 101 - 50) / 50


def load_shards(
    checkpoint: Checkpoint,
    dtype: str,
    shards: range,
    count: int,
    progress: Callable[[int, int], None],
    *,
    is_packed: bool,
) -> tuple[Weights, dict[int, Weights]]:
    """Load some of a model's shards, and what all shards have.

    Args:
        dtype: that is served; matrices stay as they are stored where it is float32, to which the
            kernels widen, and where they are codes that the kernels read.
        progress: called with (bytes done, bytes to do).
        is_packed: matrices that are multiplied are packed in pairs.
    """
    config = checkpoint.config
    head = f"{config.family.prefix}lm_head.weight"
    stored = map_files(checkpoint.tensors, lambda _done, _total: None)
    sources = dict(stored)
    if head not in sources:  # tied: rows are looked up in the one, and multiplied by as the other
        sources[head] = stored[f"{config.family.prefix}model.embed_tokens.weight"]
    total = sum(each.info.num_bytes for each in sources.values())
    common: Weights = {}
    own: dict[int, Weights] = {shard: {} for shard in shards}
    done = 0
    for name, source in sources.items():
        cut, form = cut_of(config, name, source.info.shape), kept_form(name, source.info)
        keep = _Keep(source, dtype, form, is_packed, partial(progress, done, total))
        if is_embedding(name):
            common[name] = _looked_up(source, dtype)
        elif cut is None:
            common[name] = keep(StoredPart(source, [(0, source.num_rows)]))
        else:
            for shard in shards:
                own[shard][name] = keep(_part(source, cut, shard, count), is_added=cut.has(shard))
        done += source.info.num_bytes
        progress(done, total)
    return common, {shard: {**common, **weights} for shard, weights in own.items()}


def _part(source: Stored, cut: Cut, shard: int, count: int) -> StoredPart:
    """Find a shard's part of a tensor."""
    all_rows, spans = [(0, source.num_rows)], list(cut.spans(shard, count))
    if cut.by == "columns":
        return StoredPart(source, all_rows, spans)
    return StoredPart(source, spans if cut.by == "rows" else all_rows)


def _looked_up(source: Stored, dtype: str) -> Weight:
    """Leave rows in the file if they can be looked up there."""
    info = source.info
    if info.is_in_blocks:
        check_blocks(source.blocks, info)
        return Weight(source.blocks, None, f"{info.dtype}_rows", info.shape)
    rows = source.rows(0, source.num_rows).reshape(info.shape)
    return Weight.plain(rows if info.is_plain else rows.to(getattr(torch, dtype)))


@dataclass(frozen=True, slots=True)
class _Keep:
    """Keep parts of one tensor in memory, as the kernels read them."""

    source: Stored
    dtype: str
    form: str | None
    """The form of its codes; None: it has values."""
    is_packed: bool
    beat: Callable[[], None]
    """Called after each piece."""

    def __call__(self, part: StoredPart, *, is_added: bool = True) -> Weight:
        """Make a weight of a part; zeros unless it is added to what other shards have."""
        if self.form is not None:
            return self._panels(part, self.form)
        info = self.source.info
        shape = (part.num_rows, *info.shape[1:-1], part.depth)[: len(info.shape)]
        values = part.rows(0, part.num_rows).reshape(shape)
        if not is_added:
            values = torch.zeros_like(values)
        if values.dim() < 2 or self.dtype != "float32" or not info.is_plain:
            values = values.to(getattr(torch, self.dtype))
        weight = Weight.plain(values.contiguous())
        return packed_in_pairs(weight) if self.is_packed and values.dim() == 2 else weight

    def _panels(self, part: StoredPart, form: str) -> Weight:
        data = torch.empty(panels_shape(form, part.num_rows, part.depth), dtype=torch.uint8)
        step = max(_PIECE_VALUES // (part.depth * PANEL_ROWS), 1)
        for first in range(0, len(data), step):
            pack_panels(part, form, data, first, min(first + step, len(data)))
            self.beat()
        return Weight(data, None, f"{form}_panels", (part.num_rows, part.depth))
