"""The worker's loop over a real channel, with a runner that computes nothing."""

import threading
from concurrent.futures import Future

import msgspec
import pytest
import torch

from engine.errors import ChannelClosed
from engine.messages import (
    Admit,
    CoresUsed,
    GrantSlots,
    Load,
    Loaded,
    Release,
    Stepped,
    UseCores,
)
from engine.sequence import SamplingParams
from engine.workers.runner import Sampled
from tests.engine.worker_harness import Harness

BLOCK_SIZE = 4


class FakeRunner:
    """Writes each computed token's position into the pool and samples 100, 101, ..."""

    block_size = BLOCK_SIZE

    def __init__(self, pool):
        self.pool = pool
        self.grammars = self
        self.compilations = []
        self.errors = {}
        """By seq_id: what a step says instead of a token."""

    def compile(self, grammar):
        self.compilations.append(Future())
        return self.compilations[-1]

    def launch(self, planned):
        return planned

    def follow(self, planned):
        return None

    def collect(self, planned):
        results = []
        for running, num_new_tokens in planned:
            start, end = running.num_computed_tokens, running.num_computed_tokens + num_new_tokens
            for position in range(start, end):
                block_id = running.block_table[position // BLOCK_SIZE]
                self.pool[block_id, 0, 0, position % BLOCK_SIZE] = position + 1
            is_sampled = end == running.num_tokens
            if is_sampled and running.seq_id in self.errors:
                results.append(Sampled(error=self.errors[running.seq_id]))
                continue
            results.append(Sampled(100 + running.num_output_tokens if is_sampled else None))
        return results


@pytest.fixture
def make():
    harnesses = []

    def make(has_ring=False):
        pool = torch.zeros(8, 1, 2, BLOCK_SIZE, 1, 1)
        ring = torch.zeros(4, 1, 2, BLOCK_SIZE, 1, 1) if has_ring else None
        harnesses.append(Harness(FakeRunner(pool), pool, ring))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close()


def admit(seq_id=1, num_tokens=10, until=3, max_tokens=3, computed=0, stored=None, **sampling):
    return Admit(
        seq_id=seq_id,
        generation=1,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_table=[1, 2, 3, 4],
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
        until_output=until,
        num_stored_blocks=stored,
    )


def test_a_prompt_goes_in_chunks_and_ends_by_length(make):
    harness = make()
    harness.tell(admit(ignore_eos=True))
    steps = [harness.step()[0].entries[0] for _ in range(4)]
    assert [s.num_computed_tokens for s in steps] == [8, 10, 11, 12]
    assert [s.token_id for s in steps] == [None, 100, 101, 102]
    assert [s.finish_reason for s in steps] == [None, None, None, "length"]
    assert [s.is_released for s in steps] == [False, False, False, True]
    assert harness.step() == []


def test_end_of_text_and_stop_ids_end_a_sequence(make):
    harness = make()
    harness.tell(admit(seq_id=1, num_tokens=4, max_tokens=9, until=9))
    harness.tell(admit(seq_id=2, num_tokens=3, max_tokens=9, until=9, stop_token_ids=(101,)))
    entries = [e for _ in range(3) for e in harness.step()[0].entries]
    ends = {e.seq_id: (e.finish_reason, e.token_id) for e in entries if e.is_released}
    assert ends == {1: ("stop", 102), 2: ("stop", 101)}


def test_until_output_releases_without_ending(make):
    harness = make()
    harness.tell(admit(num_tokens=4, until=1, max_tokens=9))
    (entry,) = harness.step()[0].entries
    assert (entry.token_id, entry.is_released, entry.finish_reason) == (100, True, None)


def test_release_is_answered_once_and_only_for_its_generation(make):
    harness = make()
    harness.tell(admit(), Release(1, 7), Release(9, 1))
    assert len(harness.step()[0].entries) == 1
    harness.tell(Release(1, 1), Release(1, 1))
    (report,) = harness.step()
    assert [(e.seq_id, e.is_released, e.num_scheduled_tokens) for e in report.entries] == [
        (1, True, 0)
    ]
    assert report.num_prefill_tokens == 0
    assert harness.step() == []


def test_finished_blocks_are_stored_as_far_as_slots_last(make):
    harness = make(has_ring=True)
    harness.tell(GrantSlots([2]), admit(until=1, stored=0))
    first, second = (harness.step()[0].entries[0] for _ in range(2))
    assert [(s.slot, s.block_index) for s in first.stored] == [(2, 0)]
    assert second.token_id == 100
    assert not second.is_released  # two blocks are still here
    assert harness.step() == []
    harness.tell(GrantSlots([1, 3]))
    (entry,) = harness.step()[0].entries
    assert [(s.slot, s.block_index) for s in entry.stored] == [(1, 1), (3, 2)]
    assert entry.is_released
    for slot, block_id in ((2, 1), (1, 2), (3, 3)):
        assert harness.ring[slot].equal(harness.pool[block_id])


def test_a_recovered_sequence_that_only_has_to_store_goes_on_storing(make):
    harness = make(has_ring=True)
    stored = admit(num_tokens=9, until=1, max_tokens=5, computed=8, stored=1)
    stored = Admit(
        **{f: getattr(stored, f) for f in stored.__struct_fields__} | {"num_prompt_tokens": 8}
    )
    harness.tell(stored, GrantSlots([1]))
    (entry,) = harness.step()[0].entries
    assert [(s.slot, s.block_index) for s in entry.stored] == [(1, 1)]
    assert entry.is_released
    assert entry.token_id is None


def test_a_load_fills_blocks_from_the_ring(make):
    harness = make(has_ring=True)
    harness.ring[2] = 7.0
    harness.tell(Load(5, [2], [6]))
    (report,) = harness.reported()
    assert isinstance(report, Loaded)
    assert report.load_id == 5
    assert report.num_bytes == harness.pool[0].numel() * 4
    assert harness.pool[6].eq(7.0).all()


def test_the_loop_ends_with_the_daemon(make):
    harness = make()
    harness.sockets[0].close()
    with pytest.raises(ChannelClosed):
        harness.worker.run()


def test_reports_carry_the_steps_times_and_tokens(make):
    harness = make()
    harness.tell(admit(seq_id=1, num_tokens=2, max_tokens=9, until=9))
    harness.step()
    harness.tell(admit(seq_id=2, num_tokens=5))
    (report,) = harness.step()
    assert isinstance(report, Stepped)
    assert (report.num_decode_tokens, report.num_prefill_tokens) == (1, 5)
    assert 0 < report.started_ns <= report.ended_ns


def test_a_sequence_waits_for_its_grammar_and_holds_up_no_other(make):
    harness = make()
    harness.tell(admit(seq_id=1, num_tokens=2, grammar="g"), admit(seq_id=2, num_tokens=3, until=9))
    assert [e.seq_id for e in harness.step()[0].entries] == [2]
    harness.runner.compilations[0].set_result(None)
    assert [e.seq_id for e in harness.step()[0].entries] == [2, 1]


def test_where_there_is_nothing_else_the_step_waits_for_the_grammar(make):
    harness = make()
    harness.tell(admit(num_tokens=2, grammar="g"))
    threading.Timer(0.05, harness.runner.compilations[0].set_result, [None]).start()
    assert [e.token_id for e in harness.step()[0].entries] == [100]


def test_a_sequence_without_a_token_ends_in_an_error_and_the_others_go_on(make):
    harness = make()
    harness.runner.errors[1] = "the grammar is too complex"
    harness.tell(admit(seq_id=1, num_tokens=2), admit(seq_id=2, num_tokens=3))
    entries = {e.seq_id: e for e in harness.step()[0].entries}
    assert entries[1].finish_reason == "error"
    assert entries[1].error == "the grammar is too complex"
    assert entries[1].token_id is None
    assert entries[1].is_released
    assert (entries[2].token_id, entries[2].error) == (100, None)


def test_with_a_grammar_an_end_of_text_ends_even_if_it_is_to_be_ignored(make):
    harness = make()
    harness.tell(admit(num_tokens=2, max_tokens=9, until=9, grammar="g", ignore_eos=True))
    harness.runner.compilations[0].set_result(None)
    entries = harness.run()
    assert (entries[-1].token_id, entries[-1].finish_reason) == (102, "stop")


def test_prompt_tokens_to_be_reported_on_come_in_small_steps(make):
    harness = make()
    harness.worker._max_step_tokens = 1000
    admitted = admit(num_tokens=300, prompt_logprobs=0, ignore_eos=True)
    harness.tell(msgspec.structs.replace(admitted, block_table=[1] * 80))
    steps = [harness.step()[0].entries[0].num_scheduled_tokens for _ in range(4)]
    assert steps == [128, 128, 44, 1]


def test_a_parked_worker_keeps_what_it_is_given_and_computes_nothing(make):
    harness = make()
    harness.tell(UseCores([]), admit())
    assert harness.step() == [CoresUsed([])]
    assert harness.step() == []
    harness.tell(UseCores([3, 4]))
    answer, step = harness.step()
    assert answer == CoresUsed([3, 4])
    assert step.num_prefill_tokens
    assert harness.cores == [[3, 4]]


def test_a_parked_worker_lets_go_of_what_it_is_told_to_drop(make):
    harness = make()
    harness.tell(admit(), UseCores([]), Release(1, 1))
    _, step = harness.step()
    assert [entry.is_released for entry in step.entries] == [True]
