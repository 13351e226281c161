"""Read and write the records of a step's sequences, which lie in blocks of the pool.

A record has, for each recurrent layer in order, the tail of its convolution and then its states, as
float32; its bytes go over into the next of its blocks wherever one is full. A step reads one record
of a sequence and writes another, so that a worker's death within a step loses nothing.

Invariant: what a step reads it does not write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.delta_config import GatedDeltaConfig


@dataclass(frozen=True, slots=True)
class RecordBlocks:
    """The blocks of a sequence's record before a step, and after it."""

    read: Sequence[int] = ()
    """Empty: nothing is computed yet, and states are zero."""
    written: Sequence[int] = ()
    """Empty: what the step makes of them is not kept."""


def record_rows(records: Sequence[RecordBlocks], width: int) -> list[int]:
    """List the blocks that each sequence reads, then writes, padded with block 0."""
    rows: list[int] = []
    for each in records:
        for blocks in (each.read, each.written):
            rows += blocks
            rows += [0] * (width - len(blocks))
    return rows


class StepRecords:
    """The records of one step's sequences.

    Args:
        config: of the layers that keep states.
        kv: the pool, [num_blocks, ...].
        blocks: of each sequence.
        lengths: of each sequence, its new tokens, and its tokens with these.
    """

    def __init__(
        self,
        config: GatedDeltaConfig,
        kv: torch.Tensor,
        blocks: Sequence[RecordBlocks],
        lengths: Sequence[tuple[int, int]],
    ) -> None:
        self.lengths = lengths
        self._config, self._blocks = config, blocks
        self._pool = kv.view(len(kv), -1).view(torch.uint8).view(torch.float32)

    @classmethod
    def of(cls, config: GatedDeltaConfig, kv: torch.Tensor, batch: Any) -> StepRecords:
        """Return the records of a StepBatch, which may have none."""
        lengths = list(zip(batch.query_lens, batch.seq_lens, strict=True))
        return cls(config, kv, batch.records or [RecordBlocks()] * len(lengths), lengths)

    def read(self, index: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a sequence's part of one layer.

        Returns:
            the tail [conv_size - 1, conv_width] and states [num_value_heads, key_dim, value_dim].
        """
        config, block_ids = self._config, self._blocks[index].read
        if block_ids:
            values = torch.cat(self._pieces(block_ids, number))
        else:
            values = torch.zeros(config.layer_values, device=self._pool.device)
        tail, state = torch.split(values, [config.tail_values, config.state_values])
        shape = (config.num_value_heads, config.key_dim, config.value_dim)
        return tail.view(-1, config.conv_width), state.view(shape)

    def write(self, index: int, number: int, tail: torch.Tensor, state: torch.Tensor) -> None:
        """Write a sequence's part of one layer."""
        if not self._blocks[index].written:
            return
        values, first = torch.cat((tail.flatten(), state.flatten())), 0
        for piece in self._pieces(self._blocks[index].written, number):
            piece.copy_(values[first : first + len(piece)])
            first += len(piece)

    def _pieces(self, block_ids: Sequence[int], number: int) -> list[torch.Tensor]:
        """Find a layer's part of a record: views of the blocks that it lies in, in order."""
        size, width = self._config.layer_values, self._pool.shape[1]
        first, end, pieces = number * size, (number + 1) * size, []
        while first < end:
            block, offset = divmod(first, width)
            count = min(width - offset, end - first)
            pieces.append(self._pool[block_ids[block], offset : offset + count])
            first += count
        return pieces
