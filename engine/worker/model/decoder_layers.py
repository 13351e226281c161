"""Build a model's layers: attention and feed-forward, each between its norms.

Every layer is two blocks, and each adds to the stream of tokens what it makes of it:
x += scale * norm(block(norm(x))), with those norms that the family has. What else the families
differ in is read from ModelConfig when a layer is built, and by no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.checkpoint.layer_heads import LayerHeads
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.worker.model.backend import Backend
from engine.worker.model.delta import GatedDelta
from engine.worker.model.feed_forward import DenseAndExperts, Experts, FeedForward, WithSharedExpert
from engine.worker.model.layer_inputs import LayerInput
from engine.worker.model.linear import Linear, Linears
from engine.worker.model.reduction import ATTENTION, FEED_FORWARD
from engine.worker.model.shards import Block, Shards
from engine.worker.model.weight import Weight


class LayerPool(NamedTuple):
    """The pool as layers of one kind see it: a wide layer is several of their narrow ones."""

    kv: torch.Tensor
    plan: Any
    """The backend's."""
    ratio: int
    """Factor from the layer's number to its number in this view."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers of one step share."""

    stream: torch.Tensor
    """[num_tokens, hidden_size], which every branch adds to."""
    kv: torch.Tensor
    """The whole pool, and the backend's plan for it."""
    plan: Any
    num_few: int
    """The batch's num_few_rows."""
    pools: Mapping[LayerHeads, LayerPool]
    query_growth: torch.Tensor | None = None
    """What queries are multiplied by, [num_tokens, 1, 1]; None: nothing."""
    layer_inputs: torch.Tensor | None = None
    """[num_tokens, num_layers, size], of models that have such."""


class Branch:
    """One block between its norms: what it reads from the stream of tokens, and adds to it."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        before: torch.Tensor | None,
        block: Block,
        after: torch.Tensor | None,
        layer: int,
    ) -> None:
        self._backend, self.layer = backend, layer
        self.scalar: float | None = None
        """What the stream is multiplied by behind it; None: nothing."""
        self._before, self.block, self._after = before, block, after
        self.is_all_kernels = True
        if isinstance(block, Experts | DenseAndExperts | WithSharedExpert):
            self.is_all_kernels = block.is_one_kernel
        """False: torch computes a part of it."""
        self._eps, self._post_eps = config.rms_norm_eps, config.post_norm_eps
        self._scale = config.residual_scale

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None, step: StepInputs
    ) -> torch.Tensor | None:
        """Add the previous branch's result to x; return what to add next."""
        read = x
        if self._before is not None:
            read = self._backend.norm(x, self._before, self._eps, added, self._scale)
        elif added is not None:
            self._backend.add(x, added, self._scale)
        made = self.block(read, step)
        if self._after is not None:
            self._backend.norm_rows(made[:, None], self._after[None], self._post_eps)
        if self.scalar is None:
            return made
        self._backend.add(x, made, self._scale, self.scalar)
        return None


def all_branches(
    config: ModelConfig,
    weights: dict[str, Weight],
    ropes: list[RopeConfig],
    backend: Backend,
    linears: Linears,
    shards: Shards | None,
) -> list[Branch]:
    """Build all layers; each names its RoPE by its place in the list."""
    branches: list[Branch] = []
    for layer, rope in enumerate(config.ropes):
        rope_index = None if rope is None else ropes.index(rope)
        branches += _branches(config, weights, layer, rope_index, backend, linears, shards)
    return branches


