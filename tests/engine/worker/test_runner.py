"""Constrained and adjusted sequences through real workers on a tiny model."""

import itertools
import json
import math
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.errors import WorkerFailed
from engine.text.call_syntax import CallSyntax
from engine.text.calls_grammar import calls_grammar
from engine.text.grammar import json_grammar, lark_grammar
from engine.text.grammar_matcher import GrammarTokenizer
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import Admit
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker import runner as runner_file
from engine.worker.grammars import Grammars
from engine.worker.model.draw_rows import draw_by_torch
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from engine.worker.worker_request import WorkerRequest
from tests.checkpoints import load_oracle
from tests.worlds.worker_loop import Harness

BLOCK_SIZE = 16
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -99, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["x", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class Machine:
    """Workers that share a pool, as prefill and decode do; each admit can go to either."""

    def __init__(self, folder, num_workers=2):
        checkpoint = Checkpoint.open(folder)
        config = ModelConfig.from_folder(folder)
        self.tokenizer = Tokenizer.from_folder(folder)
        transformer = Transformer(
            config, load_weights(checkpoint, "float32", None, None, lambda *_: None), "float32"
        )
        self.pool = torch.zeros(
            256, config.num_kv_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim
        )
        self.eos_ids = config.eos_token_ids

        def load_tokenizer():
            return GrammarTokenizer(self.tokenizer, config.vocab_size, self.eos_ids)

        self.workers = [
            Harness(
                Runner(transformer, self.pool, BLOCK_SIZE, Grammars(load_tokenizer)),
                self.pool,
                eos_token_ids=self.eos_ids,
                max_num_batched_tokens=512,
            )
            for _ in range(num_workers)
        ]

    def admit(self, prompt, outputs=(), computed=0, until=None, seq_id=1, **sampling):
        params = SamplingParams(**({"max_tokens": 64, "seed": seq_id} | sampling))
        first_block = 1 + 20 * (seq_id - 1)
        return Admit(
            seq_id=seq_id,
            generation=1,
            token_ids=[*prompt, *outputs],
            num_prompt_tokens=len(prompt),
            num_computed_tokens=computed,
            block_table=list(range(first_block, first_block + 20)),
            spec=RunSpec(params),
            until_output=until or params.max_tokens,
        )

    def run(self, prompt, cuts=(), **options):
        """One sequence, admitted anew (to the next worker) whenever it has so many outputs."""
        outputs, entries, computed = [], [], 0
        for index, until in enumerate([*cuts, None]):
            worker = self.workers[index % len(self.workers)]
            worker.tell(self.admit(prompt, outputs, computed, until, **options))
            new = worker.run()
            entries += new
            outputs += [t for e in new for t in e.token_ids]
            computed = new[-1].num_computed_tokens
            if new[-1].finish_reason:
                break
        return outputs, entries

    def text(self, outputs):
        return self.tokenizer.decode(outputs)

    def close(self):
        for worker in self.workers:
            worker.close()


@pytest.fixture(scope="module")
def machine(tiny_llama):
    machine = Machine(tiny_llama)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def prompt(machine):
    return machine.tokenizer.encode("Say something about blocks. ") * 4


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 5, 9)], ids=["whole", "handoff", "recoveries"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_output_under_a_grammar_parses_wherever_it_is_computed(machine, prompt, cuts, temperature):
    outputs, entries = machine.run(
        prompt, cuts, grammar=json_grammar(POINT), temperature=temperature, ignore_eos=True
    )
    assert entries[-1].finish_reason == "stop"
    assert outputs[-1] in machine.eos_ids
    value = json.loads(machine.text(outputs))
    assert -99 <= value["x"] <= 999
    assert set(value["tags"]) <= {"a", "b"}
    assert outputs == machine.run(
        prompt, grammar=json_grammar(POINT), temperature=temperature, ignore_eos=True
    )[0]  # fmt: skip


def test_required_calls_are_calls(machine, prompt):
    syntax = CallSyntax(begin="<tool_call>\n", end="\n</tool_call>", separator="\n")
    grammar = calls_grammar(
        {"move": POINT}, syntax, special_ids={}, is_required=True, is_parallel=False
    )
    outputs, _ = machine.run(prompt, grammar=grammar, max_tokens=150)
    text = machine.text(outputs)
    call = json.loads(text.removeprefix(syntax.begin).removesuffix(syntax.end))
    assert call["name"] == "move"
    assert set(call["arguments"]) == {"x", "tags"}


def test_sequences_in_one_batch_keep_to_their_own_rules(machine, prompt):
    options = {
        1: {"grammar": json_grammar(POINT)},
        2: {"max_tokens": 12, "ignore_eos": True},
        3: {"max_tokens": 12, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        4: {"max_tokens": 3, "logit_bias": {65: 100.0}, "logprobs": 1},
        5: {"grammar": json_grammar(True), "max_tokens": 8, "presence_penalty": 1.0},
    }
    alone = {i: machine.run(prompt, seq_id=i, **o)[0] for i, o in options.items()}
    worker = machine.workers[0]
    worker.tell(*(machine.admit(prompt, seq_id=i, **o) for i, o in options.items()))
    together = {i: [] for i in options}
    for entry in worker.run():
        together[entry.seq_id] += entry.token_ids
    assert together == alone
    assert alone[4] == [65] * 3


def test_a_grammar_that_cannot_go_on_ends_its_sequence_alone(machine, prompt):
    # as alternatives of one rule they are more than a step may look at
    too_many = lark_grammar("start: " + " | ".join(f'"{i}" "x"' for i in range(3500)))
    broken = lark_grammar("start: nowhere")
    worker = machine.workers[1]
    worker.tell(
        machine.admit(prompt, seq_id=1, grammar=too_many),
        machine.admit(prompt, seq_id=2, grammar=broken),
        machine.admit(prompt, seq_id=3, max_tokens=5, ignore_eos=True),
    )
    ends = {e.seq_id: e for e in worker.run() if e.finish_reason}
    assert [ends[i].finish_reason for i in (1, 2, 3)] == ["error", "error", "length"]
    assert "items" in ends[1].error
    assert "nowhere" in ends[2].error


def test_only_allowed_tokens_come_and_no_bad_words(machine, prompt):
    options = {"max_tokens": 12, "ignore_eos": True}
    free, _ = machine.run(prompt, **options)
    few = machine.run(prompt, allowed_token_ids=(65, 66, 67), **options)[0]
    assert len(few) == 12
    assert {*few} <= {65, 66, 67}
    for cuts in ((), (1,), (2, 5)):
        without_pair = machine.run(prompt, cuts, bad_words=(tuple(free[1:3]),), **options)[0]
        assert without_pair[:2] == free[:2]
        assert without_pair[2] != free[2]
        pairs = itertools.pairwise(without_pair)
        assert tuple(free[1:3]) not in pairs


def test_what_leaves_no_token_ends_its_sequence_alone(machine, prompt):
    worker = machine.workers[1]
    worker.tell(
        machine.admit(prompt, seq_id=1, allowed_token_ids=(65,), bad_words=((65, 65),)),
        machine.admit(prompt, seq_id=2, max_tokens=5, ignore_eos=True),
    )
    entries = worker.run()
    ends = {e.seq_id: e for e in entries if e.finish_reason}
    assert [ends[i].finish_reason for i in (1, 2)] == ["error", "length"]
    assert "`allowed_token_ids` and `bad_words`" in ends[1].error
    assert [e.token_ids for e in entries if e.seq_id == 1] == [[65], []]


def test_the_minimum_keeps_ends_away_and_then_lets_them_come(machine, prompt):
    eos = machine.eos_ids[0]
    options = {"logit_bias": {eos: 100.0}, "max_tokens": 20}
    assert machine.run(prompt, **options)[0] == [eos]
    for cuts in ((), (1,), (1, 4)):
        outputs, entries = machine.run(prompt, cuts, min_tokens=6, **options)
        assert outputs.index(eos) == 6
        assert entries[-1].finish_reason == "stop"


def test_penalties_count_the_same_after_a_recovery(machine, prompt):
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    options |= {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    whole, _ = machine.run(prompt, **options)
    assert machine.run(prompt, (1, 7, 8), **options)[0] == whole
    free, _ = machine.run(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
    assert whole != free


RULES = {
    "drawn": {"temperature": 1.5, "top_p": 0.95},
    "penalised": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "no end too early": {"min_tokens": 9, "logit_bias": {297: 100.0}, "ignore_eos": False},
    "no bad words": {"bad_words": ((65, 66), (67,)), "allowed_token_ids": (65, 66, 67, 68)},
    "a grammar": {"grammar": json_grammar(POINT), "temperature": 2.0},
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(RULES)), st.integers(0, 2**31), st.data())
def test_who_goes_on_at_any_offset_gets_the_tokens_of_who_was_never_cut(
    machine, prompt, rules, seed, data
):
    options = {"max_tokens": 16, "seed": seed, "ignore_eos": True} | RULES[rules]
    whole, ends = machine.run(prompt, **options)
    offset = data.draw(st.integers(1, len(whole) - 1)) if len(whole) > 1 else 0
    options |= {"max_tokens": 16 - offset, "output_offset": offset}
    rest, rest_ends = machine.run([*prompt, *whole[:offset]], **options)
    assert whole[:offset] + rest == whole
    assert rest_ends[-1].finish_reason == ends[-1].finish_reason


def test_without_the_offset_draws_begin_anew(machine, prompt):
    options = {"seed": 3, "temperature": 2.0, "ignore_eos": True}
    whole, _ = machine.run(prompt, max_tokens=16, **options)
    anew, _ = machine.run([*prompt, *whole[:8]], max_tokens=8, **options)
    assert anew != whole[8:]


@pytest.fixture(scope="module")
def expected(machine, prompt, tiny_llama):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        logits = load_oracle(tiny_llama)(ids).logits[0].double().log_softmax(-1)
    return logits[:-1]


def report(entries):
    return [logprob for entry in entries for logprob in entry.prompt_logprobs]


def test_prompt_logprobs_are_transformers(machine, prompt, expected):
    assert len(prompt) > 1
    _, entries = machine.run(prompt, max_tokens=2, prompt_logprobs=3)
    reported = report(entries)
    chosen = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [r.logprob for r in reported] == pytest.approx(chosen.tolist(), abs=1e-3)
    best = expected.topk(3)
    assert [r.top_ids for r in reported] == best.indices.tolist()
    for row, values in zip(reported, best.values.tolist(), strict=True):
        assert row.top_logprobs == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize("computed", [0, 1, 17, 127])
def test_a_recovery_reports_each_prompt_token_once(machine, prompt, computed):
    long_prompt = (prompt * 3)[:180]
    worker = machine.workers[0]
    worker.tell(machine.admit(long_prompt, max_tokens=1, prompt_logprobs=0))
    whole = report(worker.run())
    assert len(whole) == len(long_prompt) - 1
    # what was acknowledged is in the pool; the rest is computed, and reported, again
    worker.tell(machine.admit(long_prompt, computed=computed, max_tokens=1, prompt_logprobs=0))
    again = [r.logprob for r in report(worker.run())]
    assert again == pytest.approx([r.logprob for r in whole[computed:]], abs=1e-4)


def test_prompts_are_reported_only_where_asked_in_a_mixed_batch(machine, prompt):
    worker = machine.workers[0]
    worker.tell(
        machine.admit(prompt[:9], seq_id=1, max_tokens=3, ignore_eos=True),
        machine.admit(prompt, seq_id=2, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
        machine.admit(prompt[:1], seq_id=3, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    )
    counts, tokens = {1: 0, 2: 0, 3: 0}, {1: [], 2: [], 3: []}
    for entry in worker.run():
        counts[entry.seq_id] += len(entry.prompt_logprobs)
        tokens[entry.seq_id] += entry.token_ids
    assert counts == {1: 0, 2: len(prompt) - 1, 3: 0}
    for seq_id, ids in ((1, prompt[:9]), (2, prompt), (3, prompt[:1])):
        alone, _ = machine.run(ids, seq_id=seq_id, max_tokens=3, ignore_eos=True)
        assert tokens[seq_id] == alone


# --------------------------------------------------------------------------------------------------
# Weights that are no numbers.


def runner_of(*steps):
    """A runner over a model whose steps yield these logits, the last ones for ever."""
    told = itertools.chain(steps, itertools.repeat(steps[-1]))
    model = SimpleNamespace(
        config=SimpleNamespace(record_blocks=lambda *_: 0),
        hidden=lambda batch, pool, stops=None: torch.zeros(len(batch.input_ids), 1),
        logits=lambda hidden, batch: torch.tensor([next(told)]),
        forward=lambda batch, pool: torch.tensor([next(told)]),
        draw=draw_by_torch,
    )
    return Runner(model, torch.zeros(1), BLOCK_SIZE, Grammars(None))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_whose_first_step_yields_no_numbers_is_not_served(bad, monkeypatch):
    monkeypatch.setattr(runner_file, "_NUMBERS_PATIENCE_S", 0.02)
    with pytest.raises(WorkerFailed, match="NaN or infinity"):
        runner_of([1.0, bad, 0.0]).warm_up(16, 64)
    monkeypatch.setattr(runner_file, "_NUMBERS_PATIENCE_S", 60.0)
    # what another worker has written there meanwhile is soon gone
    runner_of([bad] * 3, [1.0, 2.0, 0.0]).warm_up(16, 64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_yields_no_numbers_ends_its_sequence_by_a_fault_of_ours(bad, temperature):
    runner = runner_of([bad] * 3)
    asked = WorkerRequest.dummy(3, [0], 0, temperature)
    (result,) = runner.collect(runner.launch([(asked, 3)]))
    assert (result.token_ids, result.is_fault) == ([], True)
    assert "NaN" in result.error
    runner = runner_of([-math.inf, 1.0, -math.inf])  # which some models say of padding
    (result,) = runner.collect(runner.launch([(asked, 3)]))
    assert (result.token_ids, result.error) == ([1], None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prompt_of_which_no_numbers_come_is_not_gone_on_from(machine, prompt, bad):
    """Keys and values of such a token are made finite, and all that follows it looks well."""
    model = machine.workers[0].worker._runner._transformer
    unused = next(i for i in range(300) if i not in prompt)
    expected, _ = machine.run(prompt, max_tokens=4, seq_id=1)
    row = model._embedding.data[unused]
    kept = row.clone()
    row[3] = bad
    try:
        worker = machine.workers[0]
        asked = [*prompt[:40], unused, *prompt[40:]]
        for chunk in (None, 30):  # in one step beside others; in a chunk that samples nothing
            admit = machine.admit(asked, seq_id=2, max_tokens=4)
            admit = msgspec.structs.replace(admit, max_chunk_tokens=chunk)
            worker.tell(machine.admit(prompt, seq_id=1, max_tokens=4), admit)
            entries = worker.run()
            failed = [entry for entry in entries if entry.seq_id == 2][-1]
            assert (failed.finish_reason, failed.is_fault, failed.token_ids) == ("error", True, [])
            assert failed.error.endswith("within the prompt")
            assert failed.num_computed_tokens == (0 if chunk is None else 30), "nobody finds more"
            assert [t for e in entries if e.seq_id == 1 for t in e.token_ids] == expected
    finally:
        row.copy_(kept)
