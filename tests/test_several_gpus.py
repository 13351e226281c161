"""Workers on GPUs of their own, under load and kills: every client has its exact answer.

The GPUs are the tests' accelerator, one in each worker's process, whose memory other processes map.
ACCELERATED_MACHINES names others to try, as `8 peer,2 shm`: each worker's start takes seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.accelerated import AcceleratedDaemon
from tests.checkpoints import make_checkpoint
from tests.daemons import is_alive

MACHINES = tuple(filter(None, os.environ.get("ACCELERATED_MACHINES", "").split(","))) or ("2 peer",)
PROMPTS = [[(7 * i + 3 * j) % 280 + 5 for j in range(20 + 60 * i)] for i in range(6)]
NUM_OUTPUTS = 24
ANSWERS: list[list[list[int]]] = []
"""Of each machine, to all prompts one after the other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(
    machine: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AcceleratedDaemon]:
    num_gpus, transport = machine.split()
    options = ["--dtype", "float32", "--max-model-len", "512", "--eager"]
    options += ["--kv-memory", f"{4 * int(num_gpus)}MiB", "--dram-cache", "16MiB"]
    daemon = AcceleratedDaemon(
        tmp_path_factory.mktemp("daemon"),
        int(num_gpus),
        *options,
        model=folder,
        reach=transport == "peer",
    )
    try:
        yield daemon.wait_ready()
    finally:
        daemon.stop()


def answer(daemon: AcceleratedDaemon, prompt: list[int]) -> list[int]:
    events = daemon.stream(prompt, max_tokens=NUM_OUTPUTS, ignore_eos=True)
    tokens = []
    for event in events:
        assert "error" not in event, event
        tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
    return tokens


@pytest.fixture(scope="module")
def alone(daemon: AcceleratedDaemon) -> list[list[int]]:
    answers = [answer(daemon, prompt) for prompt in PROMPTS]
    ANSWERS.append(answers)
    return answers


def test_every_gpu_has_a_worker_and_blocks_go_between_them(
    daemon: AcceleratedDaemon, machine: str, alone: list[list[int]]
) -> None:
    num_gpus, transport = machine.split()
    state = daemon.fresh_state()
    assert len({worker["device"] for worker in state["workers"]}) == int(num_gpus)
    assert state["transport"] == transport
    assert state["handoff"]["probe_bytes_per_s"] > 0
    assert ANSWERS[0] == alone  # on every machine
    rows = daemon.log_rows()
    assert {row["transport"] for row in rows} <= {transport, None}
    assert sum(row["handoff_bytes"] for row in rows) > 0


def test_what_has_left_a_gpus_pool_comes_back_from_dram(
    daemon: AcceleratedDaemon, alone: list[list[int]]
) -> None:
    num_tokens = max(pool["num_blocks"] * pool["block_size"] for pool in daemon.state()["pools"])
    others = [
        [5 + (11 * i + 5 * j) % 290 for j in range(400)] for i in range(num_tokens // 400 + 2)
    ]

    def comes_back() -> bool:
        for prompt in others:
            daemon.complete(prompt, max_tokens=2, ignore_eos=True)  # through both pools
        assert answer(daemon, PROMPTS[-1]) == alone[-1]
        return daemon.fresh_state()["dram"]["loaded_blocks"] > 0

    assert answer(daemon, PROMPTS[-1]) == alone[-1]  # a second use
    daemon.wait_for(comes_back)
    dram = daemon.fresh_state()["dram"]
    assert (dram["state"], dram["failed_stores"]) == ("on", 0)


def under_load(daemon: AcceleratedDaemon, pool: ThreadPoolExecutor) -> list[Future[list[int]]]:
    return [pool.submit(answer, daemon, prompt) for prompt in PROMPTS * 2]


def test_answers_are_the_same_under_load(daemon: AcceleratedDaemon, alone: list[list[int]]) -> None:
    with ThreadPoolExecutor(12) as pool:
        assert [each.result() for each in under_load(daemon, pool)] == alone * 2
    daemon.assert_all_free()


def is_decoding(daemon: AcceleratedDaemon) -> bool:
    return any(request.get("phase") == "decoding" for request in daemon.requests())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_dies_under_load_changes_no_answer(
    daemon: AcceleratedDaemon, role: str, alone: list[list[int]]
) -> None:
    name = min(w["name"] for w in daemon.state()["workers"] if w["name"].startswith(role))
    pid = daemon.worker_pid(name)
    with ThreadPoolExecutor(12) as pool:
        answers = under_load(daemon, pool)
        daemon.wait_for(lambda: is_decoding(daemon) or all(a.done() for a in answers), 60)
        os.kill(pid, signal.SIGKILL)
        daemon.wait_for(lambda: not is_alive(pid))
        assert [each.result() for each in answers] == alone * 2
    daemon.wait_for(
        lambda: all(w["state"] == "ready" and w["pid"] != pid for w in daemon.state()["workers"]),
        240,
    )
    # blocks go into the pool of its new life, and are what they were
    before = daemon.state()["totals"]["finished"]
    assert [answer(daemon, prompt) for prompt in PROMPTS] == alone
    assert daemon.fresh_state()["totals"]["finished"] == before + len(PROMPTS)
    daemon.assert_all_free()
