"""Compare recurrent heads, mixtures and products on a device with float32 on the host.

Heads and mixtures are the model's own layers over random weights, with few heads and few experts;
products have the first rows of the model's own matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.model_config import ExpertsConfig, ModelConfig
from engine.checkpoint.packed_layouts import FORMS, FP8_ROWS
from engine.worker.model.attention import StepBatch
from engine.worker.model.backend import Backend
from engine.worker.model.delta import CHUNK_TOKENS, GatedDelta
from engine.worker.model.delta_inputs import KEPT_TOKENS, RecordRuns
from engine.worker.model.feed_forward import Experts
from engine.worker.model.layers import gated
from engine.worker.model.linear import Linear, Linears, choose_linears
from engine.worker.model.proof_judge import difference, seeded
from engine.worker.model.proof_shapes import Sequences, product_rows, recurrent_steps
from engine.worker.model.records import RecordBlocks, StepRecords, record_rows
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.weight import PLAIN, MatrixRows, Weight

_HOST = torch.device("cpu")
_MOST_KEY_HEADS, _MOST_EXPERTS = 2, 8
_SIZE, _INNER_SIZE = 64, 96
"""Sizes of a mixture's tokens, and of one expert."""
_POOL_LAYERS, _FP8_MAX = 2, 448.0
_PRODUCT_SIZE = 64
"""Tokens of a program for many, in our kernels."""


class _Step(NamedTuple):
    """What a layer reads of a step."""

    kv: torch.Tensor
    plan: Any
    num_few: int


@dataclass(frozen=True, slots=True)
class _Given(Linears):
    """Projections whose results are there already; the output's passes its inputs on."""

    made: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def make(
        self,
        weights: dict[str, Weight],
        names: list[str],
        *,
        has_bias: bool = False,
        is_kept: bool = False,
        kind: str = "linear",
    ) -> Linear:
        made = self.made.get(names[0].rpartition(".")[2])
        return lambda x, num_few=None: x if made is None else made


@torch.inference_mode()
def recurrent_difference(
    config: ModelConfig, dtype: torch.dtype, block_size: int, device: torch.device, backend: Backend
) -> str | None:
    """Describe a step whose recurrent heads or records are wrong; None: all are right."""
    assert config.delta is not None
    for number, sequences in enumerate(
        recurrent_steps(config.delta.conv_size, KEPT_TOKENS, CHUNK_TOKENS)
    ):
        case = _DeltaCase(config, dtype, block_size, sequences, number)
        found = case.difference(backend, device)
        if found is None and len(sequences) == 1 and backend.gated_delta is not None:
            found = case.rewritten_difference(backend, device)
        if found is not None:
            first = f"{sequences[0][1]} after {sequences[0][0]}"
            return f"{len(sequences)} x {first}: {found}"
    return None


