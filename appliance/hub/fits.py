"""Estimate the memory that a model needs, and where it fits.

Invariant: an estimate is cautious; an unknown value is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.hub.names import is_quantised_as
from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.model_config import DTYPE_BYTES, ModelConfig
from engine.scheduler.cache.block_pool import MIN_RECORDS
from engine.scheduler.cache.window_blocks import Windows
from engine.units import size_text

GPU_OVERHEAD_BYTES = 2 << 30
"""Contexts, graphs, activations and a margin, for one worker process on a GPU."""
CPU_OVERHEAD_BYTES = 1 << 30
"""Two worker processes with torch, and the daemon."""
LENGTHS = (4096, 32768, 131072)
LEAST_TOKENS = 2048
"""Minimum tokens of a useful KV cache."""
BITS_PER_WEIGHT: Mapping[str, float] = {
    "Q8_0": 8.5,
    "Q6_K": 6.56,
    "Q5_K_M": 5.69,
    "Q5_K_S": 5.54,
    "Q5_0": 5.5,
    "Q4_K_M": 4.85,
    "Q4_K_S": 4.58,
    "Q4_0": 4.55,
    "MXFP4": 4.65,
}
"""Bits per weight of GGUF quantisations; the best first."""
_PACKED_GROWTH = 1.02
"""Memory of a quantised file relative to its size; norms and biases are widened."""
_EMBEDDING_SHARE = 0.25
"""The embedding's share of a small model's values; on a GPU it is widened."""
_USUAL = ("Q8_0", "Q6_K", "Q4_K_M")
_WIDENED_BITS = 16
_QUANTISED_SHARE = 0.8
_DISK_SHARE = 0.9
"""The largest share of weights on disk, on CPUs: a few layers are always in memory."""


@dataclass(frozen=True, slots=True)
class ServingPlace:
    """Memory that could serve a model: this machine's, or that of some GPUs."""

    name: str
    memory_bytes: int
    """Memory of each device."""
    is_gpu: bool
    num_devices: int = 1
    """Devices; with two, one prefills and one decodes, and each holds all weights."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that serving a model takes: weights, and KV for each token."""

    num_parameters: int | None
    weights_bytes: int
    """Bytes of weights in the serving dtype, as GPUs hold them."""
    kv_bytes_per_token: int | None
    """None: unknown until the file is downloaded."""
    max_model_len: int | None
    packed_bytes: int | None = None
    """Bytes of weights where kernels read quantised matrices directly; None: not quantised."""
    embedding_bytes: int | None = None
    """Bytes of the embedding in the serving dtype; None: unknown."""
    state_bytes: int = 0
    """Bytes of one request's recurrent states, whatever its length."""
    kept_bytes_per_token: int | None = None
    """On CPUs, KV bytes that a token keeps behind the windows; None: all."""
    window_tokens: int = 0
    """Tokens of a request with all of their KV there."""

    def bytes_at(self, place: ServingPlace) -> int:
        """Return the bytes of weights there; a GPU is assumed to run Triton's kernels."""
        if self.packed_bytes is None:
            return self.weights_bytes
        if not place.is_gpu:
            return self.packed_bytes
        embedding_bytes = self.embedding_bytes
        if embedding_bytes is None:
            embedding_bytes = int(self.weights_bytes * _EMBEDDING_SHARE)
        return min(self.weights_bytes, self.packed_bytes + embedding_bytes)


def need_of(config: ModelConfig, packed_bytes: int | None = None) -> MemoryNeed:
    """Estimate the need of a model with stored weights; KV has the weights' dtype.

    Args:
        packed_bytes: workers' memory of a quantised checkpoint, without its embedding.
    """
    dtype = config.stored_dtype or "bfloat16"
    num_parameters = sum(math.prod(shape) for _, shape in expected_shapes(config))
    return MemoryNeed(
        num_parameters,
        num_parameters * DTYPE_BYTES[dtype],
        config.kv_block_bytes(1, dtype),
        config.max_position_embeddings,
        packed_bytes,
        config.vocab_size * config.hidden_size * DTYPE_BYTES[dtype],
        0 if config.delta is None else MIN_RECORDS * config.delta.record_bytes,
        *_windows(config, dtype),
    )


def _windows(config: ModelConfig, dtype: str) -> tuple[int | None, int]:
    grouped = config.in_groups()
    groups = grouped.kv_groups
    if groups.window is None:
        return None, 0
    windows = Windows.of(groups.num_groups, groups.window)
    return grouped.kv_block_bytes(1, dtype), windows.num_tokens + windows.ahead_tokens


def need_of_files(config: ModelConfig, size_bytes: int) -> MemoryNeed:
    """Estimate the need of a folder by its size; much smaller than its weights, it is quantised.

    Quantised files take as much memory as in the file (gpt-oss's MXFP4, FP8, GPTQ and AWQ do).
    """
    need = need_of(config)
    is_quantised = size_bytes < _QUANTISED_SHARE * need.weights_bytes
    return replace(need, packed_bytes=size_bytes) if is_quantised else need


