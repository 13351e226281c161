"""Prepare example calls of each kernel, with the bytes that they read and their operations.

Invariant: each call of a case uses another layer's memory, or reads a matrix as large as a layer's,
so that no cache is measured (except for logits, which have one matrix); no call waits for the
device, so that all can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.kernels.costs import (
    AttentionShape,
    Cost,
    attention_cost,
    gated_cost,
    norm_cost,
    place_cost,
    product_cost,
    sample_cost,
)
from engine.kernels.product_choice import AS_STORED, ProductChoice
from engine.wire.sampling import SamplingParams
from engine.worker.model.attention import StepBatch
from engine.worker.model.backend import Backend, choose_backend
from engine.worker.model.buffers import fresh
from engine.worker.model.layers import rope_table
from engine.worker.model.linear import CompiledLinear, Linear, Linears, choose_linears
from engine.worker.model.sampler import draw_of
from engine.worker.model.weight import Weight, packed_in_pairs

Sequences = list[tuple[int, int]]
"""A step's sequences: tokens before, and new ones."""
SEQUENCES: dict[str, Sequences] = {
    "prefill 4k": [(0, 4096)],
    "prefill 2k after 6k": [(6144, 2048)],
    "prefill 8 x 512": [(0, 512)] * 8,
    "decode 1 x 1k": [(1023, 1)],
    "decode 1 x 32k": [(32_767, 1)],
    "decode 8 x 8k": [(8191, 1)] * 8,
    "decode 64 x 1k": [(1023, 1)] * 64,
}
SMALL_SEQUENCES: dict[str, Sequences] = {
    "prefill 64": [(0, 64)],
    "decode 4 x 64": [(63, 1)] * 4,
}
NUM_LAYERS = 8
MAX_SAMPLED_ROWS = 64
"""Up to this number each token is of another sequence, which decodes; more are of one prompt."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A timed kernel on one shape."""

    what: str
    shape: str
    cost: Cost
    call: Callable[[int], object]
    """Runs it once on the given layer."""


