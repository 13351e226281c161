"""Whoever keeps the workers from their cores is named, and idle workers are not starved."""

from __future__ import annotations

import msgspec
import pytest

from appliance.observe.telemetry import starvation
from appliance.observe.telemetry.starvation import Starvation
from appliance.observe.telemetry.thread_times import ThreadTime
from tests.tui.frames import idle, worker


@pytest.fixture
def looked(monkeypatch):
    """Look for some seconds at a worker whose thread gets and waits for so much of each."""

    def look(had, waited, core_percent, seconds=6):
        found, frame, at = Starvation(), worker("decode", cpu_percent=100 * had), [0.0]
        read = {1: ThreadTime(True, 0.0, 0.0)}
        monkeypatch.setattr(starvation, "times_of", lambda _: dict(read))
        host = msgspec.structs.replace(idle().host, core_percents=[0, core_percent])
        for _ in range(seconds):
            at[0] += 1.0
            found.look([frame], host, at[0])
            last = read[1]
            read[1] = ThreadTime(True, last.cpu_s + had, last.waited_s + waited)
        return found, frame

    return look


def test_a_worker_that_waits_for_its_core_beside_others_is_starved(looked):
    found, frame = looked(0.3, 0.7, 100)
    assert frame.cpu_share == pytest.approx(0.3)
    assert "other programs" in found.text
    assert "30%" in found.text
    assert found.starved_ms(0, 99) >= 3000
    assert found.starved_ms(90, 99) == 0


@pytest.mark.parametrize(("had", "waited", "core"), [(1.0, 0.0, 100), (0.02, 0.05, 100)])
def test_one_that_computes_or_wants_little_is_not(looked, had, waited, core):
    assert looked(had, waited, core)[0].text == ""


def test_waits_for_its_own_threads_are_no_starvation(looked):
    assert looked(0.5, 0.5, 50)[0].text == ""
