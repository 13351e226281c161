"""The worker's loop over a real channel, with a runner that computes nothing."""

import threading
from concurrent.futures import Future

import msgspec
import pytest
import torch

from engine.errors import ChannelClosed
from engine.wire.messages import (
    Admit,
    Begun,
    Copied,
    Copy,
    CoresUsed,
    Extend,
    Extension,
    FilledBy,
    MeasureSteps,
    Release,
    Stepped,
    StepShape,
    StopMeasuring,
    UseCores,
)
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker.runner import Sampled
from engine.worker.speculation import Speculation
from tests.worlds.worker_loop import Harness, reports_in

BLOCK_SIZE = 4


class FakeRunner:
    """Writes each computed token's position into the pool and samples 100, 101, ..."""

    block_size = BLOCK_SIZE
    num_groups = 1
    is_on_device = True

    def __init__(self, pool):
        self.pool = pool
        self.grammars = self
        self.compilations = []
        self.errors = {}
        """By seq_id: what a step says instead of a token."""
        self.num_more = 0
        """Tokens that a step yields beyond one."""

    def compile(self, grammar):
        self.compilations.append(Future())
        return self.compilations[-1]

    def clear(self, block_ids):
        self.pool[block_ids] = 0

    def launch(self, planned, stops=None):
        return planned

    def can_follow(self, planned):
        return False

    def extended(self, running):
        pass

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
            first = 100 + running.num_output_tokens
            last = first + self.num_more if is_sampled else first - 1
            results.append(Sampled(list(range(first, last + 1))))
        return results


@pytest.fixture
def make():
    harnesses = []

    def make(**options):
        pool = torch.zeros(8, 1, 2, BLOCK_SIZE, 1, 1)
        other = torch.zeros(8, 1, 2, BLOCK_SIZE, 1, 1)
        harnesses.append(Harness(FakeRunner(pool), pool, other, **options))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close()


def admit(seq_id=1, num_tokens=10, until=3, max_tokens=3, computed=0, **sampling):
    return Admit(
        seq_id=seq_id,
        generation=1,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_table=[1, 2, 3, 4],
        spec=RunSpec(SamplingParams(max_tokens=max_tokens, seed=0, **sampling)),
        until_output=until,
    )


def test_a_prompt_goes_in_chunks_and_ends_by_length(make):
    harness = make()
    harness.tell(admit(ignore_eos=True))
    steps = [harness.step()[0].entries[0] for _ in range(4)]
    assert [s.num_computed_tokens for s in steps] == [8, 10, 11, 12]
    assert [s.token_ids for s in steps] == [[], [100], [101], [102]]
    assert [s.finish_reason for s in steps] == [None, None, None, "length"]
    assert [s.released for s in steps] == [None, None, None, "ended"]
    assert harness.step() == []


def test_end_of_text_and_stop_ids_end_a_sequence(make):
    harness = make()
    harness.tell(admit(seq_id=1, num_tokens=4, max_tokens=9, until=9))
    harness.tell(admit(seq_id=2, num_tokens=3, max_tokens=9, until=9, stop_token_ids=(101,)))
    entries = [e for _ in range(3) for e in harness.step()[0].entries]
    ends = {e.seq_id: (e.finish_reason, *e.token_ids) for e in entries if e.released}
    assert ends == {1: ("stop", 102), 2: ("stop", 101)}


def test_a_step_of_several_tokens_goes_as_far_as_the_sequence_does(make):
    harness = make()
    harness.runner.num_more = 2
    harness.tell(admit(seq_id=1, num_tokens=4, max_tokens=4, until=4, ignore_eos=True))
    harness.tell(admit(seq_id=2, num_tokens=3, max_tokens=9, until=9, stop_token_ids=(101,)))
    entries = [e for _ in range(2) for e in harness.step()[0].entries]
    of = {seq_id: [e for e in entries if e.seq_id == seq_id] for seq_id in (1, 2)}
    assert [e.token_ids for e in of[1]] == [[100, 101, 102], [103]]
    assert [e.num_computed_tokens for e in of[1]] == [6, 7]
    assert [e.finish_reason for e in of[1]] == [None, "length"]
    assert [(e.token_ids, e.finish_reason) for e in of[2]] == [([100, 101], "stop")]


def test_until_output_releases_without_ending(make):
    harness = make()
    harness.tell(admit(num_tokens=4, until=1, max_tokens=9))
    (entry,) = harness.step()[0].entries
    assert (entry.token_ids, entry.released, entry.finish_reason) == ([100], "moved", None)


def test_release_is_answered_once_and_only_for_its_generation(make):
    harness = make()
    harness.tell(admit(), Release(1, 7), Release(9, 1))
    assert len(harness.step()[0].entries) == 1
    harness.tell(Release(1, 1), Release(1, 1))
    (report,) = harness.step()
    assert [(e.seq_id, e.released, e.num_scheduled_tokens) for e in report.entries] == [
        (1, "ended", 0)
    ]
    assert report.num_prefill_tokens == 0
    assert harness.step() == []


