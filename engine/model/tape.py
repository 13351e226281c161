"""Decode steps as lists of kernel calls, written down once and made again without Python.

A step of few tokens is hundreds of calls of microseconds each; all that changes between two steps
with as many sequences is what the calls find in memory. It is what CUDA graphs are on a GPU.
Owns: the tapes, and the inputs that each of them reads.
Invariant: whatever a tape's calls point to is alive and where it was; if anything has moved, the
tape is not found, and the step is recorded anew.
Never: changes a result: a replayed step is the recorded one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.cpu import Kernels
from engine.model.compiled import Buffers, CompiledPlan

MAX_TOKENS = 32
"""From here on the calls themselves take long enough to hide what Python adds."""
MAX_TAPES = 64

Layers = Callable[
    [torch.Tensor, torch.Tensor, CompiledPlan, torch.Tensor | None], torch.Tensor | None
]
"""Change x [num_tokens, dim] in place, over the pool; what is still to be added comes back. The
last is what queries are multiplied by, [num_tokens, 1, 1], where they are."""


@dataclass(frozen=True, slots=True)
class _Tape:
    x: torch.Tensor
    plan: CompiledPlan
    growth: torch.Tensor | None
    added: torch.Tensor | None
    calls: bytes


class Tapes:
    """The recorded steps of one model, the latest MAX_TAPES of them."""

    def __init__(self, kernels: Kernels, buffers: Buffers, layers: Layers) -> None:
        self._kernels = kernels
        self._buffers = buffers
        self._layers = layers
        self._tapes: dict[tuple[Any, ...], _Tape] = {}

    def run(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        plan: CompiledPlan,
        growth: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layers over x; returns x as they left it, and what is still to be added."""
        key = self._key(kv, plan)
        tape = self._tapes.get(key)
        if tape is None:
            return self._record(x, kv, plan, growth)
        tape.x.copy_(x)
        tape.plan.take_inputs(plan)
        if tape.growth is not None and growth is not None:
            tape.growth.copy_(growth)
        self._kernels.replay(tape.calls)
        return tape.x, tape.added

    def _record(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        plan: CompiledPlan,
        growth: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layers, and keep their calls unless a buffer moved on the way."""
        generation = self._buffers.generation
        self._kernels.record()
        try:
            added = self._layers(x, kv, plan, growth)
        finally:
            calls = self._kernels.recorded()
        if self._buffers.generation == generation:
            if len(self._tapes) >= MAX_TAPES:
                del self._tapes[next(iter(self._tapes))]
            self._tapes[self._key(kv, plan)] = _Tape(x, plan, growth, added, calls)
        return x, added

    def _key(self, kv: torch.Tensor, plan: CompiledPlan) -> tuple[Any, ...]:
        return (*plan.shape, *kv.shape, kv.data_ptr(), self._buffers.generation)
