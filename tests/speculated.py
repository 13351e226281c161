"""Generate with and without speculation, and compare tokens, log-probabilities and KV, bit for bit.

    python -m tests.speculated [COUNT]

Sequences differ in how they are drawn, in what limits them, and in what interrupts them: moves to
another worker, preemption, and a worker's death. With speculation their guesses are mostly right,
so that tokens are accepted and refused in every place.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.model.transformer import Transformer
from engine.model.weights import load_weights
from engine.text.grammar import GrammarTokenizer, json_grammar, regex_grammar
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import Admit
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.workers.runner import Runner
from engine.workers.speculation import Speculation
from engine.workers.worker_request import Grammars
from tests.checkpoints import make_checkpoint
from tests.engine.worker_harness import Harness

BLOCK_SIZE = 16
NUM_BLOCKS = 160
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a"]}}},
    "required": ["x", "tags"],
}
GRAMMARS = (json_grammar(POINT), regex_grammar("(yes|no|maybe so, )+[.]"))


@dataclass(slots=True)
class Generation:
    """One sequence, as far as it is, and what has come of it."""

    seq_id: int
    prompt: list[int]
    sampling: SamplingParams
    prediction: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    num_computed: int = 0
    generation: int = 0
    reason: str | None = None
    num_accepted: int = 0
    num_refused: int = 0

    @property
    def result(self) -> tuple[object, ...]:
        """What must be equal."""
        return self.outputs, self.logprobs, self.reason

    def admit(self, table: list[int], until: int) -> Admit:
        self.generation += 1
        return Admit(
            seq_id=self.seq_id,
            generation=self.generation,
            token_ids=[*self.prompt, *self.outputs],
            num_prompt_tokens=len(self.prompt),
            num_computed_tokens=self.num_computed,
            block_table=table,
            spec=RunSpec(self.sampling, prediction=self.prediction),
            until_output=until,
        )

    def take(self, entry) -> None:
        self.outputs += entry.token_ids
        self.logprobs += entry.logprobs
        self.num_computed = entry.num_computed_tokens
        self.reason = entry.finish_reason or self.reason
        if entry.num_drafted:
            self.num_accepted += len(entry.token_ids) - 1
            self.num_refused += entry.num_drafted - len(entry.token_ids) + 1


class Model:
    """A checkpoint, served with and without speculation, in a pool of each."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint.open(folder)
        self.config, self.tokenizer = checkpoint.config, Tokenizer.from_folder(folder)
        weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
        self.transformer = Transformer(self.config, weights, "float32")
        ends = self.config.eos_token_ids
        self.grammars = Grammars(
            lambda: GrammarTokenizer(self.tokenizer, self.config.vocab_size, ends)
        )

    def pool(self) -> torch.Tensor:
        c = self.config
        return torch.zeros(NUM_BLOCKS, c.num_kv_layers, 2, BLOCK_SIZE, c.num_kv_heads, c.head_dim)

    def worker(self, pool: torch.Tensor, most: int | None, *, speculates: bool) -> Harness:
        size = self.config.vocab_size
        return Harness(
            Runner(self.transformer, pool, BLOCK_SIZE, self.grammars),
            pool,
            eos_token_ids=self.config.eos_token_ids,
            max_num_batched_tokens=64,
            speculation=Speculation(size, BLOCK_SIZE, most) if speculates else None,
        )


