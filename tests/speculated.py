"""Generate with and without speculation, and compare all that comes of it, bit for bit.

    python -m tests.speculated [COUNT] [LEVEL]

Compared are tokens, log-probabilities, KV and the records of recurrent layers after each step, of
COUNT sequences of each model in KINDS, by the kernels of LEVEL. Sequences differ in how they are
drawn, in what ends them (stop strings, too, as a reply reads them), in when they arrive, and in
what interrupts them: moves to another worker, preemption, and a worker's death. With speculation
most guesses are right, so that tokens are accepted and refused in every place.
"""

from __future__ import annotations

import mmap
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from appliance.api.core.stream import OpenReply
from appliance.api.openai.ask import completion_ask
from appliance.daemon.requests.request import ModelInfo, Peer, Request, TokensEmitted
from appliance.daemon.survival.journal import anew
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import AS_STORED, panels_layout, weights_layout
from engine.kernels.cpu import load_kernels
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.text.grammar import json_grammar, regex_grammar
from engine.text.grammar_matcher import GrammarTokenizer
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Admit, Records, Release
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams, TokenLogprob
from engine.worker.grammars import Grammars
from engine.worker.kv_pool import TORCH_DTYPES, block_shape
from engine.worker.model import compiled
from engine.worker.model.attention import planes
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from engine.worker.speculation import Speculation
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.quantised_checkpoints import SHAPE, write_quantised
from tests.worlds.worker_loop import Harness

BLOCK_SIZE = 16
NUM_BLOCKS = 160
MAX_GROUP = 6
"""Most sequences at once."""
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a"]}}},
    "required": ["x", "tags"],
}
GRAMMARS = (json_grammar(POINT), regex_grammar("(yes|no|maybe so, )+[.]"))


@dataclass(frozen=True)
class Kind:
    """A model and how it is served."""

    family: str = "llama"
    dtype: str = "float32"
    kv_dtype: str = "auto"
    weights: str = AS_STORED
    made: str = ""
    """A GGUF type, or one of tests.quantised_checkpoints.KINDS; empty: not quantised."""


KINDS = {
    "dense": Kind(),
    "dense, bfloat16": Kind(dtype="bfloat16"),
    "experts": Kind("mixtral"),
    "experts, bfloat16": Kind("mixtral", "bfloat16"),
    "windows": Kind("gemma3_text"),
    "windows, sinks, experts": Kind("gpt_oss", "bfloat16"),
    "GGUF Q4_1": Kind(dtype="bfloat16", made="Q4_1"),
    "GGUF Q8_0": Kind(made="Q8_0"),
    "AWQ": Kind(dtype="bfloat16", made="awq"),
    "FP8 in blocks": Kind(dtype="bfloat16", made="fp8-blocks"),
    "NVFP4": Kind(made="nvfp4"),
    "inputs rounded to int8": Kind(dtype="bfloat16", made="int8-tokens"),
    "experts, quantised at start": Kind("mixtral", "bfloat16", weights="q4"),
    "KV in int8": Kind(dtype="bfloat16", kv_dtype="int8"),
    "int8 and KV in int8": Kind(kv_dtype="int8", weights="int8"),
    "recurrent": Kind("qwen3_5_text"),
    "recurrent, experts, bfloat16": Kind("qwen3_next", "bfloat16"),
}


COUNTED = "equal", "accepted", "refused", "stop strings", "move", "preemption", "kill"


