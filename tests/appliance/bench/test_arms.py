"""Turns and their order; rows with the A/A band first; the drawing."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.bench.arms import Arms
from appliance.bench.comparison import LOAD_METRICS, Metric, rows
from appliance.bench.rounds import AGAIN, interleaved, order
from engine.errors import ConfigError, PenstockError
from tests.worlds.fake_openai import FakeOpenAI

SPEED, GAP = Metric("speed", is_more_better=True), Metric("gap")


def figures(*values: float | None) -> list[dict[str, float | None]]:
    return [{"speed": value, "gap": None if value is None else 1 / value} for value in values]


def test_every_arm_has_one_turn_a_round_and_the_first_has_two() -> None:
    rounds = order(["a", "b", "c"], 20, seed=1)
    assert all(sorted(turns) == [AGAIN, "a", "b", "c"] for turns in rounds)
    assert len({tuple(turns) for turns in rounds}) > 5
    assert rounds == order(["a", "b", "c"], 20, seed=1)


def test_the_band_comes_first_and_judges_the_others() -> None:
    turns = {
        "base": figures(10, 10, 10),
        "quick": figures(20, 21, 19),
        "alike": figures(10.5, 10, 9),
        AGAIN: figures(11, 10, 9.5),
    }
    found = rows(turns, [SPEED, GAP])
    assert [(row["arm"], row["metric"]) for row in found[:4]] == [
        (AGAIN, "speed"),
        (AGAIN, "gap"),
        ("base", "speed"),
        ("base", "gap"),
    ]
    by_name = {(row["arm"], row["metric"]): row for row in found}
    quick = by_name["quick", "speed"]
    assert (quick["median"], quick["low"], quick["high"]) == (20, 19, 21)
    assert (quick["ratio"], quick["ratio_low"], quick["ratio_high"]) == (2, 1.9, 2.1)
    assert quick["band_high"] == pytest.approx(1.1)
    assert [by_name["quick", name]["verdict"] for name in ("speed", "gap")] == ["better"] * 2
    assert by_name["alike", "speed"]["verdict"] == "same"
    assert by_name["base", "speed"]["ratio"] is None
    assert by_name[AGAIN, "speed"]["verdict"] == ""


def test_a_figure_that_nobody_has_is_no_row() -> None:
    turns = {"base": figures(None), AGAIN: figures(None)}
    assert rows(turns, [SPEED, *LOAD_METRICS]) == []


def test_addresses_are_arms_and_names_may_precede(server: FakeOpenAI, tmp_path: Path) -> None:
    specs = [f"mine={server.unix.path}", f"peer={server.tcp}", f"unix://{server.unix.path}"]
    with Arms(specs, model=None) as arms:
        assert arms.labels == ["mine", "peer", f"unix://{server.unix.path}"]
        turns = interleaved(arms, 2, 0, lambda target, label, index: (target.label, label, index))
    assert turns["peer"] == [("peer", "peer", 0), ("peer", "peer", 1)]
    assert turns[AGAIN] == [("mine", AGAIN, 0), ("mine", AGAIN, 1)]
    assert len(server.script.bodies) == 3, "each is warmed up once"


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="same name"):
        Arms(["static", "static"], model=None)


def test_an_arm_that_fails_its_first_request_ends_it(server: FakeOpenAI) -> None:
    server.script.refuse = lambda index: True
    with (
        Arms([str(server.unix)], model=None) as arms,
        pytest.raises(PenstockError, match="the queue is full"),
        arms.ready(arms.labels[0]),
    ):
        pass


def test_a_daemon_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        Arms(["colocated"], model=str(tmp_path / "none")) as arms,
        pytest.raises(PenstockError, match=r"did not start: .*none"),
        arms.ready("colocated"),
    ):
        pass