def need_of_file(name: str, size_bytes: int) -> MemoryNeed:
    """Estimate the need of a GGUF file by the quantisation in its name."""
    bits = next(
        (bits for kind, bits in BITS_PER_WEIGHT.items() if is_quantised_as(name, kind)),
        min(BITS_PER_WEIGHT.values()),  # of a kind that is not known, the one that has most values
    )
    if any(is_quantised_as(name, kind) for kind in ("F16", "BF16", "F32")):
        return MemoryNeed(None, size_bytes, None, None)
    widened = int(size_bytes / bits * _WIDENED_BITS)
    return MemoryNeed(None, widened, None, None, int(size_bytes * _PACKED_GROWTH))


def of_a_token(need: MemoryNeed) -> dict[str, int | None]:
    """List the bytes of a token's KV and, where a model has some, of a request's states."""
    states = {"state_bytes_of_a_request": need.state_bytes} if need.state_bytes else {}
    return {"kv_bytes_per_token": need.kv_bytes_per_token, **states}


def kv_rows(need: MemoryNeed) -> dict[str, int]:
    """List the KV bytes of one request, by its length."""
    if need.kv_bytes_per_token is None or need.max_model_len is None:
        return {}
    lengths = [*(n for n in LENGTHS if n < need.max_model_len), need.max_model_len]
    each, states = need.kv_bytes_per_token, need.state_bytes
    return {f"{length:,} tokens": length * each + states for length in lengths}


def rows(
    need: MemoryNeed, places: Iterable[ServingPlace], files: Sequence[tuple[str, int]] = ()
) -> list[dict[str, Any]]:
    """List what is left for KV at each place, the verdict, and a quantised file that would fit.

    Args:
        places: where it could go.
        files: existing quantised files, with names and bytes; none: the usual ones are estimated.
    """
    return [_row(need, place, files) for place in places]


def _row(need: MemoryNeed, place: ServingPlace, files: Sequence[tuple[str, int]]) -> dict[str, Any]:
    spare = spare_bytes(need, place)
    tokens = None
    if need.kv_bytes_per_token is not None:
        tokens = _tokens(need, place, spare, need.kv_bytes_per_token)
    verdict = _verdict(need, place, spare, tokens)
    return {
        "place": place.name,
        "memory_bytes": place.memory_bytes,
        "weights_bytes": need.bytes_at(place),
        "kv_tokens": tokens,
        "verdict": verdict,
        "quantised": None if verdict == "yes" else smaller(need, place, files),
    }


def _tokens(need: MemoryNeed, place: ServingPlace, spare: int, each: int) -> int:
    """Return the longest request that has room, of `each` bytes of KV a token."""
    spare = max(spare - need.state_bytes, 0)
    in_windows = need.window_tokens * (each - (need.kept_bytes_per_token or 0))
    if place.is_gpu or need.kept_bytes_per_token is None or spare < need.window_tokens * each:
        return spare // each
    return (spare - in_windows) // need.kept_bytes_per_token


def spare_bytes(need: MemoryNeed, place: ServingPlace) -> int:
    """Return a device's bytes left for KV; below 0: it does not hold even the weights."""
    overhead = GPU_OVERHEAD_BYTES if place.is_gpu else CPU_OVERHEAD_BYTES
    return place.memory_bytes - overhead - need.bytes_at(place)


def _verdict(need: MemoryNeed, place: ServingPlace, spare: int, tokens: int | None) -> str:
    if spare < 0 or (tokens is not None and tokens < LEAST_TOKENS):
        least = LEAST_TOKENS * (need.kv_bytes_per_token or 0) + need.state_bytes
        each = " each" if place.num_devices > 1 else ""
        short = least - spare
        if not place.is_gpu and short < _DISK_SHARE * need.bytes_at(place):
            return f"slowly: {size_text(short)} from disk a step"
        return f"no: {size_text(short)} short{each}"
    if tokens is None or need.max_model_len is None or tokens >= need.max_model_len:
        return "yes"
    return f"up to {tokens:,} tokens"


def smaller(need: MemoryNeed, place: ServingPlace, files: Sequence[tuple[str, int]]) -> str | None:
    """Find the best quantised file that leaves memory for a useful request; None: none does."""
    known = [
        (name, need_of_file(name, size)) for name, size in sorted(files, key=lambda each: -each[1])
    ]
    if not known and need.num_parameters is not None:
        for kind in _USUAL:
            in_file = int(BITS_PER_WEIGHT[kind] * need.num_parameters / 8)
            known.append((f"about {size_text(in_file)} as {kind}", need_of_file(kind, in_file)))
    least = LEAST_TOKENS * (need.kv_bytes_per_token or 0) + need.state_bytes
    for name, one in known:
        one = replace(one, embedding_bytes=need.embedding_bytes)
        if one.bytes_at(place) < need.bytes_at(place) and spare_bytes(one, place) >= least:
            return name
    return None
