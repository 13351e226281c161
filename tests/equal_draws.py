"""Compare the draws of the kernels, at every level of this machine, with the reference in torch.

usage: python -m tests.equal_draws --rows 1000000 --seed 1
"""

import argparse
import math
import time
from array import array
from random import Random

import torch

from engine.kernels.cpu import load_kernels
from engine.wire.sampling import SamplingParams
from engine.worker.model.draw_rows import RowDraw, draw_by_kernels, draw_by_torch
from engine.worker.model.logit_rules import bits_of, rules_of
from tests.levels import LEVELS

SIZES = [1, 2, 3, 15, 16, 17, 50, 63, 64, 65, 129, 700, 3001]
TEMPERATURES = [0, 1e-5, 0.1, 0.6, 0.7, 1, 1, 1.5, 5, 1e30]
NEARLY_ONE = 1 - 2**-53


def random_rows(rng, num_rows, vocab_size):
    """Logits of one kind: scattered, tied, flat, mostly impossible, one candidate, huge, broken."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    noise = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([0.01, 1, 3, 10])
    chance = torch.rand(num_rows, vocab_size, generator=generator)
    only = torch.randint(0, vocab_size, (num_rows, 1), generator=generator)
    kinds = [
        lambda: noise,
        lambda: noise.round(),
        lambda: torch.zeros_like(noise),
        lambda: noise.masked_fill_(chance < 0.7, -math.inf),
        lambda: torch.full_like(noise, -math.inf).scatter_(1, only, 1.0),
        lambda: noise * 1e6,
        lambda: noise.masked_fill_(chance < 0.1, math.nan).masked_fill_(chance > 0.99, math.inf),
        lambda: noise.mul_(4).round_().div_(4).add_(chance * 1e-7),
    ]
    return rng.choice(kinds)()


def random_params(rng, **rules):
    return SamplingParams(
        max_tokens=1,
        seed=rng.randrange(2**63),
        temperature=rng.choice(TEMPERATURES),
        top_k=rng.choice([0, 0, 1, 2, 20, 40, 64, 65, 100, 1000]),
        top_p=rng.choice([1, 1, 0.9, 0.95, 0.5, 0.01, 0.0, 0.999999, NEARLY_ONE]),
        min_p=rng.choice([0, 0, 0, 0.05, 0.001, 1.0, 1e-9]),
        **rules,
    )


def num_unequal(rows_of, num_rows, seed):
    """How many of so many rows, or some more, another token is drawn of; at each level."""
    rng, count, unequal = Random(seed), 0, dict.fromkeys(LEVELS, 0)
    while count < num_rows:
        logits, draws = rows_of(rng)
        before = logits.view(torch.int32).clone()
        expected = draw_by_torch(draws)
        for level in LEVELS:
            own = draw_by_kernels(load_kernels(level)[0], draws)
            unequal[level] += sum(a != b for a, b in zip(own, expected, strict=True))
            assert logits.view(torch.int32).equal(before), "a row was changed"
        count += len(logits)
    return unequal


def plain_rows(rng, num_rows=200):
    logits = random_rows(rng, num_rows, rng.choice(SIZES))
    return logits, [RowDraw(row, random_params(rng), rng.randrange(100_000)) for row in logits]


def large_rows(rng):
    """As many tokens as large models have."""
    logits = torch.randn(9, 151_936, generator=torch.Generator().manual_seed(rng.randrange(99)))
    logits *= rng.choice([0.1, 1, 3])
    return logits, [RowDraw(row, random_params(rng), 3) for row in logits]


def ruled_rows(rng, num_rows=20):
    """Rows whose requests change or forbid logits, each in a way of its own."""
    vocab_size = rng.choice([40, 64, 700])
    logits, draws = random_rows(rng, num_rows, vocab_size), []

    def some(most):
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(1, most))]

    for row in logits:
        ids, num_prompt_ids = array("q", some(90)), rng.randrange(1, 40)
        num_ids = max(len(ids) - 2, 0)
        p = random_params(
            rng,
            presence_penalty=rng.choice([0, -2.0, 0.3]),
            frequency_penalty=rng.choice([0, 1.1, -0.7]),
            repetition_penalty=rng.choice([1.0, 1.3, 0.6]),
            logit_bias={i: rng.uniform(-100, 100) for i in some(4)} if rng.random() < 0.5 else {},
            allowed_token_ids=tuple(some(30)) if rng.random() < 0.3 else None,
            bad_words=((ids[num_ids - 1], *some(2)), *((i,) for i in some(3))),
            min_tokens=rng.choice([0, 100]),
        )
        allowed = None
        if rng.random() < 0.5:
            num_bytes = -(-vocab_size // 32) * 4
            allowed = bits_of(some(vocab_size)).ljust(num_bytes, b"\0")
        only = None if p.allowed_token_ids is None else bits_of(p.allowed_token_ids)
        counts = min(num_prompt_ids, num_ids), num_ids
        rules = rules_of(p, ids, *counts, {5, vocab_size + 1}, vocab_size, allowed, only)
        draws.append(RowDraw(row, p, 7, rules))
    return logits, draws


def main() -> None:
    """Compare plain rows; one in twenty has rules of its own, and some are large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started_s = time.monotonic()
    shares = {plain_rows: 0.949, ruled_rows: 0.05, large_rows: 0.001}
    for rows_of, share in shares.items():
        unequal = num_unequal(rows_of, int(asked.rows * share), asked.seed)
        print(f"{rows_of.__name__}: {int(asked.rows * share)} rows, unequal: {unequal}")
    print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
