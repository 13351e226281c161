"""Steps of a model in one process: prompts of 512 and 2,048, decodes of one and of eight sequences.

usage: python -m tests.benchmarks.quantised_steps MODEL [--threads 2] [--dtype bfloat16]
    [--weights stored]

MODEL is a GGUF file or a folder. Prints milliseconds of each step, the median and the extremes.
"""

import argparse
import mmap
import statistics
import time
from pathlib import Path

import torch

from engine.folder.checkpoint import Checkpoint, weights_layout
from engine.folder.panels_layout import panels_layout
from engine.model.attention import StepBatch
from engine.model.transformer import Transformer
from engine.model.weights import load_weights

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
    shape = (64, config.num_layers, 2, BLOCK, config.num_kv_heads, config.head_dim)
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


if __name__ == "__main__":
    main()
