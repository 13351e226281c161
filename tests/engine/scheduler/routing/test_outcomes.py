"""What came of a prediction is compared with it, and closes a route that was far off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.routing.elastic import Forecast, PredictionKind
from engine.scheduler.routing.outcomes import ANEW_STEPS, Outcomes
from engine.scheduler.routing.worker_routes import Pair
from engine.wire.messages import SequenceStep, Stepped

BESIDE = PredictionKind(Pair("decode", "decode"), is_beside=True, num_cores=2, size=10)
ALONE = PredictionKind(Pair("decode", "decode"), is_beside=False, num_cores=2, size=10)
MOVED = PredictionKind(Pair("prefill", "decode"), is_beside=True, num_cores=2, size=10)


class Judged:
    """Outcomes of prompts of 400 tokens in steps of 100, on two cores; 40 ms and gaps of 10."""

    def __init__(self):
        self.num_measured = 0
        self.outcomes = Outcomes(lambda kind: self.num_measured)
        self.now_ns = 0

    def begin(self, kind, seq_id=1, waited_ms=0.0):
        self.outcomes.begin(
            seq_id,
            Forecast(kind, 50.0, 40.0, 10.0, 11.0, 1.0, 1.0, promise_ms=12.0),
            num_tokens=400,
            waited_ms=waited_ms,
            at_ns=self.now_ns,
        )

    def step(self, worker, ms, computed=None, *, is_last=False, others=0, num_cores=2, seq_id=1):
        entries = [entry(90 + n, 500, 1) for n in range(others)]
        if computed is not None:
            entries.append(entry(seq_id, computed, 100, token_ids=[5] if is_last else []))
        self.now_ns += int(ms * 1e6) + 1000
        step = Stepped(self.now_ns - int(ms * 1e6), self.now_ns, 0, others, entries)
        return self.outcomes.stepped(worker, step, num_cores)

    def prompt(self, kind, ms, *, others=0, num_cores=2):
        """All of one; the outcome of its last step."""
        self.begin(kind)
        for computed in (100, 200, 300, 400):
            came = self.step(
                "decode", ms, computed, is_last=computed == 400, others=others, num_cores=num_cores
            )
            if came:
                return came[0]
        return None


def entry(seq_id, num_computed_tokens, num_scheduled_tokens, token_ids=()):
    is_decoding = num_scheduled_tokens == 1
    return SequenceStep(
        seq_id, 1, num_computed_tokens, [*token_ids], [], None, None, num_scheduled_tokens, 0,
        is_decoding,
    )  # fmt: skip


@pytest.fixture
def judged():
    return Judged()


def test_a_prompt_that_went_as_predicted_is_judged_and_its_way_stays_open(judged):
    outcome = judged.prompt(BESIDE, 10, others=2)
    assert (outcome.seq_id, outcome.yields) == (1, False)
    assert "40 ms and ITL 10.0 ms" in outcome.about
    record = judged.outcomes.records[BESIDE]
    assert (record.num_judged, record.num_missed) == (1, 0)
    assert record.error == pytest.approx(0, abs=0.01)
    assert not judged.outcomes.closed()


def test_one_twice_as_bad_is_counted_and_closes_its_way_until_measured_anew(judged):
    judged.num_measured = 20
    outcome = judged.prompt(ALONE, 21)
    assert "far slower" in outcome.about
    assert judged.outcomes.records[ALONE].num_missed == 1
    assert judged.outcomes.closed() == {ALONE}
    judged.num_measured += ANEW_STEPS - 1
    assert judged.outcomes.closed() == {ALONE}
    judged.num_measured += 1
    assert not judged.outcomes.closed()
    assert judged.outcomes.records[ALONE].num_missed == 1, "which stays in the count"


def test_the_static_way_is_counted_and_never_closed(judged):
    judged.begin(MOVED)
    for computed in (100, 200, 300, 400):
        came = judged.step("prefill", 30, computed, is_last=computed == 400)
    assert "far slower" in came[0].about
    assert not judged.outcomes.closed()


def test_gaps_that_exceed_what_was_promised_make_a_prompt_give_way_at_once(judged):
    outcome = judged.prompt(BESIDE, 25, others=2)
    assert outcome.yields
    assert outcome.about.startswith("; yielded after 100 tokens")
    assert judged.outcomes.records[BESIDE].num_gave_way == 1
    assert not judged.step("decode", 25, 200, others=2), "once"


def test_gaps_within_the_promise_are_kept_to(judged):
    assert not judged.prompt(BESIDE, 15, others=2).yields


def test_whoever_begins_to_decode_meanwhile_is_made_way_for_and_blames_nobody(judged):
    judged.begin(ALONE)
    assert not judged.step("decode", 30, 100)
    (outcome,) = judged.step("decode", 30, 200, others=1)
    assert outcome.yields


def test_gaps_of_the_other_worker_count_for_a_prompt_that_moves(judged):
    judged.begin(MOVED)
    for computed in (100, 200, 300):
        judged.step("prefill", 10, computed)
        judged.step("decode", 25, others=2)
    (outcome,) = judged.step("prefill", 10, 400, is_last=True)
    assert "ITL 25.0 ms" in outcome.about
    assert not outcome.yields


def test_on_other_cores_than_presumed_nothing_is_judged(judged):
    outcome = judged.prompt(ALONE, 100, num_cores=1)
    assert outcome.about == "; took 400 ms"
    assert judged.outcomes.records[ALONE].num_judged == 0


def test_what_it_took_has_the_wait_before_it_and_no_route_is_blamed_for_that(judged):
    judged.begin(BESIDE, waited_ms=2000.0)
    (outcome,) = judged.step("decode", 40, 400, is_last=True)
    assert outcome.about == "; took 2040 ms"
    assert judged.outcomes.records[BESIDE].num_missed == 0


def test_a_short_one_is_no_jitter_only_the_second_time(judged):
    for is_closed in (False, True):
        judged.begin(BESIDE)
        judged.step("decode", 100, 400, is_last=True, others=1)
        assert bool(judged.outcomes.closed()) == is_closed


def test_what_is_forgotten_has_no_outcome(judged):
    judged.begin(ALONE)
    judged.outcomes.stop_judging(1)
    judged.outcomes.stop_judging(1)
    assert not judged.step("decode", 500, 400, is_last=True)
    assert not judged.outcomes.records


@given(st.lists(st.tuples(st.floats(0.01, 1000), st.integers(0, 3)), max_size=30))
def test_every_prompt_has_one_outcome_and_records_add_up(steps):
    judged, num_outcomes = Judged(), 0
    for index, (ms, others) in enumerate(steps):
        judged.begin(BESIDE, seq_id=index)
        came = judged.step("decode", ms, 400, is_last=True, others=others, seq_id=index)
        num_outcomes += len(came)
    record = judged.outcomes.records.get(BESIDE)
    assert num_outcomes == len(steps)
    if record is not None:
        assert 0 <= record.num_missed <= record.num_judged <= len(steps)
        assert 0 <= record.error < 2
