"""Compute a Gated DeltaNet layer: a convolution, then states that every token decays and corrects.

A layer keeps of all earlier tokens one state [key_dim, value_dim] per value head, and the last
inputs of its convolution. The compiled kernel takes tokens one by one, so that states have the same
bits however a sequence is cut into steps. Without it torch computes prompts in chunks that end
where blocks do: going on from a block's end then repeats what computing the whole prompt does. On
GPUs Triton takes tokens one by one.

The arithmetic is float32 whatever the model's dtype.

Invariant: a sequence's results depend on no other sequence of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.model_config import ModelConfig
from engine.worker.model.backend import Backend
from engine.worker.model.compiled import ELEMENT_TYPES, MAX_TOKENS, CompiledBackend
from engine.worker.model.delta_inputs import DeltaConstants, DeltaInputs, RecordRuns
from engine.worker.model.linear import Linears
from engine.worker.model.records import StepRecords
from engine.worker.model.weight import Weight

CHUNK_TOKENS = 64
_NORM_EPS = 1e-6
"""Of queries and keys."""


class GatedDelta:
    """A layer that reads and writes its part of each sequence's record.

    Args:
        shard: its number; a record has a narrower layer for each of `num_shards`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        layer: int,
        backend: Backend,
        linears: Linears,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        assert config.delta is not None
        self._config, self._eps = config.delta, config.rms_norm_eps
        self._number = sorted(config.delta.layers).index(layer) * num_shards + shard
        """Its place among the layers that keep a state, or among the shards of these."""
        prefix = f"{config.family.prefix}model.layers.{layer}.linear_attn."
        names = config.delta.projections
        self._has_grouped_heads = "in_proj_qkvz" in names
        """Queries, keys, values and output gates lie together for each key head."""
        self._has_grouped_steps = "in_proj_ba" in names
        """Betas and steps lie together for each key head."""
        self._take = linears.take
        own = replace(linears, take=self._take_inputs)
        self._project = [own.make(weights, [prefix + name], kind=name) for name in names]
        self._widths = {name: weights[f"{prefix}{name}.weight"].shape[0] for name in names}
        self._output = linears.make(weights, [f"{prefix}out_proj"], kind="output")
        conv = weights[f"{prefix}conv1d.weight"].values.float()
        self._conv = conv[:, 0].t().contiguous()
        """[conv_size, conv_width]."""
        self._decay = -weights[f"{prefix}A_log"].values.float().exp()
        self._step_bias = weights[f"{prefix}dt_bias"].values.float()
        self._norm = weights[f"{prefix}norm.weight"].values.float()
        self._backend = backend if isinstance(backend, CompiledBackend) else None
        self._gated_delta = backend.gated_delta
        self._kept: DeltaInputs | None = None
        """The first inputs of the last step on a GPU."""
        constants = (self._conv, self._decay, self._step_bias, self._norm)
        self._constants = DeltaConstants(*constants, self._eps, self._number)
        self._layout = self._layout_of_layer()

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what a step's tokens [num_tokens, hidden_size] become."""
        few = step.num_few
        made = [project(x, few) for project in self._project]
        if self._gated_delta is not None:
            if self._kept is None:
                self._kept = DeltaInputs.kept(self._config, made[0])
            inputs, how = self._inputs(made), (self._constants, self._config, step.kv)
            return self._output(self._gated_delta(inputs, self._kept, *how, step.plan.runs), few)
        if self._backend is None:
            return self._output(self._by_torch(made, step).to(x.dtype), few)
        plan = step.plan
        heads = self._compiled(self._backend, made, step.kv, plan.sequences, plan.records)
        return self._output(heads, few)

    def write_records(
        self,
        kv: torch.Tensor,
        sequences: torch.Tensor,
        records: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Write the last step's records again, of sequences that keep fewer of its tokens.

        The step had at most MAX_TOKENS of them, in this dtype; see CompiledPlan.
        """
        backend, num_rows = self._backend, int(sequences[:, :2].sum(1).max())
        assert backend is not None
        assert num_rows <= MAX_TOKENS
        made = [
            self._take_inputs(name, num_rows, width, dtype) for name, width in self._widths.items()
        ]
        self._compiled(backend, made, kv, sequences, records)

    def write_on_gpu(self, kv: torch.Tensor, runs: RecordRuns) -> None:
        """Write the same of a step on a GPU, which had at most KEPT_TOKENS."""
        assert self._gated_delta is not None
        assert self._kept is not None
        inputs = self._kept.first(len(runs.of_rows))
        self._gated_delta(inputs, self._kept, self._constants, self._config, kv, runs)

    def _take_inputs(
        self, kind: str, num_tokens: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Take memory for a projection, which a small step keeps beyond its later layers."""
        if num_tokens > MAX_TOKENS:
            return self._take(kind, num_tokens, width, dtype)
        return self._take(f"{kind} {self._number}", MAX_TOKENS, width, dtype)[:num_tokens]

    def _layout_of_layer(self) -> torch.Tensor:
        """Fill struct layer of engine/kernels/delta.c."""
        config = self._config
        ratio = config.num_value_heads // config.num_key_heads
        inner = ratio * config.value_dim
        strides, steps = (config.conv_width, config.all_values), (config.key_dim, inner, inner)
        if self._has_grouped_heads:
            width = 2 * config.key_dim + 2 * inner
            strides, steps = (config.num_key_heads * width,) * 2, (width,) * 3
        num_grouped = 1 + self._has_grouped_steps
        constants = (self._conv, self._decay, self._step_bias, self._norm)
        return torch.tensor(
            [
                *(config.num_key_heads, ratio, config.key_dim, config.value_dim, config.conv_size),
                *(self._number * config.layer_values, *strides),
                *(num_grouped * config.num_value_heads, *steps, num_grouped * ratio),
                *(constant.data_ptr() for constant in constants),
                *((1, config.num_key_heads) if config.is_output_tiled else (ratio, 1)),
            ]
        )

    def _compiled(
        self,
        backend: CompiledBackend,
        made: list[torch.Tensor],
        kv: torch.Tensor,
        sequences: torch.Tensor,
        records: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the layer's heads by one kernel, [num_tokens, all_values]."""
        config = self._config
        ratio = config.num_value_heads // config.num_key_heads
        addresses, itemsize = [each.data_ptr() for each in made], made[0].element_size()
        places = [0, config.all_keys, 2 * config.all_keys]
        if self._has_grouped_heads:
            places = [0, config.key_dim, 2 * config.key_dim]
            places.append(2 * config.key_dim + ratio * config.value_dim)
        inputs = [addresses[0] + itemsize * place for place in places] + addresses[1:]
        if self._has_grouped_steps:
            inputs.append(inputs[-1] + itemsize * ratio)
        out = backend.take("delta", len(made[0]), config.all_values, made[0].dtype)
        backend.kernels.delta(
            out.data_ptr(),
            kv.data_ptr(),
            sequences.data_ptr(),
            0 if records is None else records.data_ptr(),
            self._layout.data_ptr(),
            *inputs,
            ELEMENT_TYPES[out.dtype],
            len(out),
            len(sequences),
            0 if records is None else records.shape[2],
            kv[0].nbytes,
            torch.get_num_threads(),
            self._eps,
        )
        return out

    def _inputs(self, made: list[torch.Tensor]) -> DeltaInputs:
        """Describe the projections to kernels."""
        config = self._config
        ratio = config.num_value_heads // config.num_key_heads
        inner, small = ratio * config.value_dim, ratio
        places, steps = (config.all_keys, 2 * config.all_keys), (config.key_dim, inner)
        gates, gate_step = made[1], inner
        if self._has_grouped_heads:
            places = (config.key_dim, 2 * config.key_dim)
            gate_step = 2 * config.key_dim + 2 * inner
            gates, steps = made[0][:, gate_step - inner :], (gate_step, gate_step)
        betas, time_steps = made[-2], made[-1]
        if self._has_grouped_steps:
            betas, time_steps, small = made[-1], made[-1][:, ratio:], 2 * ratio
        return DeltaInputs(made[0], places, *steps, gates, gate_step, betas, time_steps, small)

    def _by_torch(self, made: list[torch.Tensor], step: Any) -> torch.Tensor:
        """Compute the same by torch, in float32."""
        config = self._config
        qkv, z, b, a = self._ungrouped(made)
        decay = self._decay * F.softplus(a.float() + self._step_bias)
        beta = b.float().sigmoid()
        heads = qkv.new_empty(
            len(qkv), config.num_value_heads, config.value_dim, dtype=torch.float32
        )
        row = 0
        records = StepRecords.of(config, step.kv, step.plan.batch)
        for index, (count, end) in enumerate(records.lengths):
            rows = slice(row, row + count)
            tail, state = records.read(index, self._number)
            mixed, tail = convolve(qkv[rows].float(), self._conv, tail)
            q, k, v = split_heads(mixed, config)
            heads[rows], state = delta_rule(q, k, v, decay[rows], beta[rows], state, end - count)
            records.write(index, self._number, tail, state)
            row += count
        scale = heads.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        normed = heads.mul_(scale).mul_(self._norm).mul_(F.silu(z.float().view_as(heads)))
        if config.is_output_tiled:
            shape = (len(normed), config.num_key_heads, -1, config.value_dim)
            normed = normed.view(shape).transpose(1, 2)
        return normed.flatten(1)

    def _ungrouped(self, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return queries, keys and values side by side, output gates, betas and steps."""
        config = self._config
        ratio = config.num_value_heads // config.num_key_heads
        inner = ratio * config.value_dim

        def parts(grouped: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
            by_head = grouped.view(len(grouped), config.num_key_heads, -1)
            return [part.flatten(1) for part in torch.split(by_head, sizes, -1)]

        heads, steps = made[:-1], made[-1:]
        if self._has_grouped_heads:
            q, k, v, z = parts(made[0], [config.key_dim, config.key_dim, inner, inner])
            heads = [torch.cat((q, k, v), -1), z]
        if self._has_grouped_steps:
            steps = parts(made[-1], [ratio, ratio])
        return [*heads, *steps]


def convolve(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel over its newest tokens, then apply SiLU.

    Args:
        x: [num_tokens, width].
        weight: [conv_size, width].
        tail: the inputs before x, [conv_size - 1, width].

    Returns:
        [num_tokens, width], and the tail for what comes next.
    """
    inputs, num_tokens = torch.cat((tail, x)), len(x)
    mixed = inputs[:num_tokens] * weight[0]
    for place in range(1, len(weight)):
        mixed.addcmul_(inputs[place : place + num_tokens], weight[place])
    return F.silu(mixed), inputs[num_tokens:]


def split_heads(
    mixed: torch.Tensor, config: GatedDeltaConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [num_tokens, conv_width] into heads, normed, with a query and a key per value head.

    Returns:
        q, k [num_value_heads, num_tokens, key_dim] and v [num_value_heads, num_tokens, value_dim].
    """
    parts = torch.split(mixed, [config.all_keys, config.all_keys, config.all_values], -1)
    sizes = (config.num_key_heads, config.num_key_heads, config.num_value_heads)
    q, k, v = (
        part.view(len(mixed), size, -1).transpose(0, 1)
        for part, size in zip(parts, sizes, strict=True)
    )
    ratio = config.num_value_heads // config.num_key_heads
    q, k = (_unit(part).repeat_interleave(ratio, 0) for part in (q, k))
    return q.mul_(config.key_dim**-0.5), k, v


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * x.square().sum(-1, keepdim=True).add_(_NORM_EPS).rsqrt_()


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a sequence's new tokens through a layer's states.

    Args:
        q: [num_heads, num_tokens, key_dim], as k; v: [num_heads, num_tokens, value_dim].
        k: see q.
        v: see q.
        decay: logarithms of what states are multiplied by, [num_tokens, num_heads].
        beta: how much of the difference is written, [num_tokens, num_heads].
        state: [num_heads, key_dim, value_dim], which is not changed.
        start: position of the first token; chunks end at multiples of CHUNK_TOKENS.

    Returns:
        outputs [num_tokens, num_heads, value_dim], and the states after the last token.
    """
    outputs, first, num_tokens = [], 0, q.shape[1]
    decay, beta = decay.t(), beta.t()
    while first < num_tokens:
        end = min(first + CHUNK_TOKENS - (start + first) % CHUNK_TOKENS, num_tokens)
        part = slice(first, end)
        inputs = (q[:, part], k[:, part], v[:, part], decay[:, part], beta[:, part])
        output, state = _chunk(*inputs, state)
        outputs.append(output)
        first = end
    return torch.cat(outputs, 1).transpose(0, 1), state


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to a chunk's tokens at once, each correcting what those before it wrote."""
    total = decay.cumsum(1)
    between = (total[:, :, None] - total[:, None]).tril_().exp_().tril_()
    k_beta = k * beta[..., None]
    overlap = torch.bmm(k_beta, k.transpose(1, 2)).mul_(between)
    # each token's change, less what the chunk's earlier tokens have changed; unit lower triangular
    wanted = v * beta[..., None] - torch.bmm(k_beta * total.exp()[..., None], state)
    changes = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(between)
    output = torch.bmm(q * total.exp()[..., None], state).baddbmm_(scores, changes)
    left = (total[:, -1:] - total).exp()
    state = state * total[:, -1].exp()[:, None, None]
    return output, state.baddbmm_((k * left[..., None]).transpose(1, 2), changes)
