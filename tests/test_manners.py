"""How the daemon treats signals, sockets, other daemons, and clients that want too much."""

import json
import os
import re
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

from tests.daemons import ALONE, is_alive

LONG = {"max_tokens": 1500, "ignore_eos": True}


def test_workers_are_pinned_to_different_cores(start_daemon, tiny_llama):
    daemon = start_daemon(model=tiny_llama).wait_ready()
    masks = {}
    for worker in daemon.state()["workers"]:
        assert os.sched_getaffinity(worker["pid"]) == set(worker["cpus"])
        masks[worker["name"]] = set(worker["cpus"])
    assert set(masks) == {"prefill", "decode"}
    if len(os.sched_getaffinity(0)) > 1:
        assert not masks["prefill"] & masks["decode"]


def test_sigterm_drains_and_exits_zero(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(daemon.complete, "hello", **LONG)
        daemon.wait_live()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for(lambda: daemon.get_status("/ready") == 503)
        refused = daemon.http.post("/v1/completions", json={"prompt": "too late"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert len(reply.result()["choices"][0]["token_ids"]) == 1500
    assert daemon.process.wait(30) == 0
    assert not daemon.socket.exists()
    assert daemon.stderr.splitlines()[-1] == "penstock: stopped"


def test_an_operator_drains_and_resumes_but_not_after_sigterm(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    pid = daemon.worker_pid("colocated")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(daemon.complete, "hello", **LONG)
        daemon.wait_live()
        assert daemon.http.post("/v1/penstock/drain").status_code == 200
        assert daemon.get_status("/ready") == 503
        refused = daemon.http.post("/v1/completions", json={"prompt": "too late"})
        assert refused.json()["error"]["code"] == "draining"
        assert daemon.http.post("/v1/penstock/resume").status_code == 200
        assert daemon.complete("in time", max_tokens=2)["usage"]["completion_tokens"] == 2
        os.kill(pid, signal.SIGSTOP)  # so that the drain is certainly not over too soon
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for(lambda: daemon.get_status("/ready") == 503)
        too_late = daemon.http.post("/v1/penstock/resume")
        assert (too_late.status_code, too_late.json()["error"]["code"]) == (409, "stopping")
        os.kill(pid, signal.SIGCONT)
        assert len(reply.result()["choices"][0]["token_ids"]) == 1500
    assert daemon.process.wait(30) == 0


def test_a_second_sigterm_stops_at_once_with_a_reply_to_each_client(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    pid = daemon.worker_pid("colocated")
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(
            daemon.http.post, "/v1/completions", json={"prompt": "a", "temperature": 0, **LONG}
        )
        streamed = pool.submit(lambda: list(daemon.stream("b", **LONG)))
        daemon.wait_live(2)
        os.kill(pid, signal.SIGSTOP)  # it hangs: only the second signal can end this
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for(lambda: daemon.get_status("/ready") == 503)
        daemon.process.send_signal(signal.SIGTERM)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "draining"
        assert streamed.result()[-1]["error"]["code"] == "draining"
    assert daemon.process.wait(30) == 0
    assert not is_alive(pid)


def test_a_stale_socket_is_replaced_and_a_live_one_refused(start_daemon, tiny_llama, tmp_path):
    (tmp_path / "d0").mkdir()
    path = tmp_path / "d0" / "p.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    assert stat.S_IMODE(first.socket.stat().st_mode) == 0o660
    second = start_daemon(*ALONE, "--socket", str(first.socket), model=tiny_llama)
    assert second.process.wait(30) != 0
    assert "socket" in second.stderr
    assert first.get_status("/health") == 200


def test_a_second_daemon_on_the_same_state_directory_is_refused(start_daemon, tiny_llama):
    first = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    second = start_daemon(*ALONE, "--state-dir", str(first.folder / "state"), model=tiny_llama)
    assert second.process.wait(30) == 9
    assert "a daemon runs already" in second.stderr
    assert first.get_status("/ready") == 200


def test_ready_is_announced_to_systemd(start_daemon, tiny_llama, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        daemon = start_daemon(*ALONE, model=tiny_llama, env=env)
        seen = b""
        while b"READY=1" not in seen:
            seen += manager.recv(4096) + b"\n"
        assert daemon.get_status("/ready") == 200
        daemon.process.send_signal(signal.SIGTERM)
        while b"STOPPING=1" not in seen:
            seen += manager.recv(4096) + b"\n"
        assert daemon.process.wait(30) == 0


def test_503_while_loading(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama)
    daemon.wait_for(daemon.is_listening)
    reply = daemon.http.post("/v1/completions", json={"prompt": "early"})
    if reply.status_code == 503:  # it may have become ready in between
        assert reply.json()["error"]["code"] == "model_loading"
        assert reply.headers["retry-after"]
    daemon.wait_ready()
    assert daemon.complete("now", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_the_progress_of_loading_is_told_from_the_whole(start_daemon):
    daemon = start_daemon(*ALONE).wait_ready()
    (loaded,) = re.findall(r"loaded ([\d.]+ \w+) of weights", daemon.stderr)
    on_the_way = re.findall(r"loading weights: ([\d.]+) of ([\d.]+ \w+)", daemon.stderr)
    assert {total for _, total in on_the_way} <= {loaded}


def test_a_full_queue_answers_429_and_recovers(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, "--kv-memory", "1MiB", model=tiny_llama).wait_ready()
    prompts = [[1, 2, 3]] * 350
    with ThreadPoolExecutor(2) as pool:
        filler = pool.submit(
            daemon.http.post,
            "/v1/completions",
            json={"prompt": prompts, "max_tokens": 40, "ignore_eos": True},
        )
        daemon.wait_for(lambda: daemon.state()["queue"]["queued"] > 200)
        big = daemon.http.post(
            "/v1/completions", json={"prompt": prompts, "max_tokens": 5, "ignore_eos": True}
        )
        assert big.status_code == 429
        assert big.json()["error"]["code"] == "queue_full"
        assert 1 <= int(big.headers["retry-after"]) <= 120
        assert 1000 <= int(big.headers["retry-after-ms"]) <= 120_000
        assert filler.result().status_code == 200
    assert daemon.complete("again", max_tokens=2)["usage"]["completion_tokens"] == 2
    daemon.assert_all_free()


def test_a_client_that_does_not_read_does_not_hold_up_a_drain(start_daemon, tiny_llama):
    daemon = start_daemon(*ALONE, model=tiny_llama).wait_ready()
    request = {"prompt": "a", "stream": True, "logprobs": 20, "temperature": 0, **LONG}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.socket))
        client.sendall(head.encode() + body)
        daemon.wait_live()
        daemon.wait_for(lambda: daemon.state()["queue"]["decoding"] == 0, 60)
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
