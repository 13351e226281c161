"""Compute vectors or scores of whole texts, a part of a layer at a time.

Invariant: between two parts nothing is half done, and keys and values live for one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.text_families import HalfNorms, HeadStep
from engine.checkpoint.text_model import TextLayer, TextModelConfig
from engine.worker.model.linear import Linear, Linears
from engine.worker.model.text_attention import Reach, Run, attend, runs_of
from engine.worker.model.weight import Weight, embedded

PART_ROWS, LEAST_ROWS = 512, 128
"""Tokens that a part computes; with 512 a CPU's products come within 10 % of their best rate."""
PART_PRODUCTS = 5_000_000_000
"""Maximum of multiplications of a part, which chats wait for; LEAST_ROWS may have more."""

Weights = dict[str, Weight]
Norm = Callable[[torch.Tensor], torch.Tensor]
Rotation = tuple[float | None, float]
"""The base, and what positions are divided by."""
Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [num_rows, 1, head_dim]."""

_ACTIVATIONS: dict[str | None, Norm] = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,  # as a gate's, by another name
    "tanh": torch.tanh,
}


class TextTransformer:
    """One model of whole texts.

    Args:
        weights: by the names of the configuration's tensors.
        dtype: what is computed in.
        linears: multiply its matrices.
        device: of the weights.
        compared: token ids of `yes` and `no`, if the score compares them.
    """

    def __init__(
        self,
        config: TextModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        linears: Linears,
        device: torch.device,
        compared: list[int] | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._part_rows = part_rows(config)
        family = config.family
        self._words = weights[f"{family.words}.weight"]
        types = family.token_types if config.num_token_types else None
        self._tables = [
            None if name is None else weights[f"{name}.weight"].values.to(dtype)
            for name in (family.positions, types)
        ]
        make = _Makes(config, weights, linears, dtype)
        self._embedding_norm = make.norm(family.embedding_norm)
        self._layers = [_Layer(make, number, layer) for number, layer in enumerate(config.layers)]
        self._final_norm = make.norm(family.final_norm)
        self._head = [make.head_step(step) for step in config.head]
        self._compared = None
        if compared is not None:
            rows = weights.get("lm_head.weight", self._words)
            yes, no = embedded(rows, torch.tensor(compared, device=device), torch.float32)
            self._compared = yes - no

    def compute(
        self, texts: list[list[int]], num_unpooled: Sequence[int] = ()
    ) -> Iterator[torch.Tensor | None]:
        """Yield None after each part, at last the vectors or scores, float32 [texts, numbers].

        Args:
            texts: of at least one token and at most the configuration's number.
            num_unpooled: the first tokens of each that its pooling leaves out; empty: of none.
        """
        lengths = [len(text) for text in texts]
        runs = runs_of(lengths, self._part_rows)
        places = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        x = self._embedded(texts, places)
        yield None
        rotations = {(layer.theta, layer.stretch) for layer in self.config.layers}
        turns: dict[Rotation, Turns] = {
            (theta, stretch): self._turns(theta, places / stretch)
            for theta, stretch in rotations
            if theta is not None
        }
        for layer in self._layers:
            for part in layer.compute(x, runs, turns):
                x = x if part is None else part
                yield None
        yield self._pooled(x, lengths, num_unpooled or [0] * len(lengths))

    def _embedded(self, texts: list[list[int]], places: torch.Tensor) -> torch.Tensor:
        config = self.config
        ids = torch.tensor(list(chain.from_iterable(texts)), device=self.device)
        x = embedded(self._words, ids, self.dtype)
        if config.family.scales_words:
            x = x * torch.tensor(config.hidden_size**0.5, dtype=self.dtype, device=self.device)
        positions, token_types = self._tables
        if token_types is not None:
            kinds = torch.tensor(self._token_types(texts), device=self.device)
            x = x + F.embedding(kinds, token_types)
        if positions is not None:
            x = x + F.embedding(places + config.first_position, positions)
        return self._embedding_norm(x)

    def _token_types(self, texts: list[list[int]]) -> list[int]:
        """Return 1 for what follows a pair's first separator, which is the last token of all."""
        config = self.config
        marks_pairs = config.family.marks_pairs and config.num_token_types > 1
        if config.kind == "embedding" or not marks_pairs:
            return [0] * sum(map(len, texts))
        kinds = []
        for text in texts:
            first = text.index(text[-1]) + 1
            kinds += [0] * first + [1] * (len(text) - first)
        return kinds

    def _turns(self, theta: float, places: torch.Tensor) -> Turns:
        dim = self.config.head_dim
        pace = 1.0 / (theta ** (torch.arange(0, dim, 2, device=self.device).float() / dim))
        angles = places[:, None].float() * pace
        angles = torch.cat((angles, angles), -1)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _pooled(
        self, x: torch.Tensor, lengths: list[int], num_unpooled: Sequence[int]
    ) -> torch.Tensor:
        modes = self.config.pooling
        if set(modes) <= {"cls", "lasttoken"}:  # the norm of the rows that are taken
            ends = torch.tensor(lengths, device=self.device).cumsum(0)
            starts = ends - torch.tensor(lengths, device=self.device)
            rows = [self._final_norm(x[starts if mode == "cls" else ends - 1]) for mode in modes]
            pooled = torch.cat(rows, -1).float()
        else:
            whole = self._final_norm(x).float()
            pooled = _pool_all(whole, modes, lengths, num_unpooled)
        if self._compared is not None:
            return torch.matmul(pooled, self._compared)[:, None]
        for step in self._head:
            pooled = step(pooled.to(self.dtype)).float()
        return F.normalize(pooled, dim=-1) if self.config.is_normalized else pooled


