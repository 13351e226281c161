"""Run a step's parts on compiled CPU kernels; record decode steps and replay them.

Invariant: every tensor whose address is passed is contiguous in its rows and alive until the call
returns; results agree with engine.worker.model.layers and attention to rounding; a replayed step is
the recorded one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.checkpoint.model_config import ACTIVATIONS
from engine.kernels.cpu import BFLOAT16, FLOAT32, INT8, TILES, WIDENED, Kernels, load_kernels
from engine.wire.sampling import TokenLogprob
from engine.worker.model.attention import StepBatch
from engine.worker.model.buffers import Buffers, Take, fresh
from engine.worker.model.draw_rows import (
    RowDraw,
    draw_by_kernels,
    rate_by_kernels,
    sample_by_kernels,
)
from engine.worker.model.records import RecordBlocks

ELEMENT_TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""What the kernels read and write."""
_KV_TYPES = {**ELEMENT_TYPES, torch.int8: INT8}
"""What they read and write in a pool."""


def find_kernels(
    device: str, dtype: torch.dtype, level: str | None = None
) -> tuple[Kernels | None, str]:
    """Find the kernels for this dtype, and their level; or None, and `torch` with the reason.

    Args:
        level: of the kernels; None: the best that the machine can run.
    """
    if device != "cpu":
        return None, "torch"
    if dtype not in ELEMENT_TYPES:
        return None, f"torch (no compiled kernels for {str(dtype).removeprefix('torch.')})"
    try:
        return load_kernels(level)
    except ImportError as error:
        return None, f"torch (compiled kernels {error})"


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """One step as the kernels read it."""

    positions: torch.Tensor
    """[num_tokens] int64, as token_slots."""
    token_slots: torch.Tensor
    tables: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosine and signed sine of all positions, for each RoPE of the model."""
    sequences: torch.Tensor
    """[num_sequences, 3] int64: first row in the step, new tokens, tokens with these."""
    block_tables: torch.Tensor
    """[num_sequences, longest table or more] int64."""
    num_threads: int
    num_few: int
    """The batch's num_few_rows."""
    records: torch.Tensor | None = None
    """[num_sequences, 2, blocks of a record] int64: what is read, and written; 0: nothing."""
    windows: tuple[CompiledPlan, ...] = ()
    """The plans of the groups of layers after the first: other slots and tables, as wide."""

    @property
    def is_decode(self) -> bool:
        """True if no sequence has more new tokens than a decode step with drafts."""
        return len(self.positions) <= MAX_PENDING * len(self.sequences)

    @property
    def shape(self) -> tuple[int, ...]:
        """Key of a decode graph, besides memory: steps with the same key share one."""
        tables = [cosine.data_ptr() for cosine, _ in self.tables]
        sizes = len(self.positions), *self.block_tables.shape
        record_blocks = 0 if self.records is None else self.records.shape[2]
        return *sizes, record_blocks, self.num_threads, self.num_few, *tables

    def take_inputs(self, other: CompiledPlan) -> None:
        """Copy the inputs of another step of this shape in place."""
        for mine, new in (
            (self.positions, other.positions),
            (self.token_slots, other.token_slots),
            (self.sequences, other.sequences),
            (self.block_tables, other.block_tables),
            (self.records, other.records),
        ):
            if mine is not None and new is not None:
                mine.copy_(new)
        for own, another in zip(self.windows, other.windows, strict=True):
            own.token_slots.copy_(another.token_slots)
            own.block_tables.copy_(another.block_tables)


