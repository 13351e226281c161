"""Steps that are only timed: whole or in part, and left at the next half of a layer."""

from dataclasses import dataclass, field

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.messages import MeasureSteps, StepShape
from engine.worker import measuring
from engine.worker.grammars import Grammars
from engine.worker.measuring import MAX_HALF_MS, StepMeasuring
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from tests.checkpoints import make_checkpoint

PROMPT, DECODE = StepShape(1, 64, 0), StepShape(2, 1, 20)


@dataclass
class FakeClock:
    now_s: float = 100.0

    def monotonic(self):
        return self.now_s


@dataclass
class LayeredRunner:
    """Ten layers; each half takes so long, all of them together where nothing asks between."""

    clock: FakeClock
    half_ms: float = 1.0
    block_size: int = 16
    num_groups: int = 1
    is_on_device: bool = False
    num_layers: int = 10
    deep_ms: float = 0.0
    """Of each half, besides, for every position before the step."""
    top_ks: set[int] = field(default_factory=set)
    replayed: list[bool] = field(default_factory=list)
    """Of each step, if it was launched in one."""
    num_halves: int = 0

    def clear(self, block_ids):
        pass

    def launch(self, planned, stops=None):
        self.replayed.append(stops is None)
        self.top_ks |= {request.sampling.top_k for request, _ in planned}
        num_before = planned[0][0].num_computed_tokens
        for number in range(1, 21):
            self.clock.now_s += (self.half_ms + self.deep_ms * num_before) / 1e3
            self.num_halves += 1
            if stops is not None and stops(number, 20):
                break
        return planned

    def collect(self, planned):
        return []


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(measuring, "time", fake)
    return fake


def measured(runner, shapes, *, is_interrupted=lambda: False, budget_ms=10_000.0, measuring=None):
    measuring = measuring or StepMeasuring(runner, is_interrupted)
    return measuring.measure(MeasureSteps(1, shapes, [3, 4], budget_ms))


def test_a_short_step_is_made_whole(clock):
    runner = LayeredRunner(clock)
    (step,) = measured(runner, [PROMPT]).steps
    assert step.elapsed_ms == pytest.approx(20)
    assert (step.num_sequences, step.num_tokens, step.num_before) == (1, 64, 0)


def test_a_long_one_is_told_from_some_of_its_layers(clock):
    runner = LayeredRunner(clock, half_ms=30)
    (step,) = measured(runner, [PROMPT]).steps
    assert step.elapsed_ms == pytest.approx(600)
    assert runner.num_halves == 4


def test_a_command_ends_it_within_half_a_layer_and_the_step_does_not_count(clock):
    runner = LayeredRunner(clock)
    commands = iter([False] * 10)
    report = measured(runner, [PROMPT] * 5, is_interrupted=lambda: next(commands, True))
    assert runner.num_halves <= 10
    assert report.steps == []


def test_short_decodes_are_replayed_whole_once_it_is_known_that_they_are_short(clock):
    runner = LayeredRunner(clock)
    measured(runner, [DECODE, DECODE])
    assert runner.replayed == [False, True, True]


def test_long_decodes_can_be_left_in_the_middle(clock):
    runner = LayeredRunner(clock, half_ms=5)
    measured(runner, [DECODE, DECODE])
    assert runner.replayed == [False] * 2


def test_prompts_whose_layers_are_too_long_are_left_out(clock):
    runner = LayeredRunner(clock, half_ms=MAX_HALF_MS * 0.9)
    shapes = [StepShape(1, 64, 0), StepShape(1, 512, 0), StepShape(1, 16, 0)]
    report = measured(runner, shapes)
    assert [step.num_tokens for step in report.steps] == [64, 16]
    assert report.too_long == [shapes[1]]


def test_a_deep_prompt_leaves_out_no_shallow_one(clock):
    runner = LayeredRunner(clock, half_ms=5, deep_ms=0.02)
    shapes = [StepShape(1, 64, 0), StepShape(1, 64, 1000), StepShape(1, 256, 0)]
    report = measured(runner, [*shapes, StepShape(1, 256, 1000)])
    assert [step.num_tokens for step in report.steps] == [64, 64, 256]
    assert report.too_long == [StepShape(1, 256, 1000)]


def test_no_draw_sorts_the_whole_vocabulary(clock):
    runner = LayeredRunner(clock)
    measured(runner, [PROMPT, DECODE])
    assert runner.top_ks == {measuring.TOP_K}


def test_without_time_nothing_is_made(clock):
    report = measured(LayeredRunner(clock), [PROMPT], budget_ms=0.0)
    assert (report.measurement_id, report.steps) == (1, [])


def test_the_budget_ends_it_between_steps(clock):
    assert len(measured(LayeredRunner(clock), [PROMPT] * 50, budget_ms=100).steps) == 5


def test_a_device_makes_whole_steps(clock):
    runner = LayeredRunner(clock, half_ms=30, is_on_device=True)
    (step,) = measured(runner, [PROMPT]).steps
    assert (step.elapsed_ms, runner.replayed) == (pytest.approx(600), [True])


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", "float32")
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
    shape = 8, config.num_kv_layers, 2, 16, config.num_kv_heads, config.head_dim
    return Runner(
        Transformer(config, weights, "float32"), torch.zeros(shape), 16, Grammars(lambda: None)
    )


def test_a_real_model_is_timed_in_the_blocks_that_it_was_given(runner):
    shapes = [StepShape(1, 20, 0), StepShape(2, 1, 20), StepShape(1, 4, 30)]
    report = measured(runner, shapes)
    assert [(s.num_sequences, s.num_tokens, s.num_before) for s in report.steps] == [
        (s.num_sequences, s.num_tokens, s.num_before) for s in shapes
    ]
    assert all(step.elapsed_ms > 0 for step in report.steps)
    assert [block for block in range(8) if runner._pool[block].any()] == [3, 4]


def test_a_real_step_asks_after_each_half_layer_and_stops_where_it_is_told_to(runner):
    asked = []

    def is_interrupted():
        asked.append(True)
        return len(asked) == 2

    layers = StepMeasuring(runner, is_interrupted)
    assert layers._run(PROMPT, [3], is_whole=False) is None
    assert len(asked) == 2
    asked += [True] * 9
    assert layers._run(PROMPT, [3], is_whole=False) > 0
    assert len(asked) == 2 + 9 + 2 * runner.num_layers
