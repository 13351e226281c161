"""How the daemon treats signals, sockets, other daemons, and clients that want too much."""

import json
import os
import resource
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.daemons import ALONE, LONG, Daemon, is_alive

MAX_QUEUED, NUM_PROMPTS = 160, 110
"""Prompts of one request: it fits the queue, two of them do not, and the pool has room for few."""

RAISED = -10
"""Priority that the service's unit gives to the daemon."""


@pytest.fixture(scope="module")
def standing(tiny_llama, tmp_path_factory):
    """A daemon that stays, what its start showed, and where its workers were pinned then.

    It has been started where a dead one had left its socket, and asked as soon as it listened.
    """
    folder = tmp_path_factory.mktemp("standing")
    with (
        socket.socket(socket.AF_UNIX) as dead,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        dead.bind(str(folder / "p.sock"))
        dead.close()
        manager.bind(str(folder / "notify"))
        manager.settimeout(120)
        env = {"NOTIFY_SOCKET": str(folder / "notify")}
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)

        def permit():
            resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
            with suppress(PermissionError):
                os.nice(RAISED - os.nice(0))

        small = ("--kv-memory", "1MiB", "--max-queued", str(MAX_QUEUED))
        daemon = Daemon(folder, *small, model=tiny_llama, env=env, preexec_fn=permit)
        daemon.wait_for(daemon.is_listening)
        daemon.early = daemon.http.post("/v1/completions", json={"prompt": "early"})
        while b"READY=1" not in manager.recv(4096):
            pass
        daemon.status_when_announced = daemon.get_status("/ready")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.told_of_reload = [manager.recv(4096).decode() for _ in range(2)]
    yield daemon
    daemon.assert_all_free()
    assert daemon.stop() == 0


def test_ready_is_announced_to_systemd(standing):
    assert standing.status_when_announced == 200


def test_systemd_is_told_when_a_reload_begins_and_ends(standing):
    begun, ended = standing.told_of_reload
    assert begun.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert ended.startswith("READY=1")


def test_tcp_without_keys_is_refused_before_anything_starts(start_daemon, tiny_llama):
    daemon = start_daemon("--listen", "127.0.0.1:0", model=tiny_llama)
    assert daemon.process.wait(120) == 78
    assert "API keys" in daemon.stderr
    assert "penstock keys add" in daemon.stderr


