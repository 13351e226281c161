"""Each kernel of the GPU on its own, beside what the device reaches: one JSON document.

    python -m engine.workers.kernel_bench

Calls are captured in a graph and replayed, each on another layer's memory, so that neither the host
nor the cache is measured; a kernel that cannot be captured fails here.
Owns: the shapes that are measured, and how.
Called by: whoever wants the table, as a process.
Invariant: ceilings are measured in the same run as what is held against them.
Never: checks results; tests do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from engine.kernel_costs import (
    Cost,
    Heads,
    attention_cost,
    gated_cost,
    norm_cost,
    place_cost,
    sample_cost,
)
from engine.model import triton_ops
from engine.model.attention import StepBatch
from engine.model.cuda import DeviceLimits, TritonAttention
from engine.model.paged import paged_step
from engine.model.triton_sampler import sample_rows

_NUM_REPLAYS = 10
_COPIED_BYTES = 1 << 30
_MATRIX_DIM = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    """Of the pool; so many calls are captured."""


LLAMA_8B = Shape(32, 8, 128, 4096, 14336, 128_256, 8)
SEQUENCES = {
    "prefill 4k": [(0, 4096)],
    "prefill 2k after 6k": [(6144, 2048)],
    "prefill 8 x 512": [(0, 512)] * 8,
    "decode 1 x 1k": [(1023, 1)],
    "decode 1 x 32k": [(32_767, 1)],
    "decode 8 x 8k": [(8191, 1)] * 8,
    "decode 64 x 1k": [(1023, 1)] * 64,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one shape."""

    name: str
    cost: Cost
    call: Callable[[int], object]
    """Once, on the layer given."""


def cases(
    shape: Shape,
    sequences: dict[str, list[tuple[int, int]]],
    token_counts: list[int],
    device: torch.device,
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> Iterator[Case]:
    """Every kernel, with tensors that live as long as its case."""
    group_size = shape.num_heads // shape.num_kv_heads
    attend = TritonAttention(group_size, shape.head_dim, dtype.itemsize, limits)
    for name, members in sequences.items():
        yield _attention_case(name, shape, members, attend, device, dtype)
    for num_tokens in token_counts:
        yield from _operation_cases(shape, num_tokens, device, dtype)
        yield from _sampler_cases(shape.vocab_size, min(num_tokens, 64), device)


def _attention_case(
    name: str,
    shape: Shape,
    members: list[tuple[int, int]],
    attend: TritonAttention,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int = 64,
) -> Case:
    counts = [-(-(context + new) // block_size) for context, new in members]
    tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
    batch = StepBatch(
        input_ids=torch.empty(0),
        positions=torch.empty(0),
        token_slots=torch.empty(0),
        query_lens=[new for _, new in members],
        seq_lens=[context + new for context, new in members],
        block_tables=[table.tolist() for table in tables],
        logit_rows=[],
    )
    step = paged_step(batch, device, attend.queries_per_tile)
    kv = _pool(shape, sum(counts) + 1, block_size, device, dtype)
    q = torch.randn(
        sum(batch.query_lens), shape.num_heads, shape.head_dim, device=device, dtype=dtype
    )
    scale = shape.head_dim**-0.5
    cost = attention_cost(_heads(shape, dtype), members)
    return Case(name, cost, lambda layer: attend(q, kv, layer, step, scale, None, None))


def _operation_cases(
    shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    x, added = (noise(shape.num_layers, num_tokens, shape.hidden_size) for _ in range(2))
    weight, size = noise(shape.hidden_size), dtype.itemsize
    yield Case(
        f"norm {num_tokens}",
        norm_cost(num_tokens, shape.hidden_size, size),
        lambda layer: triton_ops.norm(x[layer], weight, 1e-5, added[layer], 1.0),
    )
    gate_up = noise(shape.num_layers, num_tokens, 2 * shape.intermediate_size)
    yield Case(
        f"gated {num_tokens}",
        gated_cost(num_tokens, shape.intermediate_size, size),
        lambda layer: triton_ops.gated(gate_up[layer], "silu"),
    )
    num_rows = shape.num_heads + 2 * shape.num_kv_heads
    qkv = noise(shape.num_layers, num_tokens, num_rows, shape.head_dim)
    kv = _pool(shape, -(-num_tokens // 64) + 1, 64, device, dtype)
    positions = torch.arange(num_tokens, device=device)
    angles = (noise(num_tokens, 1, shape.head_dim), noise(num_tokens, 1, shape.head_dim))
    yield Case(
        f"place {num_tokens}",
        place_cost(_heads(shape, dtype), num_tokens),
        lambda layer: triton_ops.place(
            qkv[layer], shape.num_heads, angles, kv, layer, positions, positions + 64
        ),
    )


def _sampler_cases(vocab_size: int, num_rows: int, device: torch.device) -> Iterator[Case]:
    logits = torch.randn(num_rows, vocab_size, device=device) * 4
    ones, zeros = torch.ones(num_rows, device=device), torch.zeros(num_rows, device=device)
    indices = torch.arange(num_rows, device=device)

    def case(name: str, temperatures: torch.Tensor, top_ps: torch.Tensor) -> Case:
        how = (temperatures, zeros, zeros.int(), top_ps, indices, indices)
        cost = sample_cost(num_rows, vocab_size)
        return Case(f"{name} {num_rows}", cost, lambda _layer: sample_rows(logits, *how))

    yield case("greedy", zeros, ones)
    yield case("drawn", ones, ones)
    yield case("drawn top_p", ones, 0.9 * ones)


def _pool(
    shape: Shape, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    block = (shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)
    return torch.randn(num_blocks, *block, device=device, dtype=dtype)


def _heads(shape: Shape, dtype: torch.dtype) -> Heads:
    return Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype.itemsize)


def measure_s(call: Callable[[int], object], num_layers: int) -> float:
    """Seconds of one call on the device, over all layers in a captured graph."""
    for layer in range(num_layers):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            call(layer)
    times_ms: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(_NUM_REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return median(times_ms) / 1e3 / num_layers


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second, read and written, of a copy; operations per second of a matrix product."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = measure_s(lambda _layer: target.copy_(source), 2)
    a, b = (torch.randn(_MATRIX_DIM, _MATRIX_DIM, device=device, dtype=dtype) for _ in range(2))
    product_s = measure_s(lambda _layer: a @ b, 2)
    return 2 * _COPIED_BYTES / copy_s, 2 * _MATRIX_DIM**3 / product_s


@torch.inference_mode()
def measure() -> dict[str, object]:
    """The table, in bfloat16."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    bytes_per_s, flops_per_s = measure_ceilings(device, dtype)
    rows = []
    for case in cases(LLAMA_8B, SEQUENCES, [1, 64, 4096], device, dtype, DeviceLimits.of(device)):
        elapsed_s = measure_s(case.call, LLAMA_8B.num_layers)
        floor_s = case.cost.floor_s(bytes_per_s, flops_per_s)
        rows.append(
            {
                "name": case.name,
                "time_us": elapsed_s * 1e6,
                "gb_per_s": case.cost.num_bytes / elapsed_s / 1e9,
                "tflop_per_s": case.cost.num_flops / elapsed_s / 1e12,
                "share_of_ceiling": floor_s / elapsed_s,
            }
        )
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "copy_gb_per_s": bytes_per_s / 1e9,
        "matmul_tflop_per_s": flops_per_s / 1e12,
        "kernels": rows,
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
