"""Compute attention and a step's small operations on a GPU.

Invariant: after plan, nothing is read from the device and no list is looked at, so that a step can
be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
import triton

from engine.worker.model import triton_delta, triton_ops
from engine.worker.model.attention import (
    StepBatch,
    num_parts,
    several_queries_tiling,
    single_query_tiling,
)
from engine.worker.model.delta_inputs import RecordRuns
from engine.worker.model.draw_rows import draw_by_torch, rate_by_torch
from engine.worker.model.layers import gated, split_gates
from engine.worker.model.library_attention import PagedAttention
from engine.worker.model.paged_step import PagedStep, paged_step
from engine.worker.model.torch_backend import TorchBackend, TorchPlan
from engine.worker.model.triton_attention import attend_several, attend_single
from engine.worker.model.triton_sampling import sample_rows


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """One step as the kernels read it."""

    positions: torch.Tensor
    """[num_tokens] int64, as token_slots."""
    token_slots: torch.Tensor
    tables: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosine and signed sine of all positions, for each RoPE of the model."""
    step: PagedStep
    runs: RecordRuns | None = None
    """What the step does to records; None: the model keeps none."""
    twin: TorchPlan | None = None
    """The plan by which torch places keys and values; None: a kernel does."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a device that launches must fit."""

    num_processors: int
    shared_bytes: int
    """Shared memory that one program may have."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        """Read the limits of a CUDA device."""
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = triton.runtime.driver.active.utils.get_device_properties(index)
        return cls(properties["multiprocessor_count"], properties["max_shared_mem"])


class TritonAttention:
    """Attention by kernels of our own: any block size, any head, any dtype."""

    def __init__(self, group_size: int, head_dim: int, itemsize: int, limits: DeviceLimits) -> None:
        shape = (group_size, head_dim, itemsize, limits.shared_bytes)
        self._several, self._single = several_queries_tiling(*shape), single_query_tiling(*shape)
        self._num_processors = limits.num_processors
        self.queries_per_tile = self._several.num_rows // group_size

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        step: PagedStep,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from the step's queries, [num_tokens, num_heads, head_dim]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        how = (layer, step, scale, window, softcap, sinks)
        visible = step.max_tiled_len
        if window is not None:
            visible = min(window + self.queries_per_tile, visible)
        num_tiles = max(len(step.query_tiles), 1)
        parts = num_parts(num_tiles, kv.shape[4], visible, self._num_processors)
        attend_several(out, q, kv, *how, self._several, parts)
        if step.has_single_queries:
            visible = step.max_seq_len if window is None else min(window, step.max_seq_len)
            parts = num_parts(len(step.seq_lens), kv.shape[4], visible, self._num_processors)
            attend_single(out, q, kv, *how, self._single, parts)
        return out


class CudaBackend:
    """A step's small operations by Triton, its attention by what was chosen.

    Args:
        name: what was chosen, and why not better.
        queries_per_tile: what Triton's attention wants of a plan; 0: another was chosen.
        by_torch: the small operations that torch computes instead.
    """

    sample_rows = staticmethod(sample_rows)
    draw = staticmethod(draw_by_torch)
    rate = staticmethod(rate_by_torch)
    is_paged = True

    def __init__(
        self,
        name: str,
        attention: PagedAttention,
        queries_per_tile: int = 0,
        by_torch: Collection[str] = (),
    ) -> None:
        self.name = name
        self._attention = attention
        self._queries_per_tile = queries_per_tile
        self._twin = TorchBackend()
        self._is_placed_by_torch = "place" in by_torch
        for operation in {"norm", "norm_rows", "gated"}.intersection(by_torch):
            setattr(self, operation, getattr(self._twin, operation))
        if "draws" in by_torch:
            self.sample_rows = self._twin.sample_rows
        self.gated_delta = None if "delta" in by_torch else triton_delta.gated_delta

    def plan(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        tables: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> CudaPlan:
        step = paged_step(batch, kv.device, self._queries_per_tile)
        twin = self._twin.plan(batch, kv, tables) if self._is_placed_by_torch else None
        plan = CudaPlan(batch.positions, batch.token_slots, tables, step, twin=twin)
        if batch.device_records is None:
            return plan
        starts, lens = step.query_starts, step.seq_lens
        if batch.device_record_starts is not None:
            starts = batch.device_record_starts
            ends = starts[1:]
            lens = torch.where(ends > starts[:-1], lens.index_select(0, ends - 1), 0)
        runs = RecordRuns.of(starts, lens, batch.device_records, len(batch.positions))
        return replace(plan, runs=runs)

    def plan_of(self, plan: CudaPlan, _kv: torch.Tensor) -> CudaPlan:
        return plan

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        added: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return triton_ops.norm(x, weight, eps, added, scale)

    def add(self, x: torch.Tensor, added: torch.Tensor, scale: float, factor: float = 1.0) -> None:
        x.add_(added, alpha=scale)
        if factor != 1:
            x.mul_(factor)

    def grow(self, queries: torch.Tensor, growth: torch.Tensor) -> None:
        queries.mul_(growth)

    def norm_rows(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        triton_ops.norm_rows(rows, weight, eps)

    def gated(
        self, gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None
    ) -> torch.Tensor:
        if up is not None:
            return gated(gate_up, activation, up)
        return triton_ops.gated(gate_up, activation)

    split_gates = staticmethod(split_gates)

    def place(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        rope_index: int | None,
        kv: torch.Tensor,
        layer: int,
        plan: CudaPlan,
    ) -> None:
        if plan.twin is not None:
            self._twin.place(qkv, num_heads, rope_index, kv, layer, plan.twin)
            return
        angles = None if rope_index is None else plan.tables[rope_index]
        triton_ops.place(qkv, num_heads, angles, kv, layer, plan.positions, plan.token_slots)

    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        kv: torch.Tensor,
        layer: int,
        plan: CudaPlan,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
        num_kv_heads: int | None = None,
    ) -> torch.Tensor:
        q = qkv[:, :num_heads]
        return self._attention(q, kv, layer, plan.step, scale, window, softcap, sinks)
