"""Hold conversations with servers over /v1/completions: TTFT and cache hits by turn.

usage: python -m tests.benchmarks.turns SERVER... [--kind chat|agent] [--count 8] [--model FOLDER]

SERVER is as in `penstock bench compare`: roles of a daemon to start, or an address. Every server
and round gets a system prompt and words of its own, so that only its own conversations are cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import NamedTuple

from appliance.bench.arms import Arms, Metric, interleaved, rows
from appliance.bench.exchange import Target
from appliance.bench.load import PATIENCE_S, send
from appliance.bench.sample import Sample
from appliance.bench.statistics import Figures, GoodputTargets, quantile, summarize


class Turn(NamedTuple):
    """One request: all that was said before, and this many new tokens."""

    input_tokens: int
    output_tokens: int
    think_s: float


class Kind(NamedTuple):
    """What is typical of a kind of conversation; ranges of a number, least and most."""

    turns: tuple[int, int]
    first_tokens: tuple[int, int]
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    think_s: float
    every_s: float
    shared_tokens: int


KINDS = {
    "chat": Kind((2, 10), (200, 2000), (20, 200), (50, 300), 8.0, 4.0, 128),
    "agent": Kind((20, 40), (100, 300), (50, 350), (20, 80), 1.0, 10.0, 1500),
}


def drawn(kind: Kind, rng: random.Random) -> list[Turn]:
    return [
        Turn(
            rng.randint(*(kind.input_tokens if number else kind.first_tokens)),
            rng.randint(*kind.output_tokens),
            rng.expovariate(1 / kind.think_s) if number else 0.0,
        )
        for number in range(rng.randint(*kind.turns))
    ]


async def converse(target: Target, kind: Kind, args: argparse.Namespace) -> Figures:
    rng, origin_ns = random.Random(args.seed), time.perf_counter_ns()
    shared = target.ids(kind.shared_tokens)
    assert shared is not None, f"{target.label} has no /tokenize"

    async def have(turns: list[Turn], starts_s: float) -> list[Sample]:
        said, samples = list(shared), []
        await asyncio.sleep(starts_s / args.speed)
        for number, turn in enumerate(turns, start=1):
            await asyncio.sleep(turn.think_s / args.speed)
            said += target.ids(turn.input_tokens)
            if target.max_model_len and len(said) + turn.output_tokens > target.max_model_len:
                break
            due_ns = time.perf_counter_ns()
            until_s = (due_ns - origin_ns) / 1e9 + PATIENCE_S
            request = target.completion(said, turn.output_tokens)
            sample, reply = await send(target, request, origin_ns, due_ns, until_s)
            sample.turn = number
            samples.append(sample)
            said += reply.token_ids
            if not sample.is_completed:
                break
        return samples

    conversations = [drawn(kind, rng) for _ in range(args.count)]
    starts = [rng.uniform(0, kind.every_s * args.count) for _ in conversations]
    ended = await asyncio.gather(*map(have, conversations, starts))
    samples = [sample for each in ended for sample in each]
    window_ms = (time.perf_counter_ns() - origin_ns) / 1e6
    return summarize(samples, window_ms, GoodputTargets(None, None)) | by_turn(samples)


def by_turn(samples: list[Sample]) -> Figures:
    figures: Figures = {}
    for turn in sorted({sample.turn for sample in samples}):
        own = [sample for sample in samples if sample.turn == turn]
        ttft_ms = [sample.ttft_ms for sample in own if sample.ttft_ms is not None]
        known = [one for one in own if one.cached_tokens is not None and one.prompt_tokens]
        prompt_tokens = sum(one.prompt_tokens for one in known)
        figures[f"turn_{turn:02}_ttft_ms"] = quantile(ttft_ms, 0.5)
        if prompt_tokens:
            hits = sum(one.cached_tokens for one in known)
            figures[f"turn_{turn:02}_hit_ratio"] = hits / prompt_tokens
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="turns")
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--kind", choices=KINDS, default="chat")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with Arms(args.servers, model=args.model, seed=args.seed) as arms:
        found = interleaved(
            arms,
            args.rounds,
            args.seed,
            lambda target, _label, _round: asyncio.run(converse(target, KINDS[args.kind], args)),
        )
    names = {name for rounds in found.values() for each in rounds for name in each}
    turns = sorted(name for name in names if name.startswith("turn_"))
    for row in rows(found, [Metric(name) for name in (*turns, "hit_ratio", "failed")]):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
