"""Steps over pools of both dtypes by turns in one process: what int8 KV takes, and what it costs.

usage: GOMP_SPINCOUNT=10000 python -m tests.benchmarks.kv_dtypes MODEL [--threads 2] [--rounds 12]
    [--longest 8192] [--loss-only] [--against MODULE.so]

The variable is what workers have: without it torch's threads spin where the kernels' want to run.

MODEL is a folder or a GGUF file. Prints the divergence of the logits; then, for one sequence after
each context, milliseconds of a step over a pool in bfloat16 twice (the second against the first is
the band) and in int8, medians and extremes, and the ratios to the first of the same round.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.kernels.cpu import load_kernels
from engine.model.transformer import Transformer
from engine.workers.kv_pool import TORCH_DTYPES, block_shape
from engine.workers.logits_loss import kv_loss
from tests.benchmarks.quantised_steps import BLOCK, batch_of, transformer_of

CASES = ((512, 1), (2048, 1), (8000, 1), (0, 512), (2048, 512))
"""Tokens before a step, and in it."""
ARMS = (("bfloat16", "bfloat16"), ("bfloat16 again", "bfloat16"), ("int8", "int8"))
AGAINST = (("bfloat16 there", "bfloat16"), ("int8 there", "int8"))
DTYPE = "bfloat16"


def pool_of(model: Transformer, dtype: str, num_tokens: int) -> torch.Tensor:
    """Filled by a prompt, as serving fills it."""
    kv = torch.zeros(
        (2 + num_tokens // BLOCK, *block_shape(model.config, BLOCK, dtype)),
        dtype=TORCH_DTYPES[dtype],
    )
    for before in range(0, num_tokens - BLOCK, 512):
        model.forward(batch_of(model.config, 1, before, 512), kv)
    return kv


def model_by(kernels: Path, path: Path, longest: int) -> Transformer:
    """The model, multiplied and attended by another build's kernels of the level of our own."""
    name = f"engine.kernels._{load_kernels()[1]}"
    spec = importlib.util.spec_from_file_location(name, kernels)
    assert spec is not None
    assert spec.loader is not None
    ours, sys.modules[name] = sys.modules[name], importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
        return transformer_of(path, DTYPE, "stored", longest)
    finally:
        sys.modules[name] = ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--loss-only", action="store_true")
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = transformer_of(options.model, DTYPE, "stored", options.longest)
    loss = kv_loss(model, Checkpoint.open(options.model), "int8", lambda: None)
    print(
        f"over {loss.num_tokens} tokens: KL {loss.kl_nats:.5f}, same top {loss.same_top_ratio:.1%}"
    )
    if options.loss_only:
        return
    arms = [(*arm, model) for arm in ARMS]
    if options.against is not None:
        other = model_by(options.against, options.model, options.longest)
        arms += [(*arm, other) for arm in AGAINST]
    made = {dtype: pool_of(model, dtype, options.longest) for dtype in ("bfloat16", "int8")}
    for before, new in CASES:
        if before + new > options.longest:
            continue
        batch = batch_of(model.config, 1, before, new)
        times_ms: dict[str, list[float]] = {name: [] for name, *_ in arms}
        for number in range(options.rounds * (5 if new == 1 else 1) + 1):
            for name, dtype, by in arms[:: 1 if number % 2 else -1]:
                started_s = time.perf_counter()
                by.forward(batch, made[dtype])
                if number:
                    times_ms[name].append((time.perf_counter() - started_s) * 1e3)
        for name, each in times_ms.items():
            first = times_ms[name.removesuffix(" there") if " there" in name else DTYPE]
            ratios = [a / b for a, b in zip(each, first, strict=True)]
            print(
                f"after {before}, {new} new, {name}: {statistics.median(each):.2f} ms "
                f"({min(each):.2f}-{max(each):.2f}), ratio {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f}-{max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
