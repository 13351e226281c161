"""Run the model: a step's tokens in, logits out, keys and values written to the pool.

Every layer is two blocks, attention and feed-forward, and each adds to the stream of tokens what it
makes of it: x += scale * norm(block(norm(x))), with those norms that the family has. What else the
families differ in is read from ModelConfig when a layer is built; a step only finds it done.

Invariant: one forward is one step of any mix of prefill and decode; no state outlives it but the
pool's, and tables of cosines that only grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.checkpoint.layer_heads import LayerHeads
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.kernels.cpu import WIDENED, ProductVariants
from engine.wire.sampling import TokenLogprob
from engine.worker.model.attention import StepBatch
from engine.worker.model.backend import Backend, choose_backend
from engine.worker.model.buffers import Buffers
from engine.worker.model.compiled import (
    MAX_TOKENS,
    CompiledBackend,
    CompiledPlan,
    CpuDecodeGraphs,
    StepExtras,
    records_tensor,
)
from engine.worker.model.delta import GatedDelta
from engine.worker.model.delta_inputs import RecordRuns
from engine.worker.model.draw_rows import RowDraw
from engine.worker.model.feed_forward import DenseAndExperts, Experts, FeedForward, WithSharedExpert
from engine.worker.model.layer_inputs import LayerInput, LayerInputs
from engine.worker.model.layers import query_growth, rms_norm, rope_table, soft_cap
from engine.worker.model.linear import Linear, Linears, choose_linears
from engine.worker.model.records import RecordBlocks
from engine.worker.model.reduction import ATTENTION, FEED_FORWARD
from engine.worker.model.shards import Shards
from engine.worker.model.weight import Weight, embedded
from engine.worker.model.weights_ahead import WeightsAhead

__all__ = ["StepBatch", "Transformer"]

_MIN_TABLE_POSITIONS = 2048


class _Pool(NamedTuple):
    """The pool as layers of one kind see it: where theirs is narrower, as more, narrower layers."""

    kv: torch.Tensor
    plan: Any
    """The backend's."""
    ratio: int
    """Factor from the layer's number to its number in this view."""


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What all layers of one step share."""

    stream: torch.Tensor
    """[num_tokens, hidden_size], which every branch adds to."""
    kv: torch.Tensor
    """The whole pool, and the backend's plan for it."""
    plan: Any
    num_few: int
    """The batch's num_few_rows."""
    pools: Mapping[LayerHeads, _Pool]
    query_growth: torch.Tensor | None = None
    """What queries are multiplied by, [num_tokens, 1, 1]; None: nothing."""
    layer_inputs: torch.Tensor | None = None
    """[num_tokens, num_layers, size], of models that have such."""


_Block = Callable[[torch.Tensor, _StepInputs], torch.Tensor]