def copied(harness):
    """Reports up to the last of a copy: (copy, pairs, is_last) of each."""
    reports = []
    while not reports or not reports[-1][2]:
        harness.worker.step()
        found = [r for r in reports_in(harness.sockets[0], 1) if isinstance(r, Copied)]
        reports += [(r.copy_id, r.num_pairs, r.is_last) for r in found]
        assert all(r.error is None for r in found)
    return reports


def test_blocks_are_copied_behind_the_steps_that_fill_them(make):
    harness = make()
    harness.tell(
        admit(until=1), Copy(4, "kv", "other", [(1, 5), (2, 6), (3, 7)], FilledBy(1, 1, 0))
    )
    first, second = harness.step_all(2)
    assert [e.released for e in (*first, *second)] == [None, "moved"]
    assert copied(harness) == [(4, 2, False), (4, 1, True)]
    assert harness.other[5:8].equal(harness.pool[1:4])


def test_a_copy_may_begin_in_the_middle_and_come_after_the_bytes(make):
    harness = make()
    harness.tell(admit(until=1))
    harness.step_all(1)
    harness.tell(Copy(4, "kv", "other", [(2, 6), (3, 7)], FilledBy(1, 1, 1)))
    assert copied_once(harness) == (4, 1, False)
    harness.step_all(1)
    assert copied(harness) == [(4, 1, True)]
    harness.tell(Copy(5, "kv", "other", [(1, 5)], FilledBy(1, 1, 0)))  # it has moved
    assert copied(harness) == [(5, 1, True)]
    assert harness.other[5:8].equal(harness.pool[1:4])


def copied_once(harness):
    harness.worker._copier.work(0)
    (report,) = reports_in(harness.sockets[0], 1)
    return report.copy_id, report.num_pairs, report.is_last


def test_what_a_sequence_has_not_filled_when_it_ends_is_not_copied(make):
    harness = make()
    harness.tell(admit(), Copy(4, "kv", "other", [(1, 5), (2, 6), (3, 7)], FilledBy(1, 1, 0)))
    harness.step_all(1)
    harness.tell(Release(1, 1))
    assert copied(harness) == [(4, 2, False), (4, 0, True)]
    assert not harness.other[7].any()


def test_a_long_copy_is_reported_in_parts(make):
    harness = make()
    pairs = [(1 + i % 6, 1) for i in range(40)]
    harness.tell(Copy(4, "kv", "other", pairs, None))
    assert copied(harness) == [(4, 16, False), (4, 16, False), (4, 8, True)]


def test_a_copy_that_cannot_be_made_says_why(make):
    harness = make()
    harness.tell(Copy(4, "kv", "nowhere", [(1, 1)], None))
    (report,) = harness.step()
    assert (report.num_pairs, report.is_last) == (0, True)
    assert "nowhere" in report.error


def test_an_extended_table_is_used_where_it_is_of_this_admit(make):
    harness = make()
    short = msgspec.structs.replace(admit(num_tokens=4), block_table=[1])
    harness.tell(short, Extend([Extension(1, 2, [6]), Extension(9, 1, [6])]))
    (step,) = harness.step()
    assert step.entries[0].num_computed_tokens == 4
    assert harness.step() == []  # there is no block for more
    harness.tell(Extend([Extension(1, 1, [5])]))
    harness.run()
    assert harness.pool[5, 0, 0, :2].flatten().tolist() == [5, 6]
    assert not harness.pool[6].any()


def test_the_loop_ends_with_the_daemon(make):
    harness = make()
    harness.sockets[0].close()
    with pytest.raises(ChannelClosed):
        harness.worker.run()


class FakePages:
    """Has more to make until the daemon says something."""

    def __init__(self):
        self.used = []
        self.num_made = 0
        self.interrupt = None

    def use(self, block_ids):
        self.used += block_ids

    def make_next(self):
        self.num_made += 1
        if self.num_made == 3:
            self.interrupt()
        return True


def test_an_idle_worker_makes_pages_until_a_command_comes(make):
    pages = FakePages()
    harness = make(pages=pages)
    pages.interrupt = harness.sockets[0].close
    with pytest.raises(ChannelClosed):
        harness.worker.run()
    assert pages.num_made == 3


def test_pages_are_told_of_every_block_that_may_be_written(make):
    pages = FakePages()
    harness = make(pages=pages)
    admitted = msgspec.structs.replace(admit(num_tokens=4), block_table=[1, 2])
    harness.tell(admitted, Extend([Extension(1, 1, [6]), Extension(9, 1, [7])]))
    assert pages.used == [1, 2, 6]


def test_a_parked_worker_makes_no_pages(make):
    pages = FakePages()
    harness = make(pages=pages)
    harness.tell(UseCores([]))
    harness.channel.receive = harness.sockets[0].close  # takes no argument: the loop ends there
    with pytest.raises(TypeError):
        harness.worker.run()
    assert pages.num_made == 0