def _branches(
    config: ModelConfig,
    weights: dict[str, Weight],
    layer: int,
    rope_index: int | None,
    backend: Backend,
    linears: Linears,
    shards: Shards | None,
) -> list[Branch]:
    """Build a decoder layer: attention, feed-forward, and its own inputs where it has such."""
    prefix = f"{config.family.prefix}model.layers.{layer}."
    attention: Block
    if shards is not None:
        attention = _joined_attention(shards, layer, rope_index, backend, linears)
    elif config.kv_layers[layer] is None:
        attention = GatedDelta(config, weights, layer, backend, linears)
    else:
        attention = _Attention(config, weights, layer, rope_index, backend, linears)
    if shards is None:
        mlp = _feed_forward(config, weights, layer, prefix, backend, linears)
    else:
        mlp = _joined_feed_forward(shards, layer, prefix, backend, linears)

    def norm(name: str | None) -> torch.Tensor | None:
        offset = config.family.norm_offset
        return None if name is None else norm_weight(config, weights, prefix + name, offset)

    norms = config.family.norms
    scalar = None
    if config.family.has_layer_scalar:
        scalar = weights[f"{prefix}layer_scalar"].values.item()
    blocks: list[tuple[str | None, Block, str | None]] = [
        (norms.before_attention, attention, norms.after_attention),
        (norms.before_mlp, mlp, norms.after_mlp),
    ]
    if config.layer_inputs is not None:
        inputs = LayerInput(config, weights, prefix, layer, backend, linears)
        blocks.append((None, inputs, "post_per_layer_input_norm"))
    branches = [
        Branch(config, backend, norm(before), block, norm(after), layer)
        for before, block, after in blocks
    ]
    branches[-1].scalar = scalar
    return branches


def _feed_forward(
    config: ModelConfig,
    weights: dict[str, Weight],
    layer: int,
    prefix: str,
    backend: Backend,
    linears: Linears,
) -> Block:
    """Build a layer's feed-forward: dense, a mixture, or both."""
    config_of_experts, activation = config.experts_of(layer), config.hidden_act
    if config_of_experts is None:
        return FeedForward(config, weights, f"{prefix}mlp.", backend, linears)
    experts = Experts(config_of_experts, weights, prefix, activation, backend, linears)
    if config_of_experts.names.has_shared_expert:
        shared = FeedForward(config, weights, f"{prefix}mlp.shared_expert.", backend, linears)
        return WithSharedExpert(weights, f"{prefix}mlp.", experts, shared, backend, linears)
    if config_of_experts.names.beside_dense is None:
        return experts
    dense = FeedForward(config, weights, f"{prefix}mlp.", backend, linears)
    return DenseAndExperts(config, weights, prefix, dense, experts, backend)


def _joined_attention(
    shards: Shards, layer: int, rope_index: int | None, backend: Backend, linears: Linears
) -> Block:
    """Build a layer's attention of some heads after others, each in a part of pool or record."""

    def make(weights: dict[str, Weight], linears: Linears, shard: int) -> Block:
        if shards.config.kv_layers[layer] is None:
            count = shards.reduction.shape.num_shards
            return GatedDelta(shards.config, weights, layer, backend, linears, shard, count)
        return _Attention(shards.config, weights, layer, rope_index, backend, linears, shard)

    return shards.joined(ATTENTION, "output", linears, make)


def _joined_feed_forward(
    shards: Shards, layer: int, prefix: str, backend: Backend, linears: Linears
) -> Block:
    """Build a layer's feed-forward of a part of its inner values after others."""

    def make(weights: dict[str, Weight], linears: Linears, _shard: int) -> Block:
        return _feed_forward(shards.config, weights, layer, prefix, backend, linears)

    kind = "output" if shards.config.experts_of(layer) is None else "experts"
    return shards.joined(FEED_FORWARD, kind, linears, make)


