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

from engine.scheduler.routing.links import MAX_STRIKES
from tests.appliance.cli_process import penstock, user_environ
from tests.checkpoints import make_checkpoint
from tests.daemons import is_alive
from tests.worlds.accelerated import AcceleratedDaemon

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
    options += ["--dram-cache", "16MiB"]
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


def answer(daemon: AcceleratedDaemon, prompt: list[int], salt: str | None = None) -> list[int]:
    events = daemon.stream(prompt, max_tokens=NUM_OUTPUTS, ignore_eos=True, cache_salt=salt)
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

    def waits_for_restore() -> bool:
        for prompt in others:
            daemon.complete(prompt, max_tokens=2, ignore_eos=True)  # through both pools
        assert answer(daemon, PROMPTS[-1]) == alone[-1]
        return daemon.fresh_state()["dram"]["loaded_blocks"] > 0

    assert answer(daemon, PROMPTS[-1]) == alone[-1]  # a second use
    daemon.wait_for(waits_for_restore, 240)
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


def wait_restarted(daemon: AcceleratedDaemon, pid: int) -> None:
    daemon.wait_for(
        lambda: all(w["state"] == "ready" and w["pid"] != pid for w in daemon.state()["workers"]),
        240,
    )


def test_a_worker_that_dies_under_load_changes_no_answer(
    daemon: AcceleratedDaemon, alone: list[list[int]]
) -> None:
    name = min(w["name"] for w in daemon.state()["workers"] if w["name"].startswith("decode"))
    pid = daemon.worker_pid(name)
    with ThreadPoolExecutor(12) as pool:
        answers = under_load(daemon, pool)
        daemon.wait_for(lambda: is_decoding(daemon) or all(a.done() for a in answers), 240)
        os.kill(pid, signal.SIGKILL)
        daemon.wait_for(lambda: not is_alive(pid), 240)
        assert [each.result() for each in answers] == alone * 2
    wait_restarted(daemon, pid)
    # blocks go into the pool of its new life, and are what they were
    before = daemon.state()["totals"]["finished"]
    assert [answer(daemon, prompt) for prompt in PROMPTS] == alone
    assert daemon.fresh_state()["totals"]["finished"] == before + len(PROMPTS)
    daemon.assert_all_free()


def prompt_of(number: int) -> list[int]:
    """Six blocks and a bit, which no other prompt begins with."""
    return [(11 * number + 5 * i) % 280 + 5 for i in range(400)]


def link(daemon: AcceleratedDaemon) -> dict:
    """The first link that blocks are pushed over."""
    return next(link for link in daemon.fresh_state()["links"] if link["has_detour"])


def arrived(daemon: AcceleratedDaemon) -> dict[tuple[str, str], int]:
    """Bytes over each link, by the pools at its ends, which are called as their workers."""
    links = daemon.fresh_state()["links"]
    return {(x["from_pool"], x["to_pool"]): x["num_bytes"] for x in links}


def block_bytes(daemon: AcceleratedDaemon) -> int:
    return int(daemon.state()["pools"][0]["block_bytes"])


def has_first_token(daemon: AcceleratedDaemon) -> bool:
    live = [each for each in daemon.requests() if each["phase"] != "finished"]
    return any(each["output_tokens"] for each in live)


def make_faultless(daemon: AcceleratedDaemon) -> None:
    """Mend all links: those that are down come up when who pushes over them starts again."""
    for path in daemon.faults.iterdir():
        path.unlink()
    for down in [each for each in daemon.fresh_state()["links"] if each["down"]]:
        kill(daemon, down["from_pool"])
    daemon.wait_for(lambda: not any(each["down"] for each in daemon.state()["links"]), 240)


def kill(daemon: AcceleratedDaemon, worker: str) -> None:
    pid = daemon.worker_pid(worker)
    os.kill(pid, signal.SIGKILL)
    wait_restarted(daemon, pid)


@pytest.fixture
def in_static_roles(daemon: AcceleratedDaemon) -> Iterator[None]:
    """Every prompt goes from a prefill worker to a decode worker, whatever is measured."""
    daemon.http.post("/v1/penstock/roles", json={"roles": "static"}).raise_for_status()
    yield
    daemon.http.post("/v1/penstock/roles", json={"roles": "elastic"}).raise_for_status()