def drawn_sampling(rng: random.Random, seed: int) -> SamplingParams:
    """Draw what a request may ask for."""
    extras = rng.choice(
        [
            {},
            {"temperature": 0.0},
            {"temperature": 0.0, "repetition_penalty": 1.3},
            {"top_p": 0.8, "top_k": 20},
            {"min_p": 0.05, "temperature": 1.5},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"grammar": rng.choice(GRAMMARS), "temperature": rng.choice([0.0, 1.0])},
            {"bad_words": ((65,), (70, 71), (80, 81, 82)), "min_tokens": 9},
            {"allowed_token_ids": tuple(range(64, 90)), "temperature": 0.5},
            {"logit_bias": {65: 4.0}, "stop_token_ids": (66, 67)},
        ]
    )
    logprobs = rng.choice([None, None, 2])
    ends = {"max_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.7}
    return SamplingParams(**({"seed": seed, "logprobs": logprobs} | ends | extras))


def drawn_group(rng: random.Random, number: int) -> list[Generation]:
    """Draw a prompt with one or more answers, each with a seed of its own."""
    piece = [rng.randint(40, 120) for _ in range(rng.randint(2, 12))]
    prompt = piece * rng.randint(1, 6)
    group = []
    for index in range(rng.choice([1, 1, 2, 4])):
        sampling = drawn_sampling(rng, number * 100 + index)
        group.append(Generation(index + 1, list(prompt), sampling))
    return group


def tables_of(group: list[Generation]) -> dict[int, list[int]]:
    tables, first = {}, 1
    for one in group:
        count = -(-(len(one.prompt) + one.sampling.max_tokens) // BLOCK_SIZE)
        tables[one.seq_id] = list(range(first, first + count))
        first += count
    return tables


def run(
    model: Model,
    group: list[Generation],
    interruptions: list[str],
    most: int | None,
    speculates: bool,
) -> torch.Tensor:
    """Generate a group to its end, over its interruptions; return the pool."""
    pool, tables = model.pool(), tables_of(group)
    for what in [*interruptions, "end"]:
        worker = model.worker(pool, most, speculates=speculates)
        for one in group:
            until = one.sampling.max_tokens
            if what == "move":
                until = min(until, len(one.outputs) + 3)
            if one.reason is None and len(one.outputs) < until:
                worker.tell(one.admit(list(tables[one.seq_id]), until))
        by_id, num_steps = {one.seq_id: one for one in group}, 0
        while worker.worker._running and (what in ("move", "end") or num_steps < 4):
            for report in worker.step():
                for entry in report.entries:
                    by_id[entry.seq_id].take(entry)
            num_steps += 1
        worker.close()
        if what == "preemption":
            for one in group:
                one.num_computed = 0 if one.reason is None else one.num_computed
    return pool


def guessed(rng: random.Random, outputs: list[int]) -> list[int]:
    """What a request might predict: mostly what comes."""
    return [token if rng.random() < 0.93 else rng.randint(40, 120) for token in outputs]


def written(pool: torch.Tensor, group: list[Generation]) -> torch.Tensor:
    """Return the KV of all computed positions."""
    parts = []
    for one in group:
        table = torch.tensor(tables_of(group)[one.seq_id])
        of_blocks = pool[table].movedim(3, 1).flatten(0, 1)
        parts.append(of_blocks[: one.num_computed])
    return torch.cat(parts)


def compare(model: Model, number: int) -> tuple[int, int, int]:
    """Run one group both ways; return sequences, accepted and refused tokens.

    Raises:
        AssertionError: anything differs.
    """
    rng = random.Random(number)
    plain = drawn_group(rng, number)
    interruptions = rng.choice([[], [], ["move"], ["kill", "move"], ["preemption", "kill"]])
    pool = run(model, plain, interruptions, None, speculates=False)
    group = [
        Generation(one.seq_id, list(one.prompt), one.sampling, guessed(rng, one.outputs))
        for one in plain
    ]
    other_pool = run(model, group, interruptions, rng.choice([1, 3, 7, 7, None]), speculates=True)
    assert [one.result for one in group] == [one.result for one in plain], number
    num_common = [min(a.num_computed, b.num_computed) for a, b in zip(plain, group, strict=True)]
    for a, b, common in zip(plain, group, num_common, strict=True):
        assert b.reason is not None, number
        a.num_computed = b.num_computed = common
    assert written(pool, plain).equal(written(other_pool, group)), number
    return len(group), sum(g.num_accepted for g in group), sum(g.num_refused for g in group)


def main() -> None:
    """Compare so many generations, half by a dense model and half by one of experts."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    torch.set_num_threads(1)
    for family in ("llama", "mixtral"):
        num_done = num_accepted = num_refused = number = 0
        with tempfile.TemporaryDirectory() as folder:
            model = Model(make_checkpoint(Path(folder), family))
            while num_done < count / 2:
                number += 1
                done, accepted, refused = compare(model, number)
                num_done, num_accepted = num_done + done, num_accepted + accepted
                num_refused += refused
        print(f"{family}: {num_done} equal, {num_accepted} accepted, {num_refused} refused tokens")


if __name__ == "__main__":
    main()