class Reply:
    """Read a sequence's text up to a stop string, standing in for the daemon."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], sampling: SamplingParams, stop: list[str]
    ) -> None:
        self.tokenizer, self.model = tokenizer, ModelInfo("m", 512, 300, (), None, 0)
        spec, stamps = RunSpec(sampling), Stamps(arrived_ns=0)
        self._sequence = Sequence(1, "cmpl-1", 0, prompt, spec, stamps)
        request = Request("cmpl-1", "/v1/completions", "m", Peer(), True, "", [self._sequence])
        asked = completion_ask({"prompt": prompt, "stop": stop}, self.model, 1)
        self._reply = OpenReply(self, request, asked, anew)
        self.text = ""
        self.num_kept: int | None = None
        """Tokens up to the stop string; None: it has not come."""

    def stop_sequence(self, _sequence: Sequence, num_kept_tokens: int) -> None:
        self.num_kept = num_kept_tokens

    def read(self, entry) -> None:
        """Read what a step reports."""
        is_last = entry.finish_reason is not None
        self._sequence.finish_reason = FinishReason(entry.finish_reason) if is_last else None
        emitted = TokensEmitted(self._sequence, entry.token_ids, entry.logprobs, is_last)
        self.text += "".join(delta.text for delta in self._reply._take([emitted]))


@dataclass(slots=True)
class Generation:
    """One sequence, as far as it is, and what has come of it."""

    seq_id: int
    prompt: list[int]
    sampling: SamplingParams
    reply: Reply
    num_steps_before: int = 0
    """Steps of others before it arrives."""
    prediction: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    records: list[list[int]] = field(default_factory=list)
    """Blocks of each; empty: the model keeps none."""
    valid_record: int = 0
    kept_record: int | None = None
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    """The bytes of its valid record, by the number of computed tokens."""
    num_computed: int = 0
    generation: int = 0
    reason: str | None = None
    num_accepted: int = 0
    num_refused: int = 0

    @property
    def result(self) -> tuple[object, ...]:
        """What must be equal."""
        ids = [each.top_ids for each in self.logprobs]
        return self.outputs, ids, self.reason, self.reply.text

    @property
    def values(self) -> torch.Tensor:
        """All its log-probabilities."""
        values = [[each.logprob, *each.top_logprobs] for each in self.logprobs]
        return torch.tensor(values)

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
            records=Records(self.records, self.valid_record, [], [], BLOCK_SIZE, self.kept_record)
            if self.records
            else None,
        )

    def restart(self) -> None:
        """Forget what is computed."""
        self.num_computed, self.valid_record, self.kept_record = 0, 0, None

    def note_record(self, pool: torch.Tensor, entry) -> None:
        """Note the record that holds after a step, as the daemon and this test do."""
        self.valid_record = entry.valid_record
        if self.num_computed % BLOCK_SIZE == 0:
            self.kept_record = self.valid_record
        self.states[self.num_computed] = pool[self.records[self.valid_record]].view(torch.uint8)

    def take(self, entry) -> bool:
        """Take what a step reports; return whether a stop string has come with it."""
        had_ended = self.reason is not None
        self.outputs += entry.token_ids
        self.logprobs += entry.logprobs
        self.num_computed = entry.num_computed_tokens
        self.reason = entry.finish_reason or self.reason
        if entry.num_drafted:
            self.num_accepted += len(entry.token_ids) - 1
            self.num_refused += entry.num_drafted - len(entry.token_ids) + 1
        self.reply.read(entry)
        kept = self.reply.num_kept
        if kept is None or had_ended:
            return False
        self.reason = "stop string"
        del self.outputs[kept:], self.logprobs[kept:]
        return entry.finish_reason is None


class Model:
    """A checkpoint, served with and without speculation, in a pool of each."""

    def __init__(self, folder: Path, kind: Kind = KINDS["dense"]) -> None:
        checkpoint = Checkpoint.open(_made(folder, kind))
        self.config, self.tokenizer = checkpoint.config, Tokenizer.from_folder(checkpoint.folder)
        self.kv_dtype = kind.dtype if kind.kv_dtype == "auto" else kind.kv_dtype
        panels = panels_layout(checkpoint, kind.dtype, kind.weights)
        layout = panels or weights_layout(checkpoint, kind.dtype, can_widen=True)
        arena = None if layout is None else mmap.mmap(-1, layout.num_bytes)
        weights = load_weights(
            checkpoint,
            kind.dtype,
            arena,
            None if arena is None else (0, 1),
            lambda *_: None,
            is_packed=panels is not None,
            weights=kind.weights,
        )
        self.transformer = Transformer(self.config, weights, kind.dtype, None, BLOCK_SIZE)
        self.record_blocks = self.config.record_blocks(BLOCK_SIZE, self.kv_dtype)
        assert self.transformer.keeps_row_bits
        ends = self.config.eos_token_ids
        self.grammars = Grammars(
            lambda: GrammarTokenizer(self.tokenizer, self.config.vocab_size, ends)
        )

    def check(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare logits' or KV's values: where rows keep their bits, these."""
        assert ours.equal(theirs)

    def pool(self) -> torch.Tensor:
        shape = block_shape(self.config, BLOCK_SIZE, self.kv_dtype)
        num_blocks = NUM_BLOCKS + MAX_GROUP * 3 * self.record_blocks
        return torch.zeros(num_blocks, *shape, dtype=TORCH_DTYPES[self.kv_dtype])

    def records(self, seq_id: int) -> list[list[int]]:
        """Return the blocks of a sequence's three records, behind those of all tables."""
        size = self.record_blocks
        first = NUM_BLOCKS + (seq_id - 1) * 3 * size
        starts = range(first, first + 3 * size, size) if size else ()
        return [list(range(start, start + size)) for start in starts]

    def values(self, pool: torch.Tensor) -> torch.Tensor:
        """Return what a pool means, [num_blocks, num_layers, 2, block_size, heads, head_dim]."""
        if pool.dtype != torch.int8:
            return pool
        codes, scales = planes(pool, self.config.num_kv_heads, self.config.head_dim)
        return codes * scales.transpose(-1, -2)[..., None]

    def worker(self, pool: torch.Tensor, most: int | None, *, speculates: bool) -> Harness:
        size = self.config.vocab_size
        return Harness(
            Runner(self.transformer, pool, BLOCK_SIZE, self.grammars),
            pool,
            eos_token_ids=self.config.eos_token_ids,
            max_num_batched_tokens=64,
            speculation=Speculation(size, BLOCK_SIZE, most) if speculates else None,
        )


