"""Batches of texts between the steps of sequences, over a real channel."""

import time
from array import array

import pytest
import torch

from engine.wire.messages import Admit, ComputeTexts, Stepped, TextsComputed, UseCores
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker.runner import Sampled
from engine.worker.text_batches import TURN_NS, TextBatches
from tests.worlds.worker_loop import Harness

NUM_PARTS = 4


class FakeTextModel:
    """Each text's result is its number of tokens, after some parts; 13 tokens make no number."""

    def __init__(self):
        self.num_parts = 0

    def compute(self, texts, num_unpooled):
        for _ in range(NUM_PARTS):
            self.num_parts += 1
            yield None
        lengths = [float("nan") if len(text) == 13 else len(text) for text in texts]
        yield torch.tensor(lengths, dtype=torch.float32)[:, None]


class FakeRunner:
    block_size = 16
    num_groups = 1
    is_on_device = False
    grammars = None

    def launch(self, planned, stops=None):
        return planned

    def can_follow(self, planned):
        return False

    def collect(self, planned):
        return [Sampled([7]) for _ in planned]


@pytest.fixture
def model():
    return FakeTextModel()


@pytest.fixture
def harness(model):
    pool = torch.zeros(8, 1, 2, 16, 1, 1)
    made = Harness(FakeRunner(), pool, pool, own_cores=[0], texts={"m": model})
    yield made
    made.close()


def batch(*lengths, number=1):
    return ComputeTexts(number, "m", [[5] * length for length in lengths])


def admit(num_outputs):
    sampling = SamplingParams(max_tokens=num_outputs, seed=0, ignore_eos=True)
    return Admit(1, 1, [3, 4], 2, 0, [1], RunSpec(sampling), num_outputs)


def numbers(report):
    return [list(array("f", result)) for result in report.results]


def test_an_idle_worker_computes_all_that_is_there(harness):
    harness.tell(batch(2, 3), batch(1, number=2))
    first, second = harness.turn()
    assert (first.batch_id, numbers(first)) == (1, [[2], [3]])
    assert (second.batch_id, numbers(second)) == (2, [[1]])
    assert first.started_ns <= first.ended_ns <= second.started_ns
    assert harness.turn() == []


def test_a_sequence_waits_for_one_part_at_most_and_texts_go_on_beside_it(harness, model):
    harness.tell(batch(2), admit(NUM_PARTS + 1))
    reports = []
    for turn in range(1, NUM_PARTS + 1):
        reports += harness.turn()
        assert model.num_parts == turn
    assert all(isinstance(report, Stepped) for report in reports)
    step, texts = harness.turn()
    assert isinstance(step, Stepped)
    assert isinstance(texts, TextsComputed)


def test_a_command_is_taken_after_the_part_that_is_computed(harness, model):
    harness.tell(batch(2))
    harness.daemon.send(admit(1))
    assert harness.turn() == []
    assert model.num_parts == 1


def test_a_parked_worker_computes_none_until_it_has_cores(harness, model):
    harness.tell(UseCores([]), batch(2))
    harness.turn()
    assert model.num_parts == 0
    harness.tell(UseCores([0]))
    assert isinstance(harness.turn()[-1], TextsComputed)


def test_what_is_no_number_fails_alone(harness):
    harness.tell(batch(2, 13, 4))
    (report,) = harness.turn()
    assert numbers(report) == [[2], [], [4]]


def test_other_threads_have_the_core_after_a_part_that_took_long(model):
    gave_way = []
    batches = TextBatches(
        {"m": model}, lambda _: None, None, give_way=lambda: gave_way.append(model.num_parts)
    )

    def has_computed_long():
        if model.num_parts == 2:
            end_ns = time.thread_time_ns() + 2 * TURN_NS
            while time.thread_time_ns() < end_ns:
                pass
        return False

    batches.take(batch(2))
    batches.compute(has_computed_long)
    assert {1, 3} <= set(gave_way)
