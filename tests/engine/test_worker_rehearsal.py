from types import SimpleNamespace

import pytest

from engine.messages import Rehearse
from engine.rehearsal import steps
from engine.workers.rehearsal import rehearse


class BusyMachine:
    """A runner and its clock: a step takes so long to read the weights, and so long a token."""

    block_size = 16

    def __init__(self, base_ms, token_ms):
        self.base_ms, self.token_ms = base_ms, token_ms
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def clear(self, block_ids):
        pass

    def launch(self, planned):
        return planned

    def collect(self, planned):
        num_tokens = sum(count for _, count in planned)
        self.now_s += (self.base_ms + self.token_ms * num_tokens) / 1e3


@pytest.fixture
def rehearsed(monkeypatch):
    def run(base_ms, token_ms, budget_ms=250.0):
        machine = BusyMachine(base_ms, token_ms)
        clock = SimpleNamespace(monotonic=machine.monotonic)
        monkeypatch.setattr("engine.workers.rehearsal.time", clock)
        command = Rehearse(1, steps(512, 8192), list(range(1, 33)), budget_ms)
        return rehearse(machine, command).steps, machine.now_s * 1e3

    return run


@pytest.mark.parametrize("base_ms", [1.0, 5.0, 18.0])
def test_the_largest_chunk_is_reached_also_where_steps_are_slow(rehearsed, base_ms):
    made, took_ms = rehearsed(base_ms, 0.1)
    assert max(step.num_tokens for step in made) == 512
    assert any(step.num_tokens == 1 for step in made)
    assert took_ms <= 250


@pytest.mark.parametrize("token_ms", [0.01, 0.1, 1.0, 10.0])
def test_nothing_is_begun_that_would_not_end_in_time(rehearsed, token_ms):
    made, took_ms = rehearsed(5.0, token_ms)
    first = made[0]
    assert took_ms <= max(250, first.elapsed_ms)
    assert len(made) == len({(s.num_sequences, s.num_tokens, s.num_before) for s in made})
