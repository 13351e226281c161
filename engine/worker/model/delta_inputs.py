"""Describe a Gated DeltaNet layer to kernels: its projections, constants, and records.

Invariant: distances are in values; value heads that share a key head lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.worker.model.records import RecordBlocks, record_rows

KEPT_TOKENS = 32
"""Tokens of a step whose inputs are kept, so that records can be written again."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """A step's projections for one layer, and how far a key head's values are from the next's."""

    heads: torch.Tensor
    """[num_tokens, ...]: queries, keys and values."""
    places: tuple[int, int]
    """[num places]: first key, first value; queries are at 0."""
    key_step: int
    """Of queries, too."""
    value_step: int
    gates: torch.Tensor
    """[num_tokens, ...]: the output's."""
    gate_step: int
    betas: torch.Tensor
    """[num_tokens, ...]: one per value head, as time steps."""
    time_steps: torch.Tensor
    small_step: int
    """Distance of betas and time steps from one key head to the next."""

    @classmethod
    def kept(cls, config: GatedDeltaConfig, like: torch.Tensor) -> DeltaInputs:
        """Allocate memory for the inputs of a step's first KEPT_TOKENS tokens, without gates."""
        ratio = config.num_value_heads // config.num_key_heads
        heads = like.new_empty(KEPT_TOKENS, config.conv_width)
        betas, time_steps = like.new_empty(2, KEPT_TOKENS, config.num_value_heads)
        places = (config.all_keys, 2 * config.all_keys)
        steps = (config.key_dim, ratio * config.value_dim)
        # gates scale outputs alone, which are dropped: any values do
        return cls(heads, places, *steps, heads, steps[1], betas, time_steps, ratio)

    def first(self, num_tokens: int) -> DeltaInputs:
        """Return the inputs of the first tokens alone."""
        return replace(self, heads=self.heads[:num_tokens], gates=self.gates[:num_tokens])


@dataclass(frozen=True, slots=True)
class RecordRuns:
    """A step's rows in runs, each of which takes one record further; on the device."""

    starts: torch.Tensor
    """[num_runs + 1] int32, as all here: each run's first row, and the end; a run may be empty."""
    lens: torch.Tensor
    """[num_runs]: tokens of the sequence up to the run's end; as many as the run's: none before."""
    of_rows: torch.Tensor
    """[num_rows]: the run of each."""
    records: torch.Tensor
    """[num_runs, 2, blocks of a record]: blocks to read and to write, or block 0."""

    @classmethod
    def of(
        cls, starts: torch.Tensor, lens: torch.Tensor, records: torch.Tensor, num_rows: int
    ) -> RecordRuns:
        """Find the run of each row."""
        rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
        of_rows = torch.searchsorted(starts[1:], rows, right=True, out_int32=True)
        return cls(starts, lens, of_rows, records)

    @classmethod
    def again(
        cls,
        rows: Sequence[tuple[int, int]],
        records: Sequence[RecordBlocks],
        width: int,
        device: torch.device,
    ) -> RecordRuns:
        """Make the runs that write some records of a step again; other rows change none.

        Args:
            rows: first row and number of rows of each record, in the step's order.
            records: what the step has read and written, of each.
            width: blocks of a record.
            device: where they go.
        """
        runs: list[tuple[int, int, RecordBlocks]] = []
        end = 0
        for (first, count), record in zip(rows, records, strict=True):
            if first > end:
                runs.append((first - end, first - end, RecordBlocks()))
            runs.append((count, count + bool(record.read), record))
            end = first + count
        counts, lens, places = zip(*runs, strict=True)
        starts, of_runs, blocks = (
            torch.tensor(values, dtype=torch.int32).to(device)
            for values in (list(accumulate(counts, initial=0)), lens, record_rows(places, width))
        )
        return cls.of(starts, of_runs, blocks.view(-1, 2, width), end)


@dataclass(frozen=True, slots=True)
class DeltaConstants:
    """What a layer learnt, in float32, and where its part of a record is."""

    conv: torch.Tensor
    """[conv_size, conv_width]."""
    decay: torch.Tensor
    """[num_value_heads], as step_bias: logarithms, per unit of time."""
    step_bias: torch.Tensor
    norm: torch.Tensor
    """[value_dim]."""
    eps: float
    number: int
    """Place among the layers that keep a state."""