@pytest.fixture
def pushing(
    daemon: AcceleratedDaemon, machine: str, in_static_roles: None
) -> Iterator[AcceleratedDaemon]:
    """On which every link pushes, and every prompt goes over one."""
    if not machine.endswith("peer"):
        pytest.skip("nothing is pushed")
    make_faultless(daemon)
    yield daemon
    make_faultless(daemon)


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_worker_that_dies_while_half_a_chunk_is_pushed_changes_no_answer(
    pushing: AcceleratedDaemon, victim: str
) -> None:
    daemon, prompt = pushing, prompt_of(20 if victim == "source" else 21)
    expected = answer(daemon, prompt, salt="before")
    before = arrived(daemon)
    daemon.faults.joinpath("hold").write_text("3")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, daemon, prompt)
        daemon.wait_for((daemon.faults / "held").exists, 240)
        # some blocks are there and said to be, one is there, the others are not
        source, target = daemon.wait_for(
            lambda: next(
                (way for way, size in arrived(daemon).items() if size > before[way]), None
            ),
            240,
        )
        assert arrived(daemon)[source, target] - before[source, target] < 4 * block_bytes(daemon)
        daemon.wait_for(lambda: has_first_token(daemon), 240)
        pid = daemon.worker_pid(source if victim == "source" else target)
        os.kill(pid, signal.SIGKILL)
        daemon.wait_for(lambda: not is_alive(pid), 240)
        (daemon.faults / "hold").unlink()
        assert asked.result() == expected
    wait_restarted(daemon, pid)
    assert daemon.log_rows(1)[0]["workers"].startswith(source)
    assert answer(daemon, prompt) == expected
    daemon.assert_all_free()


@pytest.mark.usefixtures("in_static_roles")
def test_a_link_that_fails_is_taken_down_loudly_and_blocks_go_by_the_host(
    pushing: AcceleratedDaemon, machine: str
) -> None:
    daemon, num_links = pushing, (int(machine.split()[0]) // 2) ** 2
    daemon.faults.joinpath("broken").touch()
    number = 30
    while not any(each["down"] for each in daemon.fresh_state()["links"]):
        number += 1
        assert number < 30 + 2 * MAX_STRIKES * num_links
        expected = answer(daemon, prompt_of(number), salt="before")
        assert answer(daemon, prompt_of(number)) == expected
    (daemon.faults / "broken").unlink()  # what is down stays down
    state = daemon.fresh_state()
    down = next(each for each in state["links"] if each["down"])
    assert down["transport"] == "shm"
    assert "the link is broken" in down["down"]
    assert "link.down" in {alert["code"] for alert in state["alerts"]}
    assert "blocks go by shm" in daemon.stderr
    for command, words in (
        (("status",), "link.down"),
        (("top", "--once"), "is down"),
        (("doctor",), "by shm"),
    ):
        assert words in penstock(user_environ(daemon.folder), *command).stdout
    if num_links == 1:  # or others are taken
        expected = answer(daemon, prompt_of(19), salt="before")
        assert answer(daemon, prompt_of(19)) == expected
        assert {row["links"] for row in daemon.log_rows(2)} == {"shm"}
        assert {row["transport"] for row in daemon.log_rows(2)} == {"shm"}
        assert all(row["handoff_bytes"] for row in daemon.log_rows(2))
    daemon.assert_all_free()


def test_a_link_that_changes_what_it_carries_is_found_at_start_and_not_used(
    pushing: AcceleratedDaemon, alone: list[list[int]]
) -> None:
    daemon = pushing
    daemon.faults.joinpath("lossy").touch()
    source = link(daemon)["from_pool"]
    kill(daemon, source)
    daemon.wait_for(lambda: link(daemon)["down"], 240)
    found = link(daemon)
    assert (found["transport"], found["probe_bytes_per_s"]) == ("shm", 0)
    assert "changed at start" in found["down"]
    assert [answer(daemon, prompt, salt="lossy") for prompt in PROMPTS] == alone
    assert {row["links"] for row in daemon.log_rows(len(PROMPTS))} <= {"shm", None}
    make_faultless(daemon)
    assert link(daemon)["transport"] == "peer"
    assert [answer(daemon, prompt, salt="mended") for prompt in PROMPTS] == alone
