"""Load some of a model's shards, and compute a layer's block or the logits by them.

Invariant: a shard's products are the same whichever process computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.shards import Cut, cut_of
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.weights_layout import is_embedding
from engine.errors import WorkerFailed
from engine.kernels.cpu import Kernels
from engine.worker.model.buffers import fresh
from engine.worker.model.linear import CompiledLinear, Linear, Linears
from engine.worker.model.reduction import ATTENTION, Reduction
from engine.worker.model.stored_tensors import Stored
from engine.worker.model.weight import Weight, packed_in_pairs
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
            kernels widen.
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
        cut = cut_of(config, name, source.info.shape)
        is_matrix = is_packed and len(source.info.shape) == 2 and not is_embedding(name)
        if cut is None:
            whole = _whole(source)
            is_kept = is_embedding(name)
            common[name] = Weight.plain(whole) if is_kept else _weight(whole, dtype, is_matrix)
        else:
            for shard in shards:
                own[shard][name] = _weight(_part(source, cut, shard, count), dtype, is_matrix)
        done += source.info.num_bytes
        progress(done, total)
    return common, {shard: {**common, **weights} for shard, weights in own.items()}


def _whole(source: Stored) -> torch.Tensor:
    return source.rows(0, source.num_rows).reshape(source.info.shape)


def _part(source: Stored, cut: Cut, shard: int, count: int) -> torch.Tensor:
    """Read a shard's part of a tensor; it is a view of the file where its bytes are the values."""
    info: TensorInfo = source.info
    if cut.by == "none":
        whole = _whole(source)
        return whole if shard == 0 else torch.zeros_like(whole)
    if cut.by == "columns":
        size = info.shape[1]
        first, end = size * shard // count, size * (shard + 1) // count
        return source.rows(0, source.num_rows)[:, first:end].contiguous()
    parts = [source.rows(first, end) for first, end in cut.rows(shard, count)]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.reshape(-1, *info.shape[1:])


def _weight(values: torch.Tensor, dtype: str, is_matrix: bool) -> Weight:
    if values.dim() < 2 or dtype != "float32":
        values = values.to(getattr(torch, dtype))
    weight = Weight.plain(values)
    return packed_in_pairs(weight) if is_matrix else weight