def test_503_while_loading(standing):
    if standing.early.status_code == 503:  # it may have become ready in between
        assert standing.early.json()["error"]["code"] == "model_loading"
        assert standing.early.headers["retry-after"]
    assert standing.complete("now", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_workers_are_pinned_to_different_cores(standing):
    """A worker whose cores another borrows is parked, and computes on none."""

    def is_pinned():
        said = {each["name"]: each for each in standing.fresh_state()["workers"]}
        used = [set(each["cpus_used"]) for each in said.values() if each["cpus_used"]]
        is_as_said = all(
            os.sched_getaffinity(each["pid"]) == set(each["cpus_used"])
            for each in said.values()
            if each["cpus_used"]
        )
        is_apart = sum(map(len, used)) == len(set.union(*used)) or os.cpu_count() == 1
        return set(said) == {"prefill", "decode"} and is_as_said and is_apart

    standing.wait_for(is_pinned)


def test_only_decode_and_the_daemon_keep_a_raised_priority(standing):
    """The service's unit raises it; prompts and strangers' text wait for tokens on their way."""
    if os.getpriority(os.PRIO_PROCESS, standing.process.pid) != RAISED:
        pytest.skip("this user may not raise a priority")
    workers = {each["name"]: each["pid"] for each in standing.fresh_state()["workers"]}
    (reader,) = (
        one.pid
        for one in psutil.Process(standing.pid).children()
        if "engine.reader" in one.cmdline()
    )
    pids = [standing.pid, workers["decode"], workers["prefill"], reader]
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [RAISED, RAISED, 0, 0]


def test_no_process_leaves_a_core_dump(standing):
    """A dump would hold keys, prompts and replies; the daemon was started where dumps are made."""
    pids = [standing.pid, *(each["pid"] for each in standing.fresh_state()["workers"])]
    pids.append(standing.process.pid)  # the keeper has prompts, too
    assert [resource.prlimit(pid, resource.RLIMIT_CORE)[0] for pid in pids] == [0, 0, 0, 0]
    # where a program takes dumps, their size has no limit, so that nothing may be in them
    filters = [Path(f"/proc/{pid}/coredump_filter").read_text() for pid in pids]
    assert [int(each, 16) for each in filters] == [0, 0, 0, 0]


def test_a_stale_socket_is_replaced_and_a_live_one_refused(standing, start_daemon, tiny_llama):
    assert stat.S_IMODE(standing.socket.stat().st_mode) == 0o660
    second = start_daemon(*ALONE, "--socket", str(standing.socket), model=tiny_llama)
    assert second.process.wait(120) != 0
    assert "socket" in second.stderr
    assert standing.get_status("/health") == 200


def test_a_second_daemon_on_the_same_state_directory_is_refused(standing, start_daemon, tiny_llama):
    second = start_daemon(*ALONE, "--state-dir", str(standing.folder / "state"), model=tiny_llama)
    assert second.process.wait(120) == 9
    assert "a daemon runs already" in second.stderr
    assert standing.get_status("/ready") == 200


def test_a_full_queue_answers_429_and_recovers(standing):
    daemon = standing
    body = {"prompt": [[1, 2, 3]] * NUM_PROMPTS, "max_tokens": 2, "ignore_eos": True}
    pids = [worker["pid"] for worker in daemon.state()["workers"]]
    with ThreadPoolExecutor(2) as pool:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that the queue is certainly full
        filler = pool.submit(daemon.http.post, "/v1/completions", json=body)
        daemon.wait_for(lambda: daemon.state()["queue"]["queued"] > MAX_QUEUED - NUM_PROMPTS)
        big = daemon.http.post("/v1/completions", json=body)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert big.status_code == 429
        assert big.json()["error"]["code"] == "queue_full"
        assert 1 <= int(big.headers["retry-after"]) <= 120
        assert 1000 <= int(big.headers["retry-after-ms"]) <= 120_000
        assert filler.result().status_code == 200
    assert daemon.complete("again", max_tokens=2)["usage"]["completion_tokens"] == 2
    daemon.assert_all_free()


def test_an_operator_drains_and_resumes_but_sigterm_drains_to_the_end(
    start_daemon, tiny_llama, tmp_path
):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        daemon = start_daemon(*ALONE, model=tiny_llama, env=env).wait_ready()
        pid = daemon.worker_pid("colocated")
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(daemon.complete, "hello", **LONG)
            daemon.wait_live()
            assert daemon.http.post("/v1/penstock/drain").status_code == 200
            assert daemon.get_status("/ready") == 503
            assert_is_too_late(daemon)
            assert daemon.http.post("/v1/penstock/resume").status_code == 200
            assert daemon.complete("in time", max_tokens=2)["usage"]["completion_tokens"] == 2
            os.kill(pid, signal.SIGSTOP)  # so that the drain is certainly not over too soon
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for(lambda: daemon.get_status("/ready") == 503)
            assert_is_too_late(daemon)
            resumed = daemon.http.post("/v1/penstock/resume")
            assert (resumed.status_code, resumed.json()["error"]["code"]) == (409, "stopping")
            os.kill(pid, signal.SIGCONT)
            assert len(reply.result()["choices"][0]["token_ids"]) == 1500
        while b"STOPPING=1" not in manager.recv(4096):
            pass
    assert daemon.process.wait(120) == 0
    assert not daemon.socket.exists()
    assert daemon.stderr.splitlines()[-1] == "penstock: stopped"


def assert_is_too_late(daemon):
    refused = daemon.http.post("/v1/completions", json={"prompt": "too late"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]


def test_a_second_sigterm_stops_at_once_with_a_reply_to_each_client(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    pid = daemon.worker_pid("colocated")
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(daemon.http.post, "/v1/completions", json={"prompt": "a", **LONG})
        streamed = pool.submit(lambda: list(daemon.stream("b", **LONG)))
        daemon.wait_live(2)
        os.kill(pid, signal.SIGSTOP)  # it hangs: only the second signal can end this
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for(lambda: daemon.get_status("/ready") == 503)
        daemon.process.send_signal(signal.SIGTERM)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "draining"
        assert streamed.result()[-1]["error"]["code"] == "draining"
    assert daemon.process.wait(120) == 0
    assert not is_alive(pid)


def test_a_client_that_does_not_read_does_not_hold_up_a_drain(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    request = {"prompt": "a", "stream": True, "logprobs": 20, **LONG}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.socket))
        client.sendall(head.encode() + body)
        daemon.wait_live()
        daemon.wait_for(lambda: daemon.state()["queue"]["decoding"] == 0)
        assert daemon.stop() == 0


def test_a_daemon_that_ends_leaves_anothers_socket_alone(start_daemon, tiny_llama):
    first = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    first.socket.unlink()
    second = start_daemon(*ALONE, "--socket", str(first.socket), model=tiny_llama)
    second.socket = first.socket
    second.wait_for(second.is_listening)
    first.http.close()
    assert first.stop() == 0
    assert second.is_listening()