class _DeltaCase:
    """A recurrent layer of few heads, its inputs, and the records before a step."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        block_size: int,
        sequences: Sequences,
        seed: int,
    ) -> None:
        assert config.delta is not None
        own = config.delta
        num_keys = min(own.num_key_heads, _MOST_KEY_HEADS)
        layers = sorted(own.layers)[:2]
        self._delta: GatedDeltaConfig = replace(
            own,
            num_key_heads=num_keys,
            num_value_heads=num_keys * (own.num_value_heads // own.num_key_heads),
            layers=frozenset(layers),
        )
        self._config, self._layer = replace(config, delta=self._delta), layers[-1]
        self._dtype, self._sequences = dtype, sequences
        self._generator = seeded(seed)
        self._num_rows = sum(new for _, new in sequences)
        prefix = f"{config.family.prefix}model.layers.{self._layer}.linear_attn."
        shapes = {
            name.removeprefix(prefix): shape
            for name, shape in expected_shapes(self._config)
            if name.startswith(prefix)
        }
        self._weights = {
            f"{prefix}{name}": Weight.plain(self._drawn(name, shape))
            for name, shape in shapes.items()
        }
        self._made = {
            name: self._noise(self._num_rows, shapes[f"{name}.weight"][0])
            for name in own.projections
        }
        self._place_records(block_size)

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype).float()

    def _drawn(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Draw a weight: long decays and short ones; of projections their number of rows alone."""
        if "proj" in name:
            return torch.empty(shape[0], 0)
        values = self._noise(*shape)
        return values - 2.0 if name in ("A_log", "dt_bias") else values * 0.5

    def _place_records(self, block_size: int) -> None:
        """Fill the records that the step reads, in blocks of a pool."""
        config, count = self._config, len(self._sequences)
        heads = config.heads[sorted(set(range(config.num_layers)) - self._delta.layers)[0]]
        shape = _POOL_LAYERS, 2, block_size, *heads
        block_bytes = torch.empty(shape, dtype=self._dtype, device="meta").nbytes
        width = -(-self._delta.record_bytes // block_bytes)
        order = (torch.randperm(2 * count * width, generator=self._generator) + 1).tolist()
        runs = [order[i * width : (i + 1) * width] for i in range(2 * count)]
        self._width = width
        self._blocks = [
            RecordBlocks(read if before else (), written)
            for read, written, (before, _) in zip(
                runs[::2], runs[1::2], self._sequences, strict=True
            )
        ]
        self._pool = torch.zeros((2 * count * width + 1, *shape), dtype=self._dtype)
        given = [RecordBlocks((), blocks.read) for blocks in self._blocks]
        records = StepRecords(self._delta, self._pool, given, [(0, 0)] * count)
        number = len(self._delta.layers) - 1
        for index in range(count):
            tail = self._noise(self._delta.tail_values)
            records.write(index, number, tail, self._noise(self._delta.state_values) * 0.3)

    def difference(self, backend: Backend, device: torch.device) -> str | None:
        """Compute the step, and describe what differs of its results and its records."""
        expected, kept = self._computed(TorchBackend(), _HOST, torch.float32)
        out, records = self._computed(backend, device, self._dtype)
        found = difference("recurrent", out, expected, self._dtype)
        return found or difference("record", records, kept, torch.float32)

    def rewritten_difference(self, backend: Backend, device: torch.device) -> str | None:
        """Write the record again as if all rows but the first were refused guesses."""
        layer, pool = self._layer_of(backend, device, self._dtype, self._num_rows)
        self._stepped(layer, backend, pool, self._dtype, self._num_rows)
        runs = RecordRuns.again([(0, 1)], self._blocks, self._width, device)
        layer.write_on_gpu(pool, runs)
        _, kept = self._computed(TorchBackend(), _HOST, torch.float32, num_rows=1)
        found = difference("record", self._records_in(pool), kept, torch.float32)
        return None if found is None else f"written again, {found}"

    def _computed(
        self,
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the heads, and the records that were written, [num_sequences, values]."""
        count = self._num_rows if num_rows is None else num_rows
        layer, pool = self._layer_of(backend, device, dtype, count)
        out = self._stepped(layer, backend, pool, dtype, count)
        return out, self._records_in(pool)

    def _layer_of(
        self, backend: Backend, device: torch.device, dtype: torch.dtype, num_rows: int
    ) -> tuple[GatedDelta, torch.Tensor]:
        """Return the layer, and a pool with the records before the step."""
        made = {n: x[:num_rows].to(dtype).to(device) for n, x in self._made.items()}
        weights = {n: Weight.plain(w.values.to(device)) for n, w in self._weights.items()}
        linears = _Given("given", None, made=made)
        layer = GatedDelta(self._config, weights, self._layer, backend, linears)
        return layer, self._pool.to(device, copy=True)

    def _stepped(
        self,
        layer: GatedDelta,
        backend: Backend,
        pool: torch.Tensor,
        dtype: torch.dtype,
        num_rows: int,
    ) -> torch.Tensor:
        """Run a step of the first rows."""
        batch = self._batch(pool.device, num_rows)
        step = _Step(pool, backend.plan(batch, pool, []), 0)
        return layer(torch.empty(num_rows, 0, dtype=dtype, device=pool.device), step)

    def _batch(self, device: torch.device, num_rows: int) -> StepBatch:
        counts = [new for _, new in self._sequences]
        counts[-1] -= self._num_rows - num_rows
        lengths = [before + new for (before, _), new in zip(self._sequences, counts, strict=True)]
        nowhere = torch.zeros(num_rows, dtype=torch.int64, device=device)
        places = torch.tensor(record_rows(self._blocks, self._width), dtype=torch.int32)
        return StepBatch(
            input_ids=nowhere,
            positions=nowhere,
            token_slots=nowhere,
            query_lens=counts,
            seq_lens=lengths,
            block_tables=[[0]] * len(counts),
            logit_rows=[end - 1 for end in accumulate(counts)],
            records=self._blocks,
            device_records=places.view(-1, 2, self._width).to(device),
        )

    def _records_in(self, pool: torch.Tensor) -> torch.Tensor:
        """Read what a step has written."""
        written = [RecordBlocks(blocks.written) for blocks in self._blocks]
        records = StepRecords(self._delta, pool.cpu(), written, [(0, 0)] * len(written))
        number = len(self._delta.layers) - 1
        of_each = [records.read(index, number) for index in range(len(written))]
        return torch.stack([torch.cat([part.flatten() for part in each]) for each in of_each])


@torch.inference_mode()
def mixture_difference(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: Backend
) -> str | None:
    """Describe a step that a mixture of experts computes wrongly; None: all are right."""
    assert config.experts is not None
    num_experts = min(config.experts.num_experts, _MOST_EXPERTS)
    few = min(config.experts.num_per_token, num_experts)
    experts = replace(config.experts, num_experts=num_experts, num_per_token=few)
    generator = seeded(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).float()

    weights = dict(_expert_weights(experts, noise))
    sent = {name: Weight.plain(values.to(dtype).to(device)) for name, values in weights.items()}
    linears = choose_linears(device.type, dtype)
    layer = Experts(experts, sent, "", config.hidden_act, backend, linears)
    for num_tokens in product_rows(_PRODUCT_SIZE):
        x, order = noise(num_tokens, _SIZE), noise(num_tokens, num_experts).argsort(-1)
        scores = (order * 0.375).to(dtype).float()  # no two alike
        step = _Step(x, None, num_tokens)
        out = layer.routed(x.to(dtype).to(device), scores.to(dtype).to(device), step)
        expected = _judged_mixture(experts, weights, config.hidden_act, x, scores)
        found = difference("mixture", out, expected, dtype)
        if found is not None:
            return f"{num_tokens} tokens, {few} of {num_experts} experts: {found}"
    return None


def _expert_weights(
    experts: ExpertsConfig, noise: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw a mixture's weights by name."""
    names = experts.names

    def matrix(name: str, num_rows: int, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", noise(num_rows, depth) * 2.0 ** -(depth.bit_length() // 2)
        if names.has_bias:
            yield f"{name}.bias", noise(num_rows)

    yield from matrix(f"{names.block}{names.router}", experts.num_experts, _SIZE)
    for number in range(experts.num_experts):
        prefix = f"{names.block}experts.{number}."
        for name in (names.gate, names.up):
            yield from matrix(prefix + name, _INNER_SIZE, _SIZE)
        yield from matrix(prefix + names.down, _SIZE, _INNER_SIZE)
    if names.beside_dense is not None:
        yield names.beside_dense.share_scale, noise(experts.num_experts)


def _judged_mixture(
    experts: ExpertsConfig,
    weights: Mapping[str, torch.Tensor],
    activation: str,
    x: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Send each token through its experts, one by one."""
    names, rows = experts.names, []

    def product(name: str, values: torch.Tensor) -> torch.Tensor:
        made = weights[f"{name}.weight"] @ values
        return made + weights[f"{name}.bias"] if names.has_bias else made

    for token, own in zip(x, scores, strict=True):
        shares, chosen = own.softmax(-1).topk(experts.num_per_token)
        if experts.is_normalized:
            shares = shares / shares.sum()
        if names.beside_dense is not None:
            shares = shares * weights[names.beside_dense.share_scale][chosen]
        row = torch.zeros_like(token)
        for share, number in zip(shares, chosen.tolist(), strict=True):
            prefix = f"{names.block}experts.{number}."
            inner = torch.cat([product(prefix + n, token) for n in (names.gate, names.up)])
            row += share * product(prefix + names.down, gated(inner[None], activation)[0])
        rows.append(row)
    return torch.stack(rows)


@torch.inference_mode()
def product_difference(
    matrices: Sequence[MatrixRows], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Describe a product with some of the model's rows that is wrong; None: all are right."""
    linears = choose_linears(device.type, dtype)
    for number, (weight, values) in enumerate(matrices):
        generator = seeded(number)
        if weight.scheme in PLAIN:
            weight = Weight.plain(weight.values.to(dtype))
            values = weight.values.float()
        there = replace(weight, data=weight.data.to(device))
        multiply = linears.make({"rows.weight": there}, ["rows"])
        for num_tokens in product_rows(_PRODUCT_SIZE):
            x = torch.randn(num_tokens, values.shape[1], generator=generator).to(dtype)
            out = multiply(x.to(device), num_tokens)
            expected = _as_multiplied(x.float(), weight.scheme) @ values.t()
            found = difference("product", out, expected, dtype)
            if found is not None:
                shape = f"{num_tokens} x {values.shape[1]} to {len(values)}"
                return f"{weight.scheme}, {shape}: {found}"
    return None


def _as_multiplied(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """Round inputs as a form's products do."""
    form = FORMS.get(scheme.removesuffix("_panels"))
    if form is not None and form.rounds_inputs:
        scales = x.abs().amax(-1, keepdim=True) / 127
        return (x / scales).round() * scales
    if scheme == FP8_ROWS:
        scales = x.abs().amax(-1, keepdim=True) / _FP8_MAX
        return (x / scales).to(torch.float8_e4m3fn).float() * scales
    return x
