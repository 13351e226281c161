"""Compute attention and a step's small operations by torch, on every device and in every dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.worker.model.attention import AttentionPlan, StepBatch, torch_attention, write_kv
from engine.worker.model.draw_rows import draw_by_torch, rate_by_torch
from engine.worker.model.layers import gated, rms_norm, rotate, split_gates
from engine.worker.model.sampler import sample_rows


@dataclass(frozen=True, slots=True)
class TorchPlan:
    batch: StepBatch
    attention: AttentionPlan
    angles: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosine and signed sine of the step's positions, for each RoPE of the model."""
    windows: tuple[TorchPlan, ...] = ()
    """The plans of the groups of layers after the first."""


class TorchBackend:
    """Every device and dtype, by torch's own operations."""

    sample_rows = staticmethod(sample_rows)
    draw = staticmethod(draw_by_torch)
    rate = staticmethod(rate_by_torch)
    is_paged = False
    gated_delta = None

    def __init__(self, name: str = "torch") -> None:
        self.name = name

    def plan(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        tables: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> TorchPlan:
        angles = [(cos[batch.positions], sin[batch.positions]) for cos, sin in tables]
        return self._plan(batch, kv, angles)

    def _plan(
        self, batch: StepBatch, kv: torch.Tensor, angles: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> TorchPlan:
        windows = tuple(self._plan(each, kv, angles) for each in batch.of_windows())
        return TorchPlan(batch, AttentionPlan(batch, kv), angles, windows)

    def plan_of(self, plan: TorchPlan, kv: torch.Tensor) -> TorchPlan:
        return self._plan(plan.batch, kv, plan.angles)

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        added: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """rms_norm of x, after x += scale * added, where something is."""
        if added is not None:
            self.add(x, added, scale)
        return rms_norm(x, weight, eps)

    def add(self, x: torch.Tensor, added: torch.Tensor, scale: float, factor: float = 1.0) -> None:
        x.add_(added, alpha=scale)
        if factor != 1:
            x.mul_(factor)

    def grow(self, queries: torch.Tensor, growth: torch.Tensor) -> None:
        """Multiply queries by their growth, in place."""
        queries.mul_(growth)

    def norm_rows(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rows.copy_(rms_norm(rows, weight, eps))

    def gated(
        self, gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None
    ) -> torch.Tensor:
        return gated(gate_up, activation, up)

    split_gates = staticmethod(split_gates)

    def place(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        rope_index: int | None,
        kv: torch.Tensor,
        layer: int,
        plan: TorchPlan,
    ) -> None:
        end_of_keys = (num_heads + qkv.shape[1]) // 2
        qk, v = qkv[:, :end_of_keys], qkv[:, end_of_keys:]
        if rope_index is not None:
            qk.copy_(rotate(qk, *plan.angles[rope_index]))
        if v.shape[1]:
            write_kv(kv, layer, qk[:, num_heads:], v, plan.attention)

    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        kv: torch.Tensor,
        layer: int,
        plan: TorchPlan,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
        num_kv_heads: int | None = None,
    ) -> torch.Tensor:
        how = (scale, window, softcap, sinks)
        q, own = qkv[:, :num_heads], qkv[:, num_heads:].chunk(2, 1)
        if num_kv_heads is not None and num_heads == qkv.shape[1]:
            shape = (num_kv_heads, qkv.shape[2])
            return torch_attention(q, None, shape, kv, layer, plan.attention, *how)
        return torch_attention(q, own, own[0].shape[1:], kv, layer, plan.attention, *how)