def part_rows(config: TextModelConfig) -> int:
    """Count the tokens of a part: fewer where layers are large."""
    inner = config.intermediate_size * (3 if config.family.is_gated else 2)
    of_a_token = config.hidden_size * (config.num_heads * config.head_dim + inner)
    return min(max(PART_PRODUCTS // of_a_token, LEAST_ROWS), PART_ROWS)


class _Makes:
    """Make the parts of a model from its weights."""

    def __init__(
        self, config: TextModelConfig, weights: Weights, linears: Linears, dtype: torch.dtype
    ) -> None:
        self.config, self._weights = config, weights
        self._linears, self._dtype = linears, dtype

    def linear(self, names: list[str]) -> Linear:
        has_bias = f"{names[0]}.bias" in self._weights
        return self._linears.make(self._weights, names, has_bias=has_bias)

    def norm(self, name: str | None) -> Norm:
        """Return the norm whose weights have this name; without weights, what changes nothing."""
        stored = None if name is None else self._weights.get(f"{name}.weight")
        if stored is None:
            return _ACTIVATIONS[None]
        eps, kind = self.config.eps, self.config.family.norm
        weight = stored.values.to(self._dtype)
        if kind == "layer":
            of_bias = self._weights.get(f"{name}.bias")
            bias = None if of_bias is None else of_bias.values.to(self._dtype)
            return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)
        if kind == "rms":
            return lambda x: weight * _normed(x, eps).to(x.dtype)
        more = 1.0 + weight.float()
        return lambda x: (more * _normed(x, eps)).to(x.dtype)

    def head_step(self, step: HeadStep) -> Norm:
        linear, norm = self.linear([step.name]), self.norm(step.norm)
        activation = _ACTIVATIONS[step.activation]
        return lambda x: norm(activation(linear(x, 0)))


class _Layer:
    """One layer of a model."""

    def __init__(self, make: _Makes, number: int, layer: TextLayer) -> None:
        config, family = make.config, make.config.family
        before = f"{family.layer}{number}."
        self._rotation, self._config = (layer.theta, layer.stretch), config
        self._part_rows = part_rows(config)
        self._reach = Reach(family.is_causal, layer.window)
        self._qkv = make.linear([f"{before}{name}" for name in family.qkv])
        self._qk_norms = [make.norm(f"{before}{name}") for name in family.qk_norms or ()]
        self._output = make.linear([f"{before}{family.output}"])
        self._gate_up = make.linear([f"{before}{name}" for name in family.gate_up])
        self._down = make.linear([f"{before}{family.down}"])
        self._activation = _ACTIVATIONS[config.activation]
        self._attention_norms = _norms(make, family.attention_norms, before)
        self._mlp_norms = _norms(make, family.mlp_norms, before)

    def compute(
        self, x: torch.Tensor, runs: list[Run], turns_of: dict[Rotation, Turns]
    ) -> Iterator[torch.Tensor | None]:
        """Yield None after each part, at last the layer's result [num_rows, hidden_size]."""
        scale, most = self._config.scale, self._part_rows
        turns = turns_of.get(self._rotation)
        projected = []
        for rows in _parts(len(x), most):
            at = None if turns is None else (turns[0][rows], turns[1][rows])
            projected.append(self._projected(x[rows], at))
            yield None
        q, k, v = map(_together, zip(*projected, strict=True))
        found = []
        for part in attend(q, k, v, runs, self._reach, scale=scale, max_rows=most):
            found.append(part)
            yield None
        heads, joined = _together(found), []
        for rows in _parts(len(x), most):
            joined.append(self._joined(x[rows], heads[rows]))
            yield None
        yield _together(joined)

    def _projected(self, x: torch.Tensor, turns: Turns | None) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, each [rows, heads, head_dim]."""
        config, (before, _, _) = self._config, self._attention_norms
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        sizes = [count * config.head_dim for count in counts]
        parts = torch.split(self._qkv(before(x), 0), sizes, -1)
        q, k, v = (part.reshape(len(x), -1, config.head_dim) for part in parts)
        if self._qk_norms:
            q, k = (norm(each) for norm, each in zip(self._qk_norms, (q, k), strict=True))
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        return q, k, v

    def _joined(self, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Add attention to rows, and what the feed-forward part makes of them."""
        _, after, joined = self._attention_norms
        x = joined(x + after(self._output(heads, 0)))
        before, after, joined = self._mlp_norms
        inner = self._gate_up(before(x), 0)
        if self._config.family.is_gated:
            gate, up = inner.chunk(2, -1)
            if self._config.family.has_gate_last:
                gate, up = up, gate
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        return joined(x + after(self._down(inner, 0)))


def _parts(num_rows: int, most: int) -> Iterator[slice]:
    """Cut rows into parts."""
    return (slice(first, first + most) for first in range(0, num_rows, most))


def _together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join rows; one part stays where it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _norms(make: _Makes, norms: HalfNorms, before: str) -> tuple[Norm, Norm, Norm]:
    names = (norms.before, norms.after, norms.joined)
    first, second, third = (make.norm(None if n is None else f"{before}{n}") for n in names)
    return first, second, third


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _turned(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    cos, sin = turns
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def _pool_all(
    rows: torch.Tensor, modes: Sequence[str], lengths: Sequence[int], num_unpooled: Sequence[int]
) -> torch.Tensor:
    """Pool texts that lie end to end, neighbours that are alike as one."""
    found, first = [], 0
    for (length, start), alike in groupby(zip(lengths, num_unpooled, strict=True)):
        count = len(list(alike))
        texts = rows[first : first + count * length].view(count, length, -1)
        start = min(start, length - 1)  # as where a text was cut within its prompt
        found.append(torch.cat([_pool(texts, start, mode) for mode in modes], -1))
        first += count * length
    return torch.cat(found)


def _pool(texts: torch.Tensor, start: int, mode: str) -> torch.Tensor:
    """Pool each text, [texts, num_tokens, hidden_size], into one row; means begin at a token."""
    rows = texts[:, start:]
    match mode:
        case "cls":
            return texts[:, 0]
        case "lasttoken":
            return texts[:, -1]
        case "max":
            return rows.amax(1)
        case "mean":
            return rows.mean(1)
        case "mean_sqrt_len_tokens":
            return rows.sum(1) / math.sqrt(rows.shape[1])
    shares = torch.arange(start + 1, texts.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    return torch.matmul(shares, rows) / shares.sum()
