"""Choose compiled kernels or torch for attention and a step's small operations.

Invariant: the choice is made once, when the model is built, and its name says why it fell back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.kernels.attention_backends import (
    SMALL_OPERATIONS,
    AttentionNeeds,
    Machine,
    choose_attention,
    this_machine,
)
from engine.kernels.cpu import WIDENED
from engine.wire.sampling import TokenLogprob
from engine.worker.model.attention import StepBatch
from engine.worker.model.buffers import Take, fresh
from engine.worker.model.compiled import CompiledBackend, find_kernels
from engine.worker.model.draw_rows import RowDraw
from engine.worker.model.torch_backend import TorchBackend


class Backend(Protocol):
    """What computes a step's small operations and its attention."""

    name: str
    is_paged: bool
    """Attention reads blocks where they lie; else a step gathers whole tables, which is too much
    for a graph to keep."""

    @property
    def gated_delta(self) -> Callable[..., torch.Tensor] | None:
        """Layers by engine.worker.model.triton_delta; None: `delta` beside it computes them."""

    def plan(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        tables: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Any:
        """Compute what the layers of one step share; place and attend take it.

        Its `windows` are the plans of the groups of layers after the first.
        """

    def plan_of(self, plan: Any, kv: torch.Tensor) -> Any:
        """Make the step's plan over another view of the pool, for layers of other widths."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        added: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """rms_norm of x [num_tokens, dim], after x += scale * added, where something is."""

    def add(self, x: torch.Tensor, added: torch.Tensor, scale: float, factor: float = 1.0) -> None:
        """Set x to factor * (x + scale * added), each [num_tokens, dim]; norm() adds, too."""

    def grow(self, queries: torch.Tensor, growth: torch.Tensor) -> None:
        """Multiply [num_tokens, num_heads, head_dim] in place by growth [num_tokens, 1, 1]."""

    def norm_rows(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Norm each row of [num_tokens, num_rows, dim] in place; weight is [num_rows, dim]."""

    def gated(
        self, gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute what engine.worker.model.layers.gated does."""

    def split_gates(
        self, x: torch.Tensor, num_heads: int, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split queries, keys and values off the queries' gates, as `layers` beside it does."""

    def place(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        rope_index: int | None,
        kv: torch.Tensor,
        layer: int,
        plan: Any,
    ) -> None:
        """Rotate queries and keys in place, and write keys and values to the pool.

        qkv may have queries alone.
        """

    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        kv: torch.Tensor,
        layer: int,
        plan: Any,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
        num_kv_heads: int | None = None,
    ) -> torch.Tensor:
        """Attend from the step's queries to their sequences, [num_tokens, num_heads, head_dim].

        Sinks, float32 [num_heads], are a learnt score of each head. num_kv_heads is of the pool's
        layer, and needed if qkv has queries alone.
        """

    def sample_rows(self, logits: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [n] of logits [n, vocab_size], as `sampler.sample_rows` beside it has them."""

    def draw(self, rows: Sequence[RowDraw]) -> list[int]:
        """Choose one token per row, as engine.worker.model.draw_rows.draw_by_torch does."""

    def rate(
        self,
        rows: Sequence[torch.Tensor],
        token_ids: Sequence[int],
        num_alternatives: Sequence[int],
    ) -> list[TokenLogprob]:
        """Compute log-probabilities, as engine.worker.model.draw_rows.rate_by_torch does."""


COMPILED = "compiled kernels"


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    block_size: int | None = None,
    take: Take = fresh,
    attention_variant: int = WIDENED,
    faults: Mapping[str, str] | None = None,
) -> Backend:
    """Choose compiled kernels for the device and dtype if any, else torch with the reason.

    Args:
        device: where the model computes.
        dtype: of what it computes on.
        block_size: the pool's; None: it will be what the chosen one likes.
        take: where results lie.
        attention_variant: how compiled kernels multiply what many queries meet.
        faults: why packages are not used on a GPU, None: they are tried; or COMPILED on cores.
    """
    if device.type == "cuda":
        machine = this_machine(torch.cuda.get_device_capability(device), faults)
        return _choose_cuda_backend(device, dtype, config, block_size, machine)
    kernels, name = find_kernels(device.type, dtype)
    if faults is not None and COMPILED in faults:
        kernels, name = None, f"torch ({faults[COMPILED]})"
    if kernels is None:
        return TorchBackend(name)
    return CompiledBackend(kernels, name, take, attention_variant)


def _choose_cuda_backend(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    block_size: int | None,
    machine: Machine,
) -> Backend:
    needs = AttentionNeeds.of(config, str(dtype).removeprefix("torch."), block_size)
    choice = choose_attention(needs, machine)
    if choice.backend.name == "torch":
        return TorchBackend(choice.title)
    # only here is Triton known to be there
    from engine.worker.model.cuda import CudaBackend, DeviceLimits, TritonAttention
    from engine.worker.model.library_attention import flash_attention, torch_varlen_attention

    by_torch = {name: machine.faults[name] for name in SMALL_OPERATIONS if name in machine.faults}
    title = "; ".join([choice.title, *(f"{name} by torch: {by_torch[name]}" for name in by_torch)])
    if choice.backend.name == "flash":
        return CudaBackend(title, flash_attention(), by_torch=by_torch)
    if choice.backend.name == "torch_varlen":
        return CudaBackend(title, torch_varlen_attention(), by_torch=by_torch)
    group_size = config.num_heads // config.num_kv_heads
    limits = DeviceLimits.of(device)
    attention = TritonAttention(group_size, config.head_dim, dtype.itemsize, limits)
    return CudaBackend(title, attention, attention.queries_per_tile, by_torch)
