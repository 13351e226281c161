"""Compare what a backend computes on its device with float32 on the host, operation by operation.

Invariant: each operation meets fresh inputs, and memory in which nothing right lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from engine.checkpoint.model_config import SCALE_BYTES, ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.wire.sampling import SamplingParams
from engine.worker.model.attention import MAX_CODE, StepBatch, num_parts, planes
from engine.worker.model.backend import Backend
from engine.worker.model.layers import gated, rms_norm, rope_table, rotate
from engine.worker.model.proof_judge import difference, judged_attention, poison, seeded
from engine.worker.model.proof_shapes import (
    SHORT_WINDOW,
    Heads,
    Sequences,
    attention_steps,
    brief_steps,
)
from engine.worker.model.proving_layers import (
    mixture_difference,
    product_difference,
    recurrent_difference,
)
from engine.worker.model.sampler import draw_of, sample_rows
from engine.worker.model.weight import MatrixRows

_LAYER, _NUM_LAYERS = 1, 2
_ROWS = (1, 17)
"""Tokens of the small operations: a lone one, and more than a tile of 16."""
_POSITIONS = 512
_BRIEF_VOCABULARY = 4096
_CODES_OF_ONE = 32
"""Keys and values of an int8 pool are such parts, times powers of two: exact as codes."""
_UNREAD = 9.0
"""What lies where no query may read."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """An operation that is not what the host computes."""

    operation: str
    about: str
    """The shape, the rows and the difference."""
    has_failed: bool = False
    """It raised an error, and what it computes is not known."""


@dataclass(frozen=True, slots=True)
class Prover:
    """What the operations of a model are proved with.

    Args:
        num_processors: of the device.
        matrices: rows of the model's own, one of each form.
        is_brief: few steps of attention, and few logits: a start on cores has little time.
        has_codes: the pool is of int8.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    num_processors: int
    matrices: tuple[MatrixRows, ...] = ()
    is_brief: bool = False
    has_codes: bool = False

    def faults(self, backend: Backend) -> Iterator[Wrong]:
        """Yield all that this backend computes wrongly, or fails to."""
        found = self.attention(backend)
        if found is not None:
            yield found
        yield from self.others(backend)

    def attention(self, backend: Backend) -> Wrong | None:
        """Find a step whose attention is wrong; None: all are right."""
        return _tried("attention", lambda: self._attention(backend))

    def others(self, backend: Backend) -> Iterator[Wrong]:
        """Yield the small operations and layers that are wrong."""
        proofs: dict[str, Callable[[], str | None]] = {
            name: partial(self._in_rows, prove, backend)
            for name, prove in (
                ("norm", self._norm),
                ("norm_rows", self._norm_rows),
                ("gated", self._gated),
                ("place", self._place),
                ("draws", self._draws),
            )
        }
        proofs["delta"] = partial(self._recurrent, backend)
        proofs["mixture"] = partial(self._mixture, backend)
        for name, prove in proofs.items():
            found = _tried(name, prove)
            if found is not None:
                yield found

    def products(self, matrices: tuple[MatrixRows, ...]) -> Wrong | None:
        """Find a product that is wrong; None: all are right."""
        how = matrices, self.dtype, self.device
        return _tried("products", lambda: product_difference(*how))

    def _recurrent(self, backend: Backend) -> str | None:
        if self.config.delta is None:
            return None
        how = (self.config, self.dtype, self.block_size, self.device)
        return recurrent_difference(*how, backend)

    def _mixture(self, backend: Backend) -> str | None:
        if self.config.experts is None:
            return None
        return mixture_difference(self.config, self.dtype, self.device, backend)

    @torch.inference_mode()
    def _attention(self, backend: Backend) -> str | None:
        """Describe a step whose attention is wrong."""
        for number, heads in enumerate(self._kinds_of_heads()):
            generator = seeded(number)
            for sequences in self._steps(heads):
                case = _AttentionCase(self, heads, sequences, generator)
                for batch in case.batches(
                    has_captured=backend.is_paged and self.device.type != "cpu"
                ):
                    found = case.difference(backend, batch)
                    if found is not None:
                        return f"{case} {found}"
        return None

    @torch.inference_mode()
    def _in_rows(
        self, prove: Callable[[Backend, int, torch.Generator], str | None], backend: Backend
    ) -> str | None:
        """Describe a number of tokens for which a small operation is wrong."""
        for num_rows in _ROWS:
            found = prove(backend, num_rows, seeded(num_rows))
            if found is not None:
                return f"{num_rows} tokens: {found}"
        return None

    @property
    def num_steps(self) -> int:
        """Count the steps of attention."""
        return sum(len(self._steps(heads)) for heads in self._kinds_of_heads())

    def _kinds_of_heads(self) -> list[Heads]:
        """List the kinds of layers, with windows short enough to be passed."""
        config = self.config
        kinds: dict[Heads, None] = {}
        for heads, window in zip(config.heads, config.sliding_windows, strict=True):
            short = None if window is None else min(window, SHORT_WINDOW)
            kinds[Heads(config.num_heads, heads.num_kv_heads, heads.head_dim, short)] = None
        return list(kinds)

    def _steps(self, heads: Heads) -> list[Sequences]:
        if self.is_brief:
            return brief_steps(heads)

        def own_parts(num_sequences: int, num_keys: int) -> int:
            return num_parts(num_sequences, heads.num_kv_heads, num_keys, self.num_processors)

        return attention_steps(heads, self.num_processors, own_parts)

    def noise(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        """Make values of the dtype, on the host in float32."""
        return torch.randn(shape, generator=generator).to(self.dtype).float()

    def kept_noise(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        """Make keys or values that the pool's dtype holds exactly."""
        values = self.noise(generator, *shape)
        if not self.has_codes:
            return values
        codes = values.mul_(_CODES_OF_ONE).round_().clamp_(-MAX_CODE, MAX_CODE)
        exponents = torch.randint(-1, 2, (*shape[:-1], 1), generator=generator)
        return torch.ldexp(codes / _CODES_OF_ONE, exponents)

    def pool(self, values: torch.Tensor) -> torch.Tensor:
        """Make a pool of [num_blocks, layers, 2, block_size, num_kv_heads, head_dim]."""
        if not self.has_codes:
            return self.sent(values)
        *blocks, num_kv_heads, head_dim = values.shape
        num_bytes = num_kv_heads * (head_dim + SCALE_BYTES)
        kv = torch.zeros(*blocks, num_bytes, dtype=torch.int8)
        codes, scales = planes(kv, num_kv_heads, head_dim)
        factors = (values.abs().amax(-1) / MAX_CODE).log2_().ceil_().exp2_()
        codes.copy_(values / factors[..., None])
        scales.copy_(factors.transpose(-1, -2))
        return kv

    def held(self, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Read what a pool holds, as pool() takes it."""
        if not self.has_codes:
            return kv.cpu().float().clone()
        codes, scales = planes(kv, heads.num_kv_heads, heads.head_dim)
        return codes * scales.transpose(-1, -2)[..., None]

    def sent(self, values: torch.Tensor) -> torch.Tensor:
        """Copy values of the host to the device, in the dtype."""
        return values.to(self.dtype, copy=True).to(self.device)

    def _norm(self, backend: Backend, num_rows: int, generator: torch.Generator) -> str | None:
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        x, added = (self.noise(generator, num_rows, size) for _ in range(2))
        weight, ours = self.noise(generator, size), self.sent(x)
        poison([ours])
        out = backend.norm(ours, self.sent(weight), eps, self.sent(added), 1.0)
        wide = (x + added).to(self.dtype).float()
        expected = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return self._differs("norm", (ours, wide), (out, expected))

    def _norm_rows(self, backend: Backend, num_rows: int, generator: torch.Generator) -> str | None:
        heads = self.config.num_heads, self.config.head_dim
        x, weight = self.noise(generator, num_rows, *heads), self.noise(generator, *heads)
        ours = self.sent(x)
        backend.norm_rows(ours, self.sent(weight), self.config.rms_norm_eps)
        return self._differs("norm_rows", (ours, rms_norm(x, weight, self.config.rms_norm_eps)))

    def _gated(self, backend: Backend, num_rows: int, generator: torch.Generator) -> str | None:
        x, activation = self.noise(generator, num_rows, 2 * 480), self.config.hidden_act
        poison([self.sent(x[:, :480])])
        out = backend.gated(self.sent(x), activation)
        return self._differs("gated", (out, gated(x, activation)))

    def _place(self, backend: Backend, num_rows: int, generator: torch.Generator) -> str | None:
        """Prove that queries and keys turn, and that keys and values reach their blocks alone."""
        config, step = self.config, ((_POSITIONS - 20 - num_rows, num_rows),)
        heads = self._kinds_of_heads()[0]
        case = _AttentionCase(self, heads, step, generator)
        rope = next((rope for rope in config.ropes if rope is not None), None)
        tables = [] if rope is None else [self._angles(rope, self.device)]
        num_kv_heads, num_heads = heads.num_kv_heads, heads.num_heads
        shape = num_rows, num_heads + 2 * num_kv_heads, heads.head_dim
        x = self.noise(generator, *shape)
        ours, kv = self.sent(x), case.kv
        before = self.held(kv, heads)
        plan = backend.plan(case.batch, kv, tables)
        backend.place(ours, num_heads, None if rope is None else 0, kv, _LAYER, plan)
        turning, positions = num_heads + num_kv_heads, case.batch.positions.cpu()
        if rope is not None:
            cos, sin = (table.float()[positions] for table in self._angles(rope, "cpu"))
            x[:, :turning] = rotate(x[:, :turning], cos, sin)
        found = self._differs("place", (ours[:, :num_heads], x[:, :num_heads]))
        operation, kind = ("codes", torch.int8) if self.has_codes else ("place", self.dtype)
        found = found or difference(operation, ours[:, num_heads:], x[:, num_heads:], kind)
        slots = case.batch.token_slots.cpu()
        blocks, offsets = slots // self.block_size, slots % self.block_size
        before[blocks, _LAYER, 0, offsets] = x[:, num_heads:turning]
        before[blocks, _LAYER, 1, offsets] = x[:, turning:]
        held = self.held(kv, heads)
        return found or difference(operation, held.flatten(0, 3), before.flatten(0, 3), kind)

    def _angles(
        self, rope: RopeConfig, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_table(rope, _POSITIONS, _POSITIONS, self.dtype, torch.device(device))

    def _draws(self, backend: Backend, num_rows: int, generator: torch.Generator) -> str | None:
        size = self.config.vocab_size
        size = min(size, _BRIEF_VOCABULARY) if self.is_brief else size
        logits = torch.randn(num_rows, size, generator=generator) * 4
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"top_p": 0.9},
            {"top_k": 20},
            {"temperature": 0.0},
        )
        params = [SamplingParams(1, 5, **{"temperature": 1.0} | kind) for kind in kinds]
        rows = [draw_of(params[i % len(params)], i) for i in range(num_rows)]
        draws = torch.tensor(rows, dtype=torch.float64)
        for asked in (None, draws):
            on_device = None if asked is None else asked.to(self.device)
            tokens = backend.sample_rows(logits.to(self.device), on_device).cpu()
            expected = sample_rows(logits, asked)
            if not torch.equal(tokens, expected):
                return f"tokens {tokens.tolist()[:3]} instead of {expected.tolist()[:3]}"
        return None

    def _differs(self, operation: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        found = (difference(operation, *pair, self.dtype) for pair in pairs)
        return next((about for about in found if about is not None), None)


def _tried(operation: str, prove: Callable[[], str | None]) -> Wrong | None:
    """Prove an operation; a kernel that fails is as bad as a wrong one."""
    try:
        about = prove()
    except Exception as error:  # noqa: BLE001  # whatever a library raises
        return Wrong(operation, f"{type(error).__name__}: {str(error)[:200]}", has_failed=True)
    return None if about is None else Wrong(operation, about)


class _AttentionCase:
    """A step's sequences in shuffled blocks, and what attention has to yield of it."""

    def __init__(
        self, prover: Prover, heads: Heads, sequences: Sequences, generator: torch.Generator
    ) -> None:
        self._prover, self._heads, self._sequences = prover, heads, sequences
        config, size = prover.config, prover.block_size
        lengths = [before + new for before, new in sequences]
        counts = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(counts), generator=generator) + 1
        tables = [table.tolist() for table in torch.split(order, counts)]
        shape = heads.num_kv_heads, heads.head_dim
        pool = torch.full((sum(counts) + 1, _NUM_LAYERS, 2, size, *shape), _UNREAD)
        queries, own, expected = [], [], []
        self._sinks = None
        if config.family.has_sinks:
            self._sinks = torch.randn(heads.num_heads, generator=generator)
        self._how = config.attention_scale, heads.window, config.attention_softcap
        for table, length, (_, new) in zip(tables, lengths, sequences, strict=True):
            q = prover.noise(generator, new, heads.num_heads, heads.head_dim)
            keys, values = (prover.kept_noise(generator, length, *shape) for _ in range(2))
            blocks = torch.tensor(table)[torch.arange(length) // size]
            offsets = torch.arange(length) % size
            pool[blocks, _LAYER, 0, offsets], pool[blocks, _LAYER, 1, offsets] = keys, values
            queries.append(q)
            own.append(torch.cat((keys[-new:], values[-new:]), 1))
            expected.append(judged_attention(q, keys, values, *self._how, self._sinks))
        self._expected = torch.cat(expected)
        self._qkv = prover.sent(torch.cat((torch.cat(queries), torch.cat(own)), 1))
        self.kv = prover.pool(pool)
        self.batch = self._batch(tables, lengths)

    def __str__(self) -> str:
        first = f"{self._sequences[0][1]} after {self._sequences[0][0]}"
        heads = f"{self._heads.num_heads} on {self._heads.num_kv_heads} heads"
        return f"{len(self._sequences)} x {first}, {heads}:"

    def _batch(self, tables: list[list[int]], lengths: list[int]) -> StepBatch:
        size, device = self._prover.block_size, self._prover.device
        of_each = [torch.arange(before, before + new) for before, new in self._sequences]
        slots = [
            torch.tensor(table)[places // size] * size + places % size
            for table, places in zip(tables, of_each, strict=True)
        ]
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        counts = [new for _, new in self._sequences]
        return StepBatch(
            input_ids=torch.zeros(sum(counts), dtype=torch.int64).to(device),
            positions=torch.cat(of_each).to(device),
            token_slots=torch.cat(slots).to(device),
            query_lens=counts,
            seq_lens=lengths,
            block_tables=tables,
            logit_rows=[end - 1 for end in accumulate(counts)],
            device_tables=torch.tensor(padded, dtype=torch.int32).to(device),
            device_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        )

    def batches(self, *, has_captured: bool) -> Iterator[StepBatch]:
        """Yield the step, and as a graph has it if each sequence has one row."""
        yield self.batch
        if has_captured and all(new == 1 for _, new in self._sequences):
            longest = max(map(len, self.batch.block_tables)) * self._prover.block_size
            most = [longest] * len(self._sequences)
            yield replace(self.batch, block_tables=(), seq_lens=most)

    def difference(self, backend: Backend, batch: StepBatch) -> str | None:
        """Compute the step, and describe how it differs; None: it is right."""
        prover, heads = self._prover, self._heads
        sinks = None if self._sinks is None else self._sinks.to(prover.device)
        scale, window, softcap = self._how
        plan = backend.plan(batch, self.kv, [])
        poison([self._qkv[:, : heads.num_heads].contiguous()])
        out = backend.attend(
            self._qkv, heads.num_heads, self.kv, _LAYER, plan, scale, window, softcap, sinks
        )
        is_bent = softcap is not None or sinks is not None
        operation = "bent attention" if is_bent else "attention"
        return difference(operation, out, self._expected, prover.dtype)