@dataclass(frozen=True, slots=True)
class KernelFixture:
    """Hold the common parts of all kernels' cases: shapes, tensors, a pool with sequences in it.

    Args:
        config: the shape of a model.
        backend: computes attention and the small operations.
        dtype: of activations and the pool.
        device: where they are.
        num_layers: of the pool, and of other tensors with one part per call.
    """

    config: ModelConfig
    backend: Backend
    dtype: torch.dtype
    device: torch.device
    num_layers: int = NUM_LAYERS
    block_size: int = 64
    products: ProductChoice = AS_STORED

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        products: ProductChoice = AS_STORED,
    ) -> KernelFixture:
        """Make a fixture with the backend that a worker would choose."""
        backend = choose_backend(device, dtype, config, block_size, fresh, products.attention)
        num_layers = NUM_LAYERS if device.type == "cuda" else 1
        return cls(config, backend, dtype, device, num_layers, block_size, products)

    def cases(
        self, sequences: dict[str, Sequences], token_counts: list[int]
    ) -> Iterator[KernelCase]:
        """Yield every kernel, with tensors that live as long as its case."""
        for name, members in sequences.items():
            yield self._attention(name, members)
        for num_tokens in token_counts:
            yield from self._small_operations(num_tokens)
            yield from self._products(num_tokens)
        for num_rows in dict.fromkeys(min(count, MAX_SAMPLED_ROWS) for count in token_counts):
            yield self._head(num_rows)
            yield from self._samplers(num_rows)

    @property
    def _heads(self) -> AttentionShape:
        c = self.config
        return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, self.dtype.itemsize)

    @property
    def _linears(self) -> Linears:
        return choose_linears(self.device.type, self.dtype, variants=self.products.variants)

    def _noise(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device).to(self.dtype)

    def _step(self, members: Sequences) -> tuple[StepBatch, torch.Tensor]:
        """Make sequences in scattered blocks, and their pool."""
        size, c = self.block_size, self.config
        counts = [-(-(before + new) // size) for before, new in members]
        tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
        of_each = [torch.arange(before, before + new) for before, new in members]
        slots = [
            table[positions // size] * size + positions % size
            for table, positions in zip(tables, of_each, strict=True)
        ]
        batch = StepBatch(
            input_ids=torch.empty(0),
            positions=torch.cat(of_each).to(self.device),
            token_slots=torch.cat(slots).to(self.device),
            query_lens=[new for _, new in members],
            seq_lens=[before + new for before, new in members],
            block_tables=[table.tolist() for table in tables],
            logit_rows=[],
        )
        block = (self.num_layers, 2, size, c.num_kv_heads, c.head_dim)
        return batch, self._noise(sum(counts) + 1, *block)

    def _attention(self, name: str, members: Sequences) -> KernelCase:
        c, (batch, kv) = self.config, self._step(members)
        plan = self.backend.plan(batch, kv, [])
        qkv = self._noise(len(batch.positions), c.num_heads + 2 * c.num_kv_heads, c.head_dim)

        def attend(layer: int) -> object:
            scale = c.attention_scale
            return self.backend.attend(qkv, c.num_heads, kv, layer, plan, scale, None, None)

        return KernelCase("attention", name, attention_cost(self._heads, members), attend)

    def _small_operations(self, num_tokens: int) -> Iterator[KernelCase]:
        c, backend, size = self.config, self.backend, self.dtype.itemsize
        tokens = f"{num_tokens} tokens"
        x, added = (self._noise(self.num_layers, num_tokens, c.hidden_size) for _ in range(2))
        weight = self._noise(c.hidden_size)
        yield KernelCase(
            "norm after residual",
            tokens,
            norm_cost(num_tokens, c.hidden_size, size),
            lambda layer: backend.norm(x[layer], weight, 1e-5, added[layer], 1.0),
        )
        num_rows = c.num_heads + 2 * c.num_kv_heads
        qkv = self._noise(self.num_layers, num_tokens, num_rows, c.head_dim)
        batch, kv = self._step([(0, num_tokens)])
        rope = next(rope for rope in c.ropes if rope is not None)
        plan = backend.plan(
            batch, kv, [rope_table(rope, num_tokens, num_tokens, self.dtype, self.device)]
        )
        yield KernelCase(
            "rope and KV write",
            tokens,
            place_cost(self._heads, num_tokens),
            lambda layer: backend.place(qkv[layer], c.num_heads, 0, kv, layer, plan),
        )

    def _products(self, num_tokens: int) -> Iterator[KernelCase]:
        """Yield a feed-forward's products; gates on their own only where no product opens them."""
        c, tokens = self.config, f"{num_tokens} tokens"
        shape = 2 * c.intermediate_size, c.hidden_size
        up = self._matrices(c.family.gate_up, *shape)
        linears = self._linears
        names = list(c.family.gate_up)
        opened = linears.make_gated(up, names, c.hidden_act, self.backend.gated)
        if isinstance(opened, CompiledLinear):
            yield self._product("up and gates", opened, num_tokens, *shape, c.intermediate_size)
        else:
            yield self._product("up", linears.make(up, names), num_tokens, *shape)
            gate_up = self._noise(self.num_layers, num_tokens, 2 * c.intermediate_size)
            yield KernelCase(
                "gated activation",
                tokens,
                gated_cost(num_tokens, c.intermediate_size, self.dtype.itemsize),
                lambda layer: self.backend.gated(gate_up[layer], c.hidden_act),
            )
        down = linears.make(self._matrices(["down"], c.hidden_size, c.intermediate_size), ["down"])
        yield self._product("down", down, num_tokens, c.hidden_size, c.intermediate_size)

    def _matrices(self, names: Iterable[str], num_rows: int, depth: int) -> dict[str, Weight]:
        """Make matrices that lie together, as the layers' do, by their tensors' names."""
        values = self._noise(num_rows, depth).div_(depth**0.5)
        names = list(names)
        parts = map(Weight.plain, values.chunk(len(names)))
        is_packed = self.products.variants is not None
        return {
            f"{name}.weight": packed_in_pairs(part) if is_packed else part
            for name, part in zip(names, parts, strict=True)
        }

    def _product(
        self,
        what: str,
        multiply: Linear,
        num_tokens: int,
        num_rows: int,
        depth: int,
        num_outputs: int | None = None,
    ) -> KernelCase:
        x, num_few = self._noise(num_tokens, depth), num_tokens
        if num_tokens > MAX_SAMPLED_ROWS:
            num_few = 0
        cost = product_cost(num_tokens, num_rows, depth, self.dtype.itemsize, num_outputs)
        call = _on_any_layer(partial(multiply, x, num_few))
        return KernelCase(f"product {what}", f"{num_tokens} tokens", cost, call)

    def _head(self, num_rows: int) -> KernelCase:
        c = self.config
        shape, linears = (c.vocab_size, c.hidden_size), self._linears
        head = linears.make(self._matrices(["head"], *shape), ["head"])
        return self._product("head", head, num_rows, *shape)

    def _samplers(self, num_rows: int) -> Iterator[KernelCase]:
        logits = torch.randn(num_rows, self.config.vocab_size, device=self.device) * 4
        cost = sample_cost(num_rows, self.config.vocab_size)
        how = {"greedy": (0.0, 1.0), "drawn": (1.0, 1.0), "drawn top_p": (1.0, 0.9)}
        for name, (temperature, top_p) in how.items():
            params = SamplingParams(1, 0, temperature=temperature, top_p=top_p)
            rows = [draw_of(params, index) for index in range(num_rows)]
            draws = torch.tensor(rows, dtype=torch.float64, device=self.device)
            call = partial(self.backend.sample_rows, logits, draws if temperature else None)
            yield KernelCase(f"sample {name}", f"{num_rows} rows", cost, _on_any_layer(call))


def _on_any_layer(call: Callable[[], object]) -> Callable[[int], object]:
    return lambda _layer: call()