class CompiledBackend:
    """A step's small operations and its attention by the kernels of one instruction set."""

    is_paged = True
    gated_delta = None

    def __init__(
        self, kernels: Kernels, level: str, take: Take = fresh, attention_variant: int = WIDENED
    ) -> None:
        tiled = ", prompts by tiles" if attention_variant == TILES else ""
        self.name = f"compiled {level}{tiled}"
        self._attention_variant = attention_variant
        self.kernels = kernels
        self.take = take

    def plan(
        self,
        batch: StepBatch,
        _kv: torch.Tensor,
        tables: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> CompiledPlan:
        sequences: list[int] = []
        row = 0
        # a power of two: steps of one shape for as long as their sequences grow little
        width = 1 << (max(map(len, batch.block_tables)) - 1).bit_length()
        for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True):
            sequences += (row, query_len, seq_len)
            row += query_len
        plan = CompiledPlan(
            batch.positions,
            batch.token_slots,
            tables,
            torch.tensor(sequences).view(-1, 3),
            _padded(batch.block_tables, width),
            torch.get_num_threads(),
            batch.num_few_rows,
            records_tensor(batch.records) if batch.records else None,
        )
        if not batch.windows:
            return plan
        windows = tuple(
            replace(plan, token_slots=each.token_slots, block_tables=_padded(each[1], width))
            for each in batch.windows
        )
        return replace(plan, windows=windows)

    def plan_of(self, plan: CompiledPlan, _kv: torch.Tensor) -> CompiledPlan:
        return plan

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        added: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        num_tokens, dim = x.shape
        out = self.take("norm", num_tokens, dim, x.dtype)
        self.kernels.rms_norm(
            out.data_ptr(),
            x.data_ptr(),
            0 if added is None else added.data_ptr(),
            weight.data_ptr(),
            ELEMENT_TYPES[x.dtype],
            ELEMENT_TYPES[weight.dtype],
            num_tokens,
            1,
            dim,
            dim,
            dim,
            torch.get_num_threads(),
            scale,
            1.0,
            eps,
        )
        return out

    def add(self, x: torch.Tensor, added: torch.Tensor, scale: float, factor: float = 1.0) -> None:
        """Set x to factor * (x + scale * added), each [num_tokens, dim]: no norm."""
        num_tokens, dim = x.shape
        kind, threads = ELEMENT_TYPES[x.dtype], torch.get_num_threads()
        address, more = x.data_ptr(), added.data_ptr()
        shape = (num_tokens, 1, dim, dim, dim)
        self.kernels.rms_norm(0, address, more, 0, kind, kind, *shape, threads, scale, factor, 0.0)

    def grow(self, queries: torch.Tensor, growth: torch.Tensor) -> None:
        """Multiply rows of [num_tokens, num_heads, head_dim] by their token's, in place."""
        num_tokens, num_heads, head_dim = queries.shape
        self.kernels.grow(
            queries.data_ptr(),
            growth.data_ptr(),
            ELEMENT_TYPES[queries.dtype],
            num_tokens,
            num_heads * head_dim,
            queries.stride(0),
            torch.get_num_threads(),
        )

    def norm_rows(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        num_tokens, num_rows, dim = rows.shape
        address, stride = rows.data_ptr(), rows.stride(0)
        self.kernels.rms_norm(
            address,
            address,
            0,
            weight.data_ptr(),
            ELEMENT_TYPES[rows.dtype],
            ELEMENT_TYPES[weight.dtype],
            num_tokens,
            num_rows,
            dim,
            stride,
            stride,
            torch.get_num_threads(),
            1.0,
            1.0,
            eps,
        )

    def gated(
        self, gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
        num_tokens, width = gate.shape
        out = self.take("gated", num_tokens, width, gate.dtype)
        self.kernels.gated(
            out.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            ELEMENT_TYPES[gate.dtype],
            num_tokens,
            width,
            gate.stride(0),
            up.stride(0),
            ACTIVATIONS.index(activation),
            torch.get_num_threads(),
        )
        return out

    def split_gates(
        self, x: torch.Tensor, num_heads: int, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, heads_width = len(x), num_heads * head_dim
        qkv = self.take("qkv", num_tokens, x.shape[1] - heads_width, x.dtype)
        gates = self.take("gates", num_tokens, heads_width, x.dtype)
        self.kernels.split_gates(
            qkv.data_ptr(),
            gates.data_ptr(),
            x.data_ptr(),
            num_tokens,
            num_heads,
            head_dim * x.element_size(),
            (x.shape[1] - 2 * heads_width) * x.element_size(),
            torch.get_num_threads(),
        )
        return qkv, gates

    def place(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        rope_index: int | None,
        kv: torch.Tensor,
        layer: int,
        plan: CompiledPlan,
    ) -> None:
        """Rotate queries and keys of [num_tokens, num_heads + 2 * num_kv_heads, head_dim] in place.

        Their keys and values go to the pool, finite.
        """
        num_layers, _, block_size = kv.shape[1:4]
        head_dim = qkv.shape[2]
        cosines, sines, rotary_dim = 0, 0, 0
        if rope_index is not None:
            cosine_table, sine_table = plan.tables[rope_index]
            cosines, sines = cosine_table.data_ptr(), sine_table.data_ptr()
            rotary_dim = cosine_table.shape[-1]
        self.kernels.place(
            qkv.data_ptr(),
            kv.data_ptr(),
            cosines,
            sines,
            plan.positions.data_ptr(),
            plan.token_slots.data_ptr(),
            ELEMENT_TYPES[qkv.dtype],
            len(qkv),
            num_heads,
            (qkv.shape[1] - num_heads) // 2,
            head_dim,
            rotary_dim,
            block_size,
            num_layers,
            layer,
            _KV_TYPES[kv.dtype],
            kv.stride(2) * kv.element_size(),
            plan.num_threads,
        )

    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        kv: torch.Tensor,
        layer: int,
        plan: CompiledPlan,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
        num_kv_heads: int | None = None,
    ) -> torch.Tensor:
        num_layers, _, block_size = kv.shape[1:4]
        num_kv_heads = num_kv_heads or (qkv.shape[1] - num_heads) // 2
        head_dim = qkv.shape[2]
        out = self.take("attention", len(qkv), num_heads * head_dim, qkv.dtype)
        self.kernels.attend(
            out.data_ptr(),
            qkv.data_ptr(),
            kv.data_ptr(),
            plan.sequences.data_ptr(),
            plan.block_tables.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            ELEMENT_TYPES[qkv.dtype],
            len(plan.sequences),
            plan.block_tables.shape[1],
            qkv.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_layers,
            layer,
            window or 0,
            _KV_TYPES[kv.dtype],
            kv.stride(2) * kv.element_size(),
            self._attention_variant,
            plan.num_threads,
            scale,
            softcap or 0.0,
        )
        return out.view(-1, num_heads, head_dim)

    def sample_rows(self, logits: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
        return sample_by_kernels(self.kernels, logits, draws)

    def draw(self, rows: Sequence[RowDraw]) -> list[int]:
        return draw_by_kernels(self.kernels, rows)

    def rate(
        self,
        rows: Sequence[torch.Tensor],
        token_ids: Sequence[int],
        num_alternatives: Sequence[int],
    ) -> list[TokenLogprob]:
        return rate_by_kernels(self.kernels, rows, token_ids, num_alternatives)


def _padded(tables: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Make [num_sequences, width] of block tables, the rest being block 0."""
    ids: list[int] = []
    for table in tables:
        ids += table
        ids += [0] * (width - len(table))
    return torch.tensor(ids).view(-1, width)


def records_tensor(records: Sequence[RecordBlocks]) -> torch.Tensor:
    """Return what kernels read of records, as in CompiledPlan."""
    width = max(1, *(max(len(each.read), len(each.written)) for each in records))
    rows = [
        [*blocks, *[0] * (width - len(blocks))]
        for each in records
        for blocks in (each.read, each.written)
    ]
    return torch.tensor(rows).view(-1, 2, width)


MAX_TOKENS = 32
"""Maximum tokens of a graph; longer calls hide Python's overhead."""
MAX_PENDING = 8
"""Average new tokens per sequence in a recorded step; steps with drafts are recorded, too."""
MAX_GRAPHS = 64


class StepExtras(NamedTuple):
    """What some models' layers read besides the stream; None: the model has no such."""

    growth: torch.Tensor | None = None
    """What queries are multiplied by, [num_tokens, 1, 1]."""
    layer_inputs: torch.Tensor | None = None
    """[num_tokens, num_layers, size]."""

    def take(self, new: StepExtras) -> None:
        """Copy another step's values here, in place."""
        for mine, other in zip(self, new, strict=True):
            if mine is not None and other is not None:
                mine.copy_(other)


NO_EXTRAS = StepExtras()

Layers = Callable[[torch.Tensor, torch.Tensor, CompiledPlan, StepExtras], torch.Tensor | None]
"""Changes x [num_tokens, dim] in place, over the pool; returns what is still to be added."""


@dataclass(frozen=True, slots=True)
class _DecodeGraph:
    x: torch.Tensor
    plan: CompiledPlan
    extras: StepExtras
    added: torch.Tensor | None
    calls: bytes


class CpuDecodeGraphs:
    """The recorded steps of one model, the latest MAX_GRAPHS of them."""

    def __init__(self, kernels: Kernels, buffers: Buffers, layers: Layers) -> None:
        self._kernels = kernels
        self._buffers = buffers
        self._layers = layers
        self._graphs: dict[tuple[Any, ...], _DecodeGraph] = {}

    def run(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        plan: CompiledPlan,
        extras: StepExtras = NO_EXTRAS,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layers over x; return x, and what is still to be added."""
        key = self._key(kv, plan)
        graph = self._graphs.get(key)
        if graph is None:
            return self._record(x, kv, plan, extras)
        graph.x.copy_(x)
        graph.plan.take_inputs(plan)
        graph.extras.take(extras)
        self._kernels.replay(graph.calls)
        return graph.x, graph.added

    def _record(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        plan: CompiledPlan,
        extras: StepExtras = NO_EXTRAS,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layers, and keep their calls unless a buffer moved on the way."""
        generation = self._buffers.generation
        self._kernels.record()
        try:
            added = self._layers(x, kv, plan, extras)
        finally:
            calls = self._kernels.recorded()
        if self._buffers.generation == generation:
            if len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[self._key(kv, plan)] = _DecodeGraph(x, plan, extras, added, calls)
        return x, added

    def _key(self, kv: torch.Tensor, plan: CompiledPlan) -> tuple[Any, ...]:
        return (*plan.shape, *kv.shape, kv.data_ptr(), self._buffers.generation)
