"""Run the model: a step's tokens in, logits out, keys and values written to the pool.

Invariant: one forward is one step of any mix of prefill and decode; no state outlives it but the
pool's, and tables of cosines that only grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.checkpoint.layer_heads import LayerHeads
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.kernels.cpu import WIDENED, ProductVariants
from engine.wire.sampling import TokenLogprob
from engine.worker.model.attention import StepBatch
from engine.worker.model.backend import choose_backend
from engine.worker.model.buffers import Buffers
from engine.worker.model.compiled import (
    MAX_TOKENS,
    CompiledBackend,
    CompiledPlan,
    CpuDecodeGraphs,
    StepExtras,
    records_tensor,
)
from engine.worker.model.decoder_layers import LayerPool, StepInputs, all_branches, norm_weight
from engine.worker.model.delta import GatedDelta
from engine.worker.model.delta_inputs import RecordRuns
from engine.worker.model.draw_rows import RowDraw
from engine.worker.model.layer_inputs import LayerInputs
from engine.worker.model.layers import query_growth, rms_norm, rope_table, soft_cap
from engine.worker.model.linear import Linear, choose_linears
from engine.worker.model.records import RecordBlocks
from engine.worker.model.shards import Shards
from engine.worker.model.weight import Weight, embedded
from engine.worker.model.weights_ahead import WeightsAhead

_MIN_TABLE_POSITIONS = 2048


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
        self._kinds_of_heads = set((config if shards is None else shards.config).heads)
        how = (self._backend, linears, shards)
        self._branches = all_branches(config, weights, self._ropes, *how)
        blocks = (branch.block for branch in self._branches)
        self._recurrent = [block for block in blocks if isinstance(block, GatedDelta)]
        offset = config.family.norm_offset if config.family.has_offset_last else 0.0
        self._norm_weight = norm_weight(config, weights, f"{prefix}model.norm", offset)
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
        """Run the layers over x in place; return what is still to be added to it."""
        num_few = plan.num_few if isinstance(plan, CompiledPlan) else len(x)
        step, added = StepInputs(x, kv, plan, num_few, self._pools(kv, plan), *extras), None
        for number, branch in enumerate(self._branches, 1):
            if self._ahead is not None:
                self._ahead.enter(branch.layer, len(x))
            added = branch(x, added, step)
            if self._beat is not None:
                self._beat()
            if stops is not None and stops(number, len(self._branches)):
                break
        return added

    def _pools(self, kv: torch.Tensor, plan: Any) -> dict[LayerHeads, LayerPool]:
        """View the pool as each kind of layer does; plan is the step's for the whole pool."""
        if kv.dtype == torch.int8:  # planes of bytes, which every kind finds its way in
            return {heads: LayerPool(kv, plan, 1) for heads in self._kinds_of_heads}
        num_blocks, num_layers, _, block_size, *widest = kv.shape
        pools = {}
        for heads in self._kinds_of_heads:
            if heads == tuple(widest):
                pools[heads] = LayerPool(kv, plan, 1)
                continue
            ratio = widest[0] * widest[1] // heads.width
            view = kv.view(num_blocks, num_layers * ratio, 2, block_size, *heads)
            pools[heads] = LayerPool(view, self._backend.plan_of(plan, view), ratio)
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
