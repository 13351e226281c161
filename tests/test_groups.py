"""Workers of two processes: answers as of one process, and any process's death is nobody's loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.fleet.placement import available_cores, cpu_names
from tests.appliance.cli_process import penstock, user_environ
from tests.appliance.large_model import make_large
from tests.checkpoints import load_oracle, make_checkpoint
from tests.daemons import ALONE, Daemon, is_alive
from tests.quantised_checkpoints import SHAPE, write_quantised
from tests.test_exactness import assert_all_same, prompts

PROMPTS = [[(5 * i + 3 * j) % 280 + 5 for j in range(70 + 40 * i)] for i in range(3)]
CORES = available_cores()
ONE, TWO = f"{CORES[-1]}", f"{CORES[0]}+{CORES[-1]}"


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
    ranks = worker["ranks"]
    assert [rank["cpus"] for rank in ranks] == [[CORES[0]], [CORES[-1]]]
    assert [rank["pid"] for rank in ranks] == pids(alone, "colocated")
    assert all(rank["rss_bytes"] > 0 and 0 <= rank["wait_ratio"] <= 1 for rank in ranks)
    assert len(pids(alone, "colocated")) == 2
    metrics = alone.http.get("/metrics").text
    assert metrics.count("\npenstock_worker_rank_resident_bytes{") == 2
    assert metrics.count("\npenstock_worker_rank_wait_ratio{") == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_either_process_is_that_of_both_and_streams_go_on(
    alone: Daemon, rank: int
) -> None:
    dies_within_a_stream(alone, rank)


def test_so_is_the_death_of_any_of_four_that_divide_codes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", **SHAPE, num_key_value_heads=4)
    path, meant = write_quantised(folder, "int4-32", tmp_path)
    settings = (*ALONE, "--place", f"colocated={TWO}+{TWO} forced", "--dtype", "float32")
    daemon, oracle = Daemon(tmp_path / "daemon", *settings, model=path), load_oracle(meant)
    cases = [(prompt, 12) for prompt in prompts([3, 64, 130])]
    try:
        assert_all_same(daemon.wait_ready(), oracle, cases)
        assert len(pids(daemon, "colocated")) == 4
        dies_within_a_stream(daemon, 2)
        assert_all_same(daemon, oracle, cases)
    finally:
        daemon.stop()


def dies_within_a_stream(daemon: Daemon, rank: int) -> None:
    """Kill one process of a worker while a reply comes; assert that nothing is lost."""
    draw = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    expected = daemon.complete(PROMPTS[0], **draw)["choices"][0]["token_ids"]
    all_pids, begun, tokens = pids(daemon, "colocated"), threading.Event(), list[int]()

    def read() -> None:
        for event in daemon.stream(PROMPTS[0], **draw):
            tokens.extend(event["choices"][0]["token_ids"])
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    os.kill(all_pids[rank], signal.SIGKILL)
    reader.join(120)
    assert tokens == expected
    assert not any(is_alive(pid) for pid in all_pids)
    assert not set(pids(daemon, "colocated")) & set(all_pids)
    daemon.assert_all_free()


def hand_over(daemon: Daemon, transport: str, check: Callable[[], None]) -> None:
    """Let a prefill and a decode group serve, and lose a process of each."""
    try:
        daemon.wait_ready()
        check()
        assert {row["transport"] for row in daemon.log_rows()} == {transport}
        for name in ("prefill", "decode"):
            both = pids(daemon, name)
            os.kill(both[-1], signal.SIGKILL)
            daemon.wait_for(lambda both=both: not any(is_alive(pid) for pid in both))
            check()
        daemon.assert_all_free()
    finally:
        daemon.stop()


@pytest.mark.parametrize(("transport", "decode"), [("alias", ONE), ("peer", ONE), ("alias", TWO)])
def test_a_group_hands_over_to_one_process_or_another_group(
    tiny_llama: Path, tmp_path: Path, by_one: list[list[int]], transport: str, decode: str
) -> None:
    place = ("--roles", "static", "--place", f"prefill={TWO} decode={decode} forced")
    daemon = Daemon(tmp_path, *place, "--transport", transport, model=tiny_llama)

    def check() -> None:
        assert answers(daemon) == by_one

    hand_over(daemon, transport, check)


def test_recurrent_states_are_divided_and_handed_over(tmp_path: Path) -> None:
    """By one group to another."""
    folder = make_checkpoint(tmp_path / "tiny", "qwen3_5_text")
    place = ("--roles", "static", "--place", f"prefill={TWO} decode={TWO} forced")
    settings = (*place, "--transport", "peer", "--dtype", "float32")
    daemon, oracle = Daemon(tmp_path / "daemon", *settings, model=folder), load_oracle(folder)
    cases = [(prompt, 12) for prompt in prompts([3, 64, 130])]
    hand_over(daemon, "peer", lambda: assert_all_same(daemon, oracle, cases))


def test_codes_are_divided_and_what_they_mean_is_served(tmp_path: Path) -> None:
    """By two processes that prefill, and one that decodes."""
    folder = make_checkpoint(tmp_path / "tiny", **SHAPE)
    path, meant = write_quantised(folder, "int4-32", tmp_path)
    place = f"prefill={TWO} decode={ONE} forced"
    settings = ("--roles", "static", "--place", place, "--transport", "shm", "--dtype", "float32")
    daemon, oracle = Daemon(tmp_path / "daemon", *settings, model=path), load_oracle(meant)
    cases = [(prompt, 12) for prompt in prompts([3, 64, 130])]
    hand_over(daemon, "shm", lambda: assert_all_same(daemon, oracle, cases))


@pytest.mark.parametrize(
    ("place", "more", "about"),
    [
        (f"{TWO}+{TWO}+{TWO}+{TWO}", (), "8 processes"),
        ("0+999", (), "core 999"),
        ("0+", (), "place"),
        ("0+cuda:0", (), "cores alone"),
        (TWO, ("--offload-weights", "1MiB"), "leave out --offload-weights"),
    ],
)
def test_what_cannot_be_a_group_is_refused_before_anything_loads(
    tiny_llama: Path, tmp_path: Path, place: str, more: tuple[str, ...], about: str
) -> None:
    settings = ("--roles", "colocated", "--place", f"colocated={place} forced", *more)
    for verb in (("serve", "--check-config"), ("serve", "--no-log-text")):
        ended = penstock(user_environ(tmp_path), *verb, str(tiny_llama), *settings)
        assert (ended.returncode, about in ended.stderr) == (78, True), ended.stderr
        assert not (tmp_path / "state" / "requests.db").exists()


def test_so_is_one_too_large_for_memory_with_what_would_fit(tmp_path: Path) -> None:
    """Terabytes of weights, of which the disk has only the headers."""
    folder = make_large(tmp_path / "large", num_hidden_layers=2000, intermediate_size=65536)
    settings = ("--roles", "colocated", "--place", f"colocated={TWO} forced", "--dtype", "float32")
    for verb in (("serve", "--check-config"), ("serve", "--no-log-text")):
        ended = penstock(user_environ(tmp_path), *verb, str(folder), *settings)
        assert (ended.returncode, "2 processes need" in ended.stderr) == (78, True), ended.stderr
        assert "hint: " in ended.stderr