def test_reports_carry_the_steps_times_and_tokens(make):
    harness = make()
    harness.tell(admit(seq_id=1, num_tokens=2, max_tokens=9, until=9))
    harness.step()
    harness.tell(admit(seq_id=2, num_tokens=5))
    (report,) = harness.step()
    assert isinstance(report, Stepped)
    assert (report.num_decode_tokens, report.num_prefill_tokens) == (1, 5)
    assert 0 < report.started_ns <= report.ended_ns


def test_a_suspect_is_reported_before_its_first_step(make):
    harness = make()
    harness.tell(msgspec.structs.replace(admit(), is_suspect=True), admit(seq_id=2))
    begun, stepped = harness.step()
    assert begun == Begun(1, 1)
    assert isinstance(stepped, Stepped)


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
    assert [e.token_ids for e in harness.step()[0].entries] == [[100]]


def test_a_sequence_without_a_token_ends_in_an_error_and_the_others_go_on(make):
    harness = make()
    harness.runner.errors[1] = "the grammar is too complex"
    harness.tell(admit(seq_id=1, num_tokens=2), admit(seq_id=2, num_tokens=3))
    entries = {e.seq_id: e for e in harness.step()[0].entries}
    assert entries[1].finish_reason == "error"
    assert "grammar" in entries[1].error
    assert entries[1].token_ids == []
    assert entries[1].released
    assert (entries[2].token_ids, entries[2].error) == ([100], None)


def test_with_a_grammar_an_end_of_text_ends_even_if_it_is_to_be_ignored(make):
    harness = make()
    harness.tell(admit(num_tokens=2, max_tokens=9, until=9, grammar="g", ignore_eos=True))
    harness.runner.compilations[0].set_result(None)
    entries = harness.run()
    assert (entries[-1].token_ids, entries[-1].finish_reason) == ([102], "stop")


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


def test_the_step_after_a_handoff_leaves_borrowed_cores_to_their_owner(make):
    harness = make(own_cores=[3])
    harness.worker._max_step_tokens = 16
    long = msgspec.structs.replace(admit(2, num_tokens=90), block_table=[1] * 30)
    harness.tell(UseCores([3, 4]), admit(1, num_tokens=10, until=1), long)
    _, handed_on = harness.step()
    assert [entry.released for entry in handed_on.entries] == ["moved"]
    (on_its_own,), (on_both,) = harness.step(), harness.step()
    assert [step.num_cores for step in (handed_on, on_its_own, on_both)] == [None, 1, None]
    assert harness.cores == [[3, 4], [3], [3, 4]]


def test_a_parked_worker_lets_go_of_what_it_is_told_to_drop(make):
    harness = make()
    harness.tell(admit(), UseCores([]), Release(1, 1))
    _, step = harness.step()
    assert [entry.released for entry in step.entries] == ["ended"]


def test_steps_to_measure_are_made_in_their_blocks_and_a_word_to_stop_has_no_answer(make):
    harness = make()
    harness.tell(MeasureSteps(3, [StepShape(1, 8, 0)], [5, 6], budget_ms=10_000), StopMeasuring())
    (answer,) = harness.reported()
    assert (answer.measurement_id, len(answer.steps)) == (3, 1)
    assert [block for block in range(8) if harness.pool[block].any()] == [5, 6]


class Ahead(FakeRunner):
    """Starts the next step before this one is collected, where it may."""

    may_follow = True

    def can_follow(self, planned):
        return self.may_follow

    def follow(self, planned):
        return planned


class Timed(Speculation):
    """Notes the times that it learns; guesses nothing, and waits where it is told to."""

    def __init__(self):
        super().__init__(300, BLOCK_SIZE)
        self.times_ms, self.is_waiting = [], False

    def waits(self, planned, num_cores):
        return self.is_waiting

    def timed(self, elapsed_ms):
        self.times_ms.append(elapsed_ms)


def test_only_steps_that_followed_at_once_are_timed_where_steps_can_follow(monkeypatch):
    pool, timed = torch.zeros(9, 1, 1, BLOCK_SIZE), Timed()
    harness = Harness(Ahead(pool), pool, speculation=timed)
    clock = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr("engine.worker.loop.time.monotonic_ns", lambda: next(clock))
    harness.tell(admit(1, 2, 30))
    harness.step()
    assert timed.times_ms == []  # the prompt's: nothing was before it
    harness.step()
    assert len(timed.times_ms) == 1
    timed.is_waiting = True
    harness.step()
    assert len(timed.times_ms) == 2  # it had followed the one before
    assert harness.worker._flight is None
    harness.step()
    assert len(timed.times_ms) == 2
    harness.runner.may_follow = False
    harness.step()
    # with the time from the end of the step before: the device had nothing to do meanwhile
    assert len(timed.times_ms) == 3
    assert timed.times_ms[-1] > 1
    harness.close()
