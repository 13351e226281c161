"""Steps of a model in one process: prompts of 512 and 2,048, decodes of one and of eight sequences.

usage: python -m tests.benchmarks.quantised_steps MODEL [--threads 2] [--dtype bfloat16]
    [--weights stored]

MODEL is a GGUF file or a folder. Prints milliseconds of each step, the median and the extremes.
Then how near a decode of one sequence after 512 tokens comes to reading: its rate is the weights'
bytes over the step's time, and reading is a product of one input with a plain bfloat16 matrix of as
many bytes, by the same threads, by turns. It says something of memory only where the weights are
larger than the processor's caches.
"""

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import panels_layout, weights_layout
from engine.kernels.cpu import load_kernels
from engine.worker.model.attention import StepBatch
from engine.worker.model.linear import CompiledLinear
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import load_weights

BLOCK = 64
CASES = ((1, 512, 1, 24), (1, 2048, 1, 24), (8, 128, 1, 24), (1, 0, 512, 3), (1, 0, 2048, 2))
"""Sequences, tokens that they have, new ones of each, repetitions."""


def transformer_of(path: Path, dtype: str, scheme: str, max_model_len: int = 4096) -> Transformer:
    checkpoint = Checkpoint.open(path)
    layout = panels_layout(checkpoint, dtype, scheme)
    is_packed = layout is not None
    layout = layout or weights_layout(checkpoint, dtype, can_widen=True)
    arena = None if layout is None else mmap.mmap(-1, layout.num_bytes)
    started_s = time.perf_counter()
    share = None if arena is None else (0, 1)
    weights = load_weights(
        checkpoint,
        dtype,
        arena,
        share,
        lambda done, total: None,
        is_packed=is_packed,
        weights=scheme,
    )
    size = checkpoint.num_bytes if layout is None else layout.num_bytes
    took_s = time.perf_counter() - started_s
    print(
        f"{path.name}, {scheme}: {size / 1e6:.0f} MB of weights in {dtype}, {took_s:.1f} s to load"
    )
    return Transformer(checkpoint.config, weights, dtype, max_model_len, BLOCK)


def batch_of(config, num_sequences: int, before: int, new: int) -> StepBatch:
    blocks = -(-(before + new) // BLOCK)
    tables = [[1 + i * blocks + j for j in range(blocks)] for i in range(num_sequences)]
    positions = [p for _ in tables for p in range(before, before + new)]
    slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t in tables for p in range(before, before + new)]
    return StepBatch(
        torch.randint(5, 8000, (len(positions),)),
        torch.tensor(positions),
        torch.tensor(slots),
        [new] * num_sequences,
        [before + new] * num_sequences,
        tables,
        [(i + 1) * new - 1 for i in range(num_sequences)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="stored")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformer = transformer_of(options.model, options.dtype, options.weights)
    config = transformer.config
    shape = (64, config.num_kv_layers, 2, BLOCK, config.num_kv_heads, config.head_dim)
    kv = torch.zeros(shape, dtype=getattr(torch, options.dtype))
    for num_sequences, before, new, repetitions in CASES:
        batch = batch_of(config, num_sequences, before, new)
        times_ms = []
        for _ in range(repetitions + 1):
            started_s = time.perf_counter()
            transformer.forward(batch, kv)
            times_ms.append((time.perf_counter() - started_s) * 1e3)
        times_ms = times_ms[1:]
        middle = statistics.median(times_ms)
        rate = num_sequences * new / middle * 1e3
        print(
            f"B{num_sequences} after {before}, {new} new: {middle:.1f} ms "
            f"({min(times_ms):.1f}-{max(times_ms):.1f}), {rate:.0f} tok/s",
            flush=True,
        )
    checkpoint = Checkpoint.open(options.model)
    layout = panels_layout(checkpoint, options.dtype, options.weights)
    batch = batch_of(config, 1, 512, 1)
    size = checkpoint.num_bytes if layout is None else layout.num_bytes
    share_of_reading(lambda: transformer.forward(batch, kv), size)


def share_of_reading(step: Callable[[], object], num_bytes: int) -> None:
    """Prints how fast the step reads its weights, and a plain matrix of their size is read."""
    depth = 2048
    values = torch.randn(1 << 20).bfloat16().repeat(num_bytes // (2 << 20))
    plain = CompiledLinear(load_kernels()[0], [Weight.plain(values.view(-1, depth))], [])
    x = torch.randn(1, depth).bfloat16()
    rates: dict[str, list[float]] = {"step": [], "reading": []}
    calls = {"step": step, "reading": lambda: plain(x)}
    for round_index in range(22):
        for name, call in calls.items():
            started_s = time.perf_counter()
            call()
            if round_index >= 2:
                rates[name].append(num_bytes / (time.perf_counter() - started_s) / 1e9)
    for name, found in rates.items():
        low, middle, high = (sorted(found)[i] for i in (2, 10, 17))
        print(f"{name}: {middle:.1f} GB/s ({low:.1f}-{high:.1f})")
    ratios = sorted(a / b for a, b in zip(rates["step"], rates["reading"], strict=True))
    print(
        f"the step reads at {ratios[10]:.0%} of it ({ratios[2]:.0%}-{ratios[17]:.0%})", flush=True
    )


if __name__ == "__main__":
    main()