def _made(folder: Path, kind: Kind) -> Path:
    """Make a checkpoint; return its path."""
    shape = SHAPE if kind.made or kind.weights != AS_STORED else {}
    plain = make_checkpoint(folder / "plain", kind.family, **shape)
    if kind.made[:1] == "Q":
        return write_gguf(plain, folder / "model.gguf", kind.made)
    return write_quantised(plain, kind.made, folder)[0] if kind.made else plain


def drawn_sampling(rng: random.Random, seed: int) -> SamplingParams:
    """Draw what a request may ask for."""
    extras = rng.choice(
        [
            {},
            {"temperature": 0.0},
            {"temperature": 0.0, "repetition_penalty": 2.0},
            {"top_p": 0.8, "top_k": 20},
            {"min_p": 0.05, "temperature": 1.5},
            {"presence_penalty": 2.0, "frequency_penalty": 2.0},
            {"grammar": rng.choice(GRAMMARS), "temperature": rng.choice([0.0, 1.0])},
            {"bad_words": ((65,), (70, 71), (80, 81, 82)), "min_tokens": 9},
            {"allowed_token_ids": tuple(range(64, 90)), "temperature": 0.5},
            {"logit_bias": {65: 4.0}, "stop_token_ids": (66, 67)},
        ]
    )
    logprobs = rng.choice([None, None, 2])
    ends = {"max_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.7}
    return SamplingParams(**({"seed": seed, "logprobs": logprobs} | ends | extras))


def drawn_stop(rng: random.Random) -> list[str]:
    """Draw stop strings, of which some come."""
    count, size = rng.choice([(0, 1), (0, 1), (6, 1), (16, 2)])
    return [
        "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(1, size)))
        for _ in range(count)
    ]


def drawn_group(rng: random.Random, number: int, tokenizer: Tokenizer) -> list[Generation]:
    """Draw a prompt with one or more answers, each with a seed of its own."""
    piece = [rng.randint(40, 120) for _ in range(rng.randint(2, 12))]
    prompt = piece * rng.randint(1, 6)
    group = []
    for index in range(rng.choice([1, 1, 2, 4, MAX_GROUP])):
        sampling = drawn_sampling(rng, number * 100 + index)
        reply = Reply(tokenizer, prompt, sampling, drawn_stop(rng))
        late = rng.choice([0, 0, rng.randint(1, 6)])
        group.append(Generation(index + 1, list(prompt), sampling, reply, late))
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
    for one in group:
        one.records = model.records(one.seq_id)
    for what in [*interruptions, "end"]:
        worker = model.worker(pool, most, speculates=speculates)
        by_id, num_steps = {one.seq_id: one for one in group}, 0
        coming = [one for one in group if one.reason is None]
        while coming or worker.worker._running:
            if what not in ("move", "end") and num_steps == 4:
                break
            for one in [each for each in coming if each.num_steps_before <= num_steps]:
                coming.remove(one)
                until = one.sampling.max_tokens
                if what == "move":
                    until = min(until, len(one.outputs) + 3)
                if len(one.outputs) < until:
                    worker.tell(one.admit(list(tables[one.seq_id]), until))
            for report in worker.step() if worker.worker._running else ():
                for entry in report.entries:
                    one = by_id[entry.seq_id]
                    must_stop = one.take(entry)
                    if one.records:
                        one.note_record(pool, entry)
                    if must_stop:
                        worker.tell(Release(one.seq_id, one.generation, "stopped"))
            num_steps += 1
        worker.close()
        if what == "preemption":
            for one in group:
                if one.reason is None:
                    one.restart()
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


def compare(model: Model, number: int) -> Counter[str]:
    """Run one group both ways; return counts of sequences, tokens and interruptions.

    Raises:
        AssertionError: anything differs.
    """
    rng = random.Random(number)
    plain, group = (drawn_group(random.Random(number), number, model.tokenizer) for _ in range(2))
    interruptions = rng.choice([[], [], ["move"], ["kill", "move"], ["preemption", "kill"]])
    pool = model.values(run(model, plain, interruptions, None, speculates=False))
    for one, other in zip(plain, group, strict=True):
        other.prediction = guessed(rng, one.outputs)
    most = rng.choice([1, 3, 7, 7, None])
    other_pool = model.values(run(model, group, interruptions, most, speculates=True))
    assert [one.result for one in group] == [one.result for one in plain], number
    for a, b in zip(plain, group, strict=True):
        model.check(a.values, b.values)
    num_common = [min(a.num_computed, b.num_computed) for a, b in zip(plain, group, strict=True)]
    for a, b, common in zip(plain, group, num_common, strict=True):
        assert b.reason is not None, number
        assert all(state.equal(a.states[at]) for at, state in b.states.items() if at in a.states)
        num_borders = common // BLOCK_SIZE - len(b.prompt) // BLOCK_SIZE
        borders = [at for at in b.states if len(b.prompt) < at <= common and at % BLOCK_SIZE == 0]
        assert not b.records or len(borders) == num_borders, number
        a.num_computed = b.num_computed = common
    model.check(written(pool, plain), written(other_pool, group))
    counts = Counter(interruptions)
    counts["equal"] = len(group)
    for one in group:
        counts["accepted"] += one.num_accepted
        counts["refused"] += one.num_refused
        counts["stop strings"] += one.reply.num_kept is not None
    return counts


def main() -> None:
    """Compare so many sequences of each kind of model."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        kernels = load_kernels(sys.argv[2])
        compiled.load_kernels = lambda *_: kernels
    for name, kind in KINDS.items():
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            model, number = Model(Path(folder), kind), 0
            while counts["equal"] < count:
                number += 1
                counts += compare(model, number)
        print(name, *(f"{what} {counts[what]}" for what in COUNTED), sep="; ", flush=True)


if __name__ == "__main__":
    main()
