"""Time steps of a hybrid of Gated DeltaNet, beside what reading and multiplying allow.

usage: python -m tests.benchmarks.recurrent_steps [--threads 1] [--rounds 7] [--root OTHER_TREE]
    [--family llama]

The model is random, of SmolLM2-135M's shape: 30 layers of 576, three of four recurrent. A decode
step has to read its weights, and to read and write its states. A prompt of 512 tokens has to do its
products in bfloat16, and those with states in float32. The rates of both are timed by turns with
the steps; one thread is timed by the processor's time. With --family llama the model has no
recurrent layers, and only its times are printed.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

BLOCK, CONTEXT, PROMPT = 64, 512, 512
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LINEAR = {"num_key_heads": 9, "num_value_heads": 9, "key_head_dim": 64, "value_head_dim": 64}


def transformer_of(family, folder):
    import mmap

    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.weights_layout import packed_layout
    from engine.kernels.cpu import DOTS, ProductVariants
    from engine.worker.model.transformer import Transformer
    from engine.worker.model.weights import load_weights
    from tests.checkpoints import make_checkpoint

    own = {f"linear_{name}": size for name, size in LINEAR.items()} if family != "llama" else {}
    make_checkpoint(folder, family, "bfloat16", layer_types=..., **SHAPE, **own)
    checkpoint = Checkpoint.open(folder)
    layout = packed_layout(checkpoint, "bfloat16")
    arena = mmap.mmap(-1, layout.num_bytes)
    how = (checkpoint, "bfloat16", arena, (0, 1), lambda *_: None)
    weights = load_weights(*how, is_packed=True)
    variants = ProductVariants(DOTS)
    return Transformer(checkpoint.config, weights, "bfloat16", 2048, BLOCK, variants)


def steps_of(transformer):
    """A decode step and a prompt's, as calls; the sequence's two records take turns."""
    import torch

    from engine.worker.model.attention import StepBatch

    config = transformer.config
    size = getattr(config, "record_blocks", lambda *_: 0)(BLOCK, "bfloat16")
    tokens = CONTEXT + PROMPT
    table = list(range(1, 1 + tokens // BLOCK))
    shape = (config.num_kv_layers, 2, BLOCK, config.num_kv_heads, config.head_dim)
    kv = torch.zeros(1 + len(table) + 2 * size, *shape, dtype=torch.bfloat16)
    places = [
        list(range(1 + len(table) + i * size, 1 + len(table) + (i + 1) * size)) for i in (0, 1)
    ]

    def step(first, count):
        extra = {}
        if size:
            from engine.worker.model.records import RecordBlocks

            extra["records"] = [RecordBlocks(places[0] if first else (), places[1])]
            places.reverse()
        positions = torch.arange(first, first + count)
        ids = torch.randint(5, 290, (count,))
        shape = ([count], [first + count], [table], [count - 1])
        transformer.forward(StepBatch(ids, positions, positions + BLOCK, *shape, **extra), kv)

    step(0, CONTEXT)
    return {"decode": lambda: step(CONTEXT, 1), "prefill": lambda: step(0, PROMPT)}


def rates_of(num_bytes):
    """Calls that read so many bytes, and multiply: with the operations of each."""
    import torch

    from engine.kernels.cpu import load_kernels
    from engine.worker.model.linear import CompiledLinear
    from engine.worker.model.weight import Weight

    kernels, (rows, depth) = load_kernels()[0], (1536, 576)
    values = torch.randn(1 << 20).bfloat16().repeat(num_bytes // (2 << 20))
    plain = CompiledLinear(kernels, [Weight.plain(values.view(-1, 2048))], [])
    wide = CompiledLinear(kernels, [Weight.plain(torch.randn(rows, depth))], [])
    x, many = torch.randn(1, 2048).bfloat16(), torch.randn(PROMPT, depth)
    return {"read": lambda: plain(x), "float32": lambda: wide(many)}, 2 * PROMPT * rows * depth


def product_of(transformer):
    """A product of a prompt's tokens with a packed matrix of the model's."""
    import torch

    x = torch.randn(PROMPT, transformer.config.intermediate_size).bfloat16()
    down = transformer._branches[1].block._down
    return (lambda: down(x)), 2 * PROMPT * down.num_outputs * x.shape[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--root", help="a tree to import engine from")
    parser.add_argument("--family", default="qwen3_5_text")
    options = parser.parse_args()
    if options.root:
        sys.path.insert(0, options.root)
    import torch

    from engine.checkpoint.checkpoint import expected_shapes

    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        transformer = transformer_of(options.family, Path(folder))
    torch.set_num_threads(options.threads)
    config, calls = transformer.config, steps_of(transformer)
    delta = getattr(config, "delta", None)
    if delta is not None:
        sizes = {name: math.prod(shape) for name, shape in expected_shapes(config)}
        num_bytes = 2 * sum(sizes.values()) + 3 * delta.record_bytes  # to write is to read before
        more, wide_operations = rates_of(num_bytes)
        product, operations = product_of(transformer)
        calls |= more | {"product": product}
    times_s = {name: [] for name in calls}
    for _ in range(options.rounds + 1):
        for name, call in calls.items():
            once = []
            for _ in range(1 if name == "prefill" else 5):
                started_s = clock()
                call()
                once.append(clock() - started_s)
            times_s[name].append(min(once))
    times_s = {name: some[1:] for name, some in times_s.items()}
    for name, some in times_s.items():
        low, middle, high = statistics.quantiles(some, n=4)
        print(f"{name}: {middle * 1e3:.2f} ms ({low * 1e3:.2f}-{high * 1e3:.2f})")
    if delta is None:
        return
    # a value of a state is decayed, read by key and query, and changed: seven operations
    states = 7 * PROMPT * len(delta.layers) * delta.state_values
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    matrices = 2 * PROMPT * layers + 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    rows = zip(*times_s.values(), strict=True)
    shares = {"decode": [], "prefill": []}
    for row in rows:
        s = dict(zip(times_s, row, strict=True))
        shares["decode"].append(s["read"] / s["decode"])
        least_s = matrices / operations * s["product"] + states / wide_operations * s["float32"]
        shares["prefill"].append(least_s / s["prefill"])
    for name, some in shares.items():
        low, middle, high = statistics.quantiles(some, n=4)
        print(f"{name}: {middle:.0%} of what is possible ({low:.0%}-{high:.0%})")


if __name__ == "__main__":
    main()
