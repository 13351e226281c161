"""Workers of two processes: answers as of one process, and any process's death is nobody's loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.fleet.placement import available_cores, cpu_names
from tests.daemons import ALONE, Daemon, is_alive

PROMPTS = [[(5 * i + 3 * j) % 280 + 5 for j in range(70 + 40 * i)] for i in range(3)]
CORES = available_cores()
TWO = f"{CORES[0]}+{CORES[-1]}"


def answers(daemon: Daemon) -> list[list[int]]:
    replies = [daemon.complete(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    return [list(reply["choices"][0]["token_ids"]) for reply in replies]


def pids(daemon: Daemon, name: str) -> list[int]:
    """The processes of a worker that is up, the first before the others."""

    def found() -> list[int] | None:
        (worker,) = (each for each in daemon.state()["workers"] if each["name"] == name)
        return [worker["pid"], *worker["other_pids"]] if worker["state"] == "ready" else None

    return list(daemon.wait_for(found))


@pytest.fixture(scope="module")
def by_one(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    daemon = Daemon(tmp_path_factory.mktemp("one"), *ALONE, model=tiny_llama)
    try:
        return answers(daemon.wait_ready())
    finally:
        daemon.stop()


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    place = f"colocated={TWO} forced"
    daemon = Daemon(tmp_path_factory.mktemp("group"), *ALONE, "--place", place, model=tiny_llama)
    yield daemon.wait_ready()
    assert daemon.stop() == 0


def test_a_worker_of_two_processes_answers_as_one_does(
    alone: Daemon, by_one: list[list[int]]
) -> None:
    assert answers(alone) == by_one
    (worker,) = alone.fresh_state()["workers"]
    first, last = (cpu_names((cpu,)).removeprefix("cpu ") for cpu in (CORES[0], CORES[-1]))
    assert worker["device"] == f"cpu {first}+{last}"
    assert len(pids(alone, "colocated")) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_either_process_is_that_of_both_and_streams_go_on(
    alone: Daemon, rank: int
) -> None:
    draw = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    expected = alone.complete(PROMPTS[0], **draw)["choices"][0]["token_ids"]
    both, begun, tokens = pids(alone, "colocated"), threading.Event(), list[int]()

    def read() -> None:
        for event in alone.stream(PROMPTS[0], **draw):
            tokens.extend(event["choices"][0]["token_ids"])
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    os.kill(both[rank], signal.SIGKILL)
    reader.join(120)
    assert tokens == expected
    assert not any(is_alive(pid) for pid in both)
    assert not set(pids(alone, "colocated")) & set(both)
    alone.assert_all_free()


@pytest.mark.parametrize("transport", ["alias", "shm"])
def test_groups_hand_over_to_each_other(
    tiny_llama: Path, tmp_path: Path, by_one: list[list[int]], transport: str
) -> None:
    place = f"prefill={TWO} decode={TWO} forced"
    settings = ("--roles", "static", "--transport", transport, "--place", place)
    daemon = Daemon(tmp_path, *settings, model=tiny_llama)
    try:
        daemon.wait_ready()
        assert answers(daemon) == by_one
        assert {row["transport"] for row in daemon.log_rows()} == {transport}
        for name in ("prefill", "decode"):
            both = pids(daemon, name)
            os.kill(both[1], signal.SIGKILL)
            daemon.wait_for(lambda both=both: not any(is_alive(pid) for pid in both))
            assert answers(daemon) == by_one
        daemon.assert_all_free()
    finally:
        daemon.stop()