class Transformer:
    """A decoder over named weights.

    Args:
        weights: complete and final; they are read in place.
        dtype: of weights, activations and the pool.
        max_model_len: the longest request's tokens; None: all that the model has positions for.
        block_size: the pool's; None: what the attention backend likes best.
        variants: how matrices that are packed in pairs are multiplied, where some are.
        attention_variant: how compiled kernels multiply what many queries meet.
        beat: called after each half of a layer, except in replayed steps; None: nothing is.
        faults: why packages are not used on a GPU; None: they are tried.
        ahead: has weights on disk read before a layer; None: all are in memory.
        shards: of the layers that this process of a group computes; None: it computes whole ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        dtype: str,
        max_model_len: int | None = None,
        block_size: int | None = None,
        variants: ProductVariants | None = None,
        attention_variant: int = WIDENED,
        beat: Callable[[], None] | None = None,
        faults: Mapping[str, str] | None = None,
        ahead: WeightsAhead | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.config = config
        self._beat, self._ahead = beat, ahead
        self.dtype: torch.dtype = getattr(torch, dtype)
        prefix = config.family.prefix
        embedding = f"{prefix}model.embed_tokens"
        self._embedding = weights[f"{embedding}.weight"]
        self.device = self._embedding.data.device
        # rounded as transformers rounds it, where it keeps the factor as a tensor
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._max_model_len = max_model_len or config.max_position_embeddings
        self._ropes = list(dict.fromkeys(rope for rope in config.ropes if rope is not None))
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_table_positions = 0
        buffers = Buffers()
        self._backend = choose_backend(
            self.device, self.dtype, config, block_size, buffers.take, attention_variant, faults
        )
        linears = choose_linears(self.device.type, self.dtype, take=buffers.take, variants=variants)
        self.linear_backend = linears.name
        """What multiplies by the weights, and why if it is not the best."""
        self._kinds_of_heads = set((config if shards is None else shards.config).heads)
        how = (self._backend, linears, shards)
        self._branches = _all_branches(config, weights, self._ropes, *how)
        blocks = (branch.block for branch in self._branches)
        self._recurrent = [block for block in blocks if isinstance(block, GatedDelta)]
        offset = config.family.norm_offset if config.family.has_offset_last else 0.0
        self._norm_weight = _norm_weight(config, weights, f"{prefix}model.norm", offset)
        head = f"{prefix}lm_head"
        if shards is None and f"{head}.weight" not in weights:
            head = embedding  # tied, and not packed, which makes two of them
        self._head: Linear = (
            linears.make(weights, [head], is_kept=True)
            if shards is None
            else shards.head(head, linears)
        )
        self._graphs: CpuDecodeGraphs | None = None
        is_compiled = isinstance(self._backend, CompiledBackend)
        is_compiled = is_compiled and all(branch.is_all_kernels for branch in self._branches)
        self._layer_inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            self._layer_inputs = LayerInputs(config, weights, self.dtype, self._backend, linears)
        self._growing = _growing_rope(self._ropes, self._max_model_len)
        if is_compiled and linears.kernels is not None and ahead is None:
            self._graphs = CpuDecodeGraphs(linears.kernels, buffers, self._run_layers)
        if self.device.type != "cpu":  # a captured step keeps reading the tables that it saw
            self._grow_tables(self._max_model_len)

    @property
    def is_capturable(self) -> bool:
        """True if a graph can replay a step: no value is looked at, and little memory kept."""
        layers = range(self.config.num_layers)
        has_experts = any(self.config.experts_of(layer) is not None for layer in layers)
        is_recurrent_by_torch = bool(self._recurrent) and self._backend.gated_delta is None
        return self.is_paged and not has_experts and not is_recurrent_by_torch

    @property
    def is_paged(self) -> bool:
        """True if attention reads blocks of the pool where they lie, and gathers none."""
        return self._backend.is_paged

    @property
    def keeps_row_bits(self) -> bool:
        """True if a row's bits do not depend on the other rows of a small step."""
        return isinstance(self._backend, CompiledBackend)

    @property
    def rewrites_records(self) -> bool:
        """True if records of a step can be written again, or the model keeps none."""
        has_kernels = self.keeps_row_bits or self._backend.gated_delta is not None
        return has_kernels or not self._recurrent

    @property
    def attention_backend(self) -> str:
        """What computes attention and the small operations, and why if it is not the best."""
        return self._backend.name

    @property
    def sample_rows(self) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        """Tokens of logits, chosen where they lie; as engine.worker.model.sampler.sample_rows."""
        return self._backend.sample_rows

    def draw(self, rows: Sequence[RowDraw]) -> list[int]:
        """Choose one token per row; NO_TOKEN where its logit is not finite."""
        return self._backend.draw(rows)

    def rate(
        self,
        rows: Sequence[torch.Tensor],
        token_ids: Sequence[int],
        num_alternatives: Sequence[int],
    ) -> list[TokenLogprob]:
        """Compute log-probabilities of one token per row, and of as many of its likeliest."""
        return self._backend.rate(rows, token_ids, num_alternatives)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: torch.Tensor) -> torch.Tensor:
        """Compute one step; return float32 logits [len(batch.logit_rows), vocab_size].

        kv is the pool, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], or int8 as
        in engine.worker.model.attention.
        """
        return self.logits(self.hidden(batch, kv), batch)

    def hidden(
        self, batch: StepBatch, kv: torch.Tensor, stops: Callable[[int, int], bool] | None = None
    ) -> torch.Tensor:
        """Compute the step's stream behind the last layer, [num_tokens, hidden_size].

        With `stops`, it is called after each half of a layer with (done, total), and says whether
        to leave out the rest; a step that is only timed may. The result is valid until the next
        step. A value that became NaN or infinite in any layer is still so in its token's row,
        though the pool holds finite keys and values of it.
        """
        config = self.config
        self._grow_tables(min(max(batch.seq_lens), self._max_model_len))
        plan = self._backend.plan(batch, kv, self._tables)
        x = embedded(self._embedding, batch.input_ids, self.dtype)
        if self._embedding_scale != 1:
            x.mul_(self._embedding_scale)
        if config.family.has_normed_embedding:
            x = rms_norm(x, torch.ones(config.hidden_size, device=x.device), config.rms_norm_eps)
        growth = inputs = None
        if self._growing is not None:
            growth = query_growth(self._growing, batch.positions, self.dtype)
        if self._layer_inputs is not None:
            inputs = self._layer_inputs(batch.input_ids, x, batch.num_few_rows)
        extras = StepExtras(growth, inputs)
        has_graph = self._graphs is not None and len(x) <= MAX_TOKENS and plan.is_decode
        if has_graph and stops is None:
            assert self._graphs is not None
            x, added = self._graphs.run(x, kv, plan, extras)
        else:
            added = self._run_layers(x, kv, plan, extras, stops)
        if added is not None:
            x.add_(added, alpha=config.residual_scale)
        return x

    def logits(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Compute float32 logits [len(batch.logit_rows), vocab_size] of the stream."""
        config = self.config
        if len(batch.logit_rows) < len(x):
            rows = batch.device_logit_rows
            x = x[list(batch.logit_rows) if rows is None else rows]
        x = self._backend.norm(x, self._norm_weight, config.rms_norm_eps)
        num_few = bisect_left(batch.logit_rows, batch.num_few_rows)
        if self._ahead is not None:
            self._ahead.enter(config.num_layers, len(x))
        logits = self._head(x, num_few).float()
        if config.logit_divisor != 1:
            logits.div_(config.logit_divisor)
        return logits if config.logit_softcap is None else soft_cap(logits, config.logit_softcap)

    @torch.inference_mode()
    def write_records(
        self, rows: Sequence[tuple[int, int]], records: Sequence[RecordBlocks], kv: torch.Tensor
    ) -> None:
        """Write records of the last step again, without the tokens that turned out wrong.

        Args:
            rows: each sequence's first row in the step, and how many rows its record counts.
            records: what the step has read and written, of each.
        """
        if self._backend.gated_delta is not None:
            dtype = str(kv.dtype).removeprefix("torch.")
            width = self.config.record_blocks(kv.shape[3], dtype)
            runs = RecordRuns.again(rows, records, width, self.device)
            for layer in self._recurrent:
                layer.write_on_gpu(kv, runs)
            return
        sequences = torch.tensor([(first, count, 0) for first, count in rows])
        places = records_tensor(records)
        for layer in self._recurrent:
            layer.write_records(kv, sequences, places, self.dtype)

    def _run_layers(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        plan: Any,
        extras: StepExtras,
        stops: Callable[[int, int], bool] | None = None,
    ) -> torch.Tensor | None:
        """Change x in place; what is still to be added to it comes back."""
        num_few = plan.num_few if isinstance(plan, CompiledPlan) else len(x)
        step, added = _StepInputs(x, kv, plan, num_few, self._pools(kv, plan), *extras), None
        for number, branch in enumerate(self._branches, 1):
            if self._ahead is not None:
                self._ahead.enter(branch.layer, len(x))
            added = branch(x, added, step)
            if self._beat is not None:
                self._beat()
            if stops is not None and stops(number, len(self._branches)):
                break
        return added

    def _pools(self, kv: torch.Tensor, plan: Any) -> dict[LayerHeads, _Pool]:
        """View the pool as each kind of layer does; plan is the step's for the whole pool."""
        if kv.dtype == torch.int8:  # planes of bytes, which every kind finds its way in
            return {heads: _Pool(kv, plan, 1) for heads in self._kinds_of_heads}
        num_blocks, num_layers, _, block_size, *widest = kv.shape
        pools = {}
        for heads in self._kinds_of_heads:
            if heads == tuple(widest):
                pools[heads] = _Pool(kv, plan, 1)
                continue
            ratio = widest[0] * widest[1] // heads.width
            view = kv.view(num_blocks, num_layers * ratio, 2, block_size, *heads)
            pools[heads] = _Pool(view, self._backend.plan_of(plan, view), ratio)
        return pools

    def _grow_tables(self, num_positions: int) -> None:
        if num_positions > self._num_table_positions:
            size = max(_MIN_TABLE_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._tables = [
                rope_table(rope, size, self._max_model_len, self.dtype, self.device)
                for rope in self._ropes
            ]
            self._num_table_positions = size


def _growing_rope(ropes: list[RopeConfig], max_model_len: int) -> RopeConfig | None:
    """Find the RoPE whose queries grow within the longest request."""
    for rope in ropes:
        if rope.query_growth and max_model_len > rope.original_max_position_embeddings:
            return rope
    return None


class _Branch:
    """One block between its norms: what it reads from the stream of tokens, and adds to it."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        before: torch.Tensor | None,
        block: _Block,
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
        self, x: torch.Tensor, added: torch.Tensor | None, step: _StepInputs
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


def _all_branches(
    config: ModelConfig,
    weights: dict[str, Weight],
    ropes: list[RopeConfig],
    backend: Backend,
    linears: Linears,
    shards: Shards | None,
) -> list[_Branch]:
    """Build all layers; each names its RoPE by its place in the list."""
    branches: list[_Branch] = []
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
) -> list[_Branch]:
    """Build a decoder layer: attention, feed-forward, and its own inputs where it has such."""
    prefix = f"{config.family.prefix}model.layers.{layer}."
    attention: _Block
    if config.kv_layers[layer] is None:
        attention = GatedDelta(config, weights, layer, backend, linears)
    elif shards is None:
        attention = _Attention(config, weights, layer, rope_index, backend, linears)
    else:
        attention = _joined_attention(shards, layer, rope_index, backend, linears)
    if shards is None:
        mlp = _feed_forward(config, weights, layer, prefix, backend, linears)
    else:
        mlp = _joined_feed_forward(shards, layer, prefix, backend, linears)

    def norm(name: str | None) -> torch.Tensor | None:
        offset = config.family.norm_offset
        return None if name is None else _norm_weight(config, weights, prefix + name, offset)

    norms = config.family.norms
    scalar = None
    if config.family.has_layer_scalar:
        scalar = weights[f"{prefix}layer_scalar"].values.item()
    blocks: list[tuple[str | None, _Block, str | None]] = [
        (norms.before_attention, attention, norms.after_attention),
        (norms.before_mlp, mlp, norms.after_mlp),
    ]
    if config.layer_inputs is not None:
        inputs = LayerInput(config, weights, prefix, layer, backend, linears)
        blocks.append((None, inputs, "post_per_layer_input_norm"))
    branches = [
        _Branch(config, backend, norm(before), block, norm(after), layer)
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
) -> _Block:
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
) -> _Block:
    """Build a layer's attention of some heads after others, each shard's in a part of the pool."""

    def make(weights: dict[str, Weight], linears: Linears, shard: int) -> _Block:
        return _Attention(shards.config, weights, layer, rope_index, backend, linears, shard)

    return shards.joined(ATTENTION, "output", linears, make)


def _joined_feed_forward(
    shards: Shards, layer: int, prefix: str, backend: Backend, linears: Linears
) -> _Block:
    """Build a layer's feed-forward of a part of its inner values after others."""

    def make(weights: dict[str, Weight], linears: Linears, _shard: int) -> _Block:
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
        return [_norm_weight(config, weights, f"{prefix}{name}_norm", offset) for name in names]

    def __call__(self, x: torch.Tensor, step: _StepInputs) -> torch.Tensor:
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


def _norm_weight(
    config: ModelConfig, weights: dict[str, Weight], name: str, offset: float
) -> torch.Tensor:
    """Read a norm's factors, in float32 where the family rounds after the product."""
    weight = weights[f"{name}.weight"].values
    if config.family.has_wide_norms:
        weight = weight.float()
    return weight + offset if offset else weight
