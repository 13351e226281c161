"""Count the KV blocks and bytes of one text by the ledger, with and without window blocks.

Published shapes, bfloat16, blocks of 64 tokens; the prompt is computed in steps of 512 tokens, and
the most that it holds at once is counted, then what it holds while it decodes. No model is run.

    python -m tests.benchmarks.window_blocks --tokens 32768
"""

import argparse

from engine.checkpoint.kv_groups import divide
from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.window_blocks import Windows

BLOCK_SIZE, STEP_TOKENS, GIB = 64, 512, 1 << 30


def _every(number, num_layers, window):
    return [None if (i + 1) % number == 0 else window for i in range(num_layers)]


SHAPES = {
    "Gemma 3 4B": (_every(6, 34, 1024), 4, 256),
    "Gemma 3 12B": (_every(6, 48, 1024), 8, 256),
    "Gemma 3 27B": (_every(6, 62, 1024), 16, 128),
    "Gemma 4 E2B": ([512] * 12 + [None] * 3, 1, 512),
    "Gemma 4 26B-A4B": (_every(6, 30, 1024), 8, 256),
    "gpt-oss 20b": (_every(2, 24, 128), 8, 64),
    "gpt-oss 120b": (_every(2, 36, 128), 8, 64),
    "OLMo 3 7B": (_every(4, 32, 4096), 32, 128),
    "Mistral 7B 0.1": ([4096] * 32, 8, 128),
}
"""Windows of the pool's layers, key heads, their size."""


def count(windows, num_tokens):
    """The most blocks at once within the prompt, and those held while it decodes; of how many."""
    groups = divide(windows, 131_072)
    shape = Windows.of(groups.num_groups, groups.window)
    num_blocks = num_tokens // BLOCK_SIZE
    pool = BlockPool("kv", groups.num_groups * num_blocks + 2, BLOCK_SIZE, 0, shape)
    ledger, most = Ledger([pool]), 0
    assert ledger.reserve(1, {"kv": num_blocks}, spans={"kv": pool.windows.span(0)})
    for computed in range(0, num_tokens + 1, STEP_TOKENS):
        most = max(most, ledger.table_sizes()["kv"][1])
        ledger.pass_windows(1, "kv", computed)
        assert ledger.grow(1, "kv", 0, pool.windows.span(computed))
        ledger.check_invariants()
    return groups, most, ledger.table_sizes()["kv"][1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    num_tokens = parser.parse_args().tokens
    for name, (windows, num_heads, head_dim) in SHAPES.items():
        groups, most, held = count(windows, num_tokens)
        plane = 2 * BLOCK_SIZE * num_heads * head_dim * 2
        before = num_tokens // BLOCK_SIZE * len(windows) * plane / GIB
        block = groups.num_layers * plane
        print(
            f"{name}: {groups.num_groups} x {groups.num_layers} layers; before {before:.2f} GiB; "
            f"prompt at most {most} blocks, {most * block / GIB:.2f} GiB; "
            f"then {held} blocks, {held * block / GIB:.2f} GiB"
        )


if __name__ == "__main__":
    main()