class _Attention:
    """Queries of the step's tokens over the keys and values of their sequences.

    Args:
        shard: its number; the pool has a narrower layer for each shard.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        layer: int,
        rope_index: int | None,
        backend: Backend,
        linears: Linears,
        shard: int = 0,
    ) -> None:
        prefix = f"{config.family.prefix}model.layers.{layer}.self_attn."
        self._config, self._shard = config, shard
        kv_layer = config.kv_layers[layer]
        assert kv_layer is not None
        self._group, self._layer = config.kv_groups.places[kv_layer]
        self._window = config.sliding_windows[layer]
        self._rope_index = rope_index
        self._backend = backend
        self._heads = config.heads[layer]
        qkv = [prefix + name for name in config.family.qkv]
        self._num_own = self._heads.num_kv_heads if config.stores_kv(layer) else 0
        """Key heads that it computes; 0: it reads an earlier layer's."""
        if not self._num_own:
            qkv = qkv[:1]
        elif config.has_keys_as_values[layer]:
            qkv[2] = qkv[1]
        self._qkv = linears.make(weights, qkv, has_bias=config.has_qkv_bias)
        output = [f"{prefix}o_proj"]
        self._output = linears.make(weights, output, has_bias=config.has_output_bias, kind="output")
        self._has_gate = config.family.has_gates_in_queries
        self._sinks = weights[f"{prefix}sinks"].values.float() if config.family.has_sinks else None
        self._qk_norms: list[torch.Tensor] = []
        """Norms of heads, [normed heads, head_dim], or of whole projections, [1, all]."""
        self._gate: Linear | None = None
        if config.family.has_gated_attention:
            self._gate = linears.make(weights, [f"{prefix}gate_proj"], kind="gate")
        if config.family.qk_norm is not None:
            norms = self._norm_weights(config, weights, prefix)
            if config.family.qk_norm != "projection":
                num_heads = [config.num_heads, self._num_own][: len(norms)]
                if config.family.has_value_norm and self._num_own:
                    norms.append(torch.ones_like(norms[1]))
                    num_heads.append(self._num_own)
                rows = [n.expand(count, -1) for n, count in zip(norms, num_heads, strict=True)]
                norms = [torch.cat(rows)]
            self._qk_norms = [norm.view(-1, norm.shape[-1]) for norm in norms]

    def _norm_weights(
        self, config: ModelConfig, weights: dict[str, Weight], prefix: str
    ) -> list[torch.Tensor]:
        """Read the factors of queries, and of keys where the layer has its own."""
        names = "qk" if self._num_own else "q"
        if config.family.qk_norm == "unweighted":
            device = weights[f"{prefix}o_proj.weight"].data.device
            return [torch.ones(self._heads.head_dim, device=device) for _ in names]
        offset = config.family.norm_offset
        return [norm_weight(config, weights, f"{prefix}{name}_norm", offset) for name in names]

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        config, backend = self._config, self._backend
        num_q, (num_kv, head_dim), num_tokens = config.num_heads, self._heads, len(x)
        few = step.num_few
        gate, qkv = None, self._qkv(x, few)
        if self._has_gate:
            qkv, gate = backend.split_gates(qkv, num_q, head_dim)
        qkv = qkv.view(num_tokens, num_q + 2 * self._num_own, head_dim)
        if self._qk_norms:
            self._norm(qkv)
        kv, plan, ratio = step.pools[self._heads]
        if self._group:
            plan = plan.windows[self._group - 1]
        layer = self._layer * ratio + self._shard
        backend.place(qkv, num_q, self._rope_index, kv, layer, plan)
        if step.query_growth is not None:
            backend.grow(qkv[:, :num_q], step.query_growth)
        output = backend.attend(
            qkv,
            num_q,
            kv,
            layer,
            plan,
            config.attention_scale,
            self._window,
            config.attention_softcap,
            self._sinks,
            num_kv,
        )
        output = output.reshape(num_tokens, -1)
        if self._gate is not None:
            gate = self._gate(x, few)
        if gate is not None:
            output = backend.gated(gate, "sigmoid", output)
        return self._output(output, few)

    def _norm(self, qkv: torch.Tensor) -> None:
        """Norm queries and keys, where the family does: per head, or each over all its heads."""
        if len(self._qk_norms) == 1:
            parts = [qkv[:, : len(self._qk_norms[0])]]
        else:
            q_width, k_width = (weight.shape[-1] for weight in self._qk_norms)
            flat = qkv.view(len(qkv), 1, -1)
            parts = [flat[..., :q_width], flat[..., q_width : q_width + k_width]]
        for part, weight in zip(parts, self._qk_norms, strict=True):
            self._backend.norm_rows(part, weight, self._config.rms_norm_eps)


def norm_weight(
    config: ModelConfig, weights: dict[str, Weight], name: str, offset: float
) -> torch.Tensor:
    """Read a norm's factors, in float32 where the family rounds after the product."""
    weight = weights[f"{name}.weight"].values
    if config.family.has_wide_norms:
        weight = weight.float()
    return weight + offset if offset else weight
