"""Two NUMA nodes by force: weights and pool of each, blocks copied between, answers as on one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.daemons import Daemon, is_alive
from tests.two_nodes import TwoNodes

PROMPTS = [[(5 * i + 3 * j) % 280 + 5 for j in range(70 + 40 * i)] for i in range(3)]


def answers(daemon: Daemon) -> list[list[int]]:
    replies = [daemon.complete(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    return [list(reply["choices"][0]["token_ids"]) for reply in replies]


@pytest.fixture(scope="module")
def on_one(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    daemon = Daemon(tmp_path_factory.mktemp("one"), "--roles", "colocated", model=tiny_llama)
    try:
        return answers(daemon.wait_ready())
    finally:
        daemon.stop()


def test_two_nodes_are_two_places(
    tiny_llama: Path, tmp_path: Path, on_one: list[list[int]]
) -> None:
    daemon = TwoNodes(tmp_path, "--roles", "static", model=tiny_llama)
    try:
        daemon.wait_ready()
        # weights of files that would be mapped are copied, too: an arena for each node
        links = [os.readlink(path) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()
                 if path.is_symlink()]  # fmt: skip
        arenas = {link.split()[0] for link in links if "penstock-weights" in link}
        assert arenas == {f"/memfd:penstock-weights-node{node}" for node in (0, 1)}
        assert answers(daemon) == on_one
        state = daemon.fresh_state()
        assert state["transport"] == "peer"
        assert {pool["name"] for pool in state["pools"]} == {"prefill", "decode"}
        assert all(row["transport"] == "peer" for row in daemon.log_rows())
        (link,) = state["links"]
        assert link["probe_bytes_per_s"] > 0
        if not Path("/sys/devices/system/node/node1").exists():
            assert "NUMA node 1" in daemon.stderr
        for name in ("prefill", "decode"):
            pid = daemon.worker_pid(name)
            os.kill(pid, signal.SIGKILL)
            daemon.wait_for(lambda pid=pid: not is_alive(pid))
            assert answers(daemon) == on_one
        daemon.assert_all_free()
    finally:
        daemon.stop()
