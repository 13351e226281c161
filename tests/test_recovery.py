"""Clients leave and workers die by SIGKILL in every phase; nobody else notices."""

import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from appliance.client.address import UnixAddress
from tests.appliance.cli_process import penstock
from tests.daemons import ALONE, ARMS, LONG, is_alive, make_keys


def run_streams(daemon, prompts, max_tokens, on_started=None):
    """Stream all prompts at once, the longer ones drawn; return the token ids of each.

    `on_started` runs after all have begun.
    """
    begun = threading.Barrier(len(prompts) + 1)

    def one(prompt):
        tokens, finish_reason = [], None
        draw = {"temperature": 1.0, "seed": len(prompt)} if len(prompt) > 100 else {}
        for event in daemon.stream(prompt, max_tokens=max_tokens, ignore_eos=True, **draw):
            assert "error" not in event, event
            for choice in event["choices"]:
                if not tokens and choice["token_ids"]:
                    begun.wait(120)
                tokens += choice["token_ids"]
                finish_reason = choice["finish_reason"] or finish_reason
        return tokens, finish_reason

    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(one, prompt) for prompt in prompts]
        begun.wait(120)
        if on_started is not None:
            on_started()
        return [future.result() for future in futures]


def role_worker(arm, role):
    return "colocated" if arm == "colocated" else role


def wait_restarted(daemon, name, old_pid):
    daemon.wait_for(
        lambda: any(
            w["name"] == name and w["state"] == "ready" and w["pid"] != old_pid
            for w in daemon.state()["workers"]
        )
    )


@pytest.fixture
def settled_roles(daemon, arm):
    """Roles in which it is known which worker computes what."""
    if arm == "elastic":
        daemon.http.post("/v1/penstock/roles", json={"roles": "static"}).raise_for_status()
    yield
    if arm == "elastic":
        daemon.http.post("/v1/penstock/roles", json={"roles": "elastic"}).raise_for_status()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(daemon, is_stream):
    num_rows = len(daemon.log_rows())
    body = httpx.Request(
        "POST",
        "http://localhost/v1/completions",
        json={"prompt": "hello", "stream": is_stream, **LONG},
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body.content)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.socket))
        client.sendall(head.encode() + body.content)
        daemon.wait_live()
    daemon.wait_for(lambda: daemon.num_live() == 0)
    daemon.assert_all_free()
    daemon.wait_for(lambda: len(daemon.log_rows()) > num_rows)
    row = daemon.log_rows(1)[0]
    assert row["finish_reason"] == "abort"
    assert row["cancelled_by"] == "client"
    assert row["completion_tokens"] < 1500


def test_a_burst_with_random_cancels_leaves_the_pool_free(daemon):
    """100 requests; some finish, some are cancelled by api, some leave."""

    def one(i):
        prompt = [(i * 13 + j) % 280 for j in range(1 + (i * 37) % 300)]
        body = {"prompt": prompt, "max_tokens": 1 + (i * 7) % 60, "ignore_eos": True}
        kind = i % 4
        if kind == 0:
            return daemon.http.post("/v1/completions", json=body).status_code
        with daemon.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                reply.read()
                return reply.status_code
            lines = reply.iter_lines()
            if kind == 1:
                for _ in range(i % 5):
                    next(lines, None)
                return 499
            if kind == 2:
                daemon.http.post(f"/v1/requests/{reply.headers['x-request-id']}/cancel")
            for _ in lines:
                pass
        return reply.status_code

    before = daemon.fresh_state()["totals"]
    with ThreadPoolExecutor(30) as pool:
        statuses = list(pool.map(one, range(100)))
    assert set(statuses) <= {200, 429, 499}
    daemon.wait_for(lambda: daemon.num_live() == 0)
    daemon.assert_all_free()
    after = daemon.fresh_state()["totals"]
    accepted = after["accepted"] - before["accepted"]
    ended = ("finished", "aborted", "failed")
    assert accepted == sum(after[name] - before[name] for name in ended)
    assert accepted + after["refused"] - before["refused"] == 100
    assert sum(1 for row in daemon.log_rows(1000)) >= accepted
    assert after["failed"] == before["failed"]


PROMPTS = [[(7 * i + j) % 280 for j in range(20 + 90 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def undisturbed(daemon):
    return run_streams(daemon, PROMPTS, 60)


def assert_survives_the_death_of(daemon, name, undisturbed):
    pid = daemon.worker_pid(name)
    got = run_streams(daemon, PROMPTS, 60, on_started=lambda: os.kill(pid, signal.SIGKILL))
    assert got == undisturbed
    assert daemon.get_status("/health") == 200
    wait_restarted(daemon, name, pid)
    daemon.assert_all_free()
    state = daemon.fresh_state()
    assert any(e["code"] == "worker.died" and name in e["message"] for e in state["events"])
    assert state["state"] in ("ready", "degraded")  # it may have died often by now
    assert next(w["num_restarts"] for w in state["workers"] if w["name"] == name) >= 1


def test_decode_worker_killed_under_four_streams_and_the_operator_is_told(daemon, arm, undisturbed):
    assert_survives_the_death_of(daemon, role_worker(arm, "decode"), undisturbed)


@pytest.mark.usefixtures("settled_roles")
def test_prefill_worker_killed_in_the_middle_of_a_long_prompt(daemon, arm):
    name = role_worker(arm, "prefill")
    prompt = [(3 * j) % 280 for j in range(440)]
    expected = daemon.complete(prompt, max_tokens=8, ignore_eos=True)["choices"][0]["token_ids"]
    pid = daemon.worker_pid(name)
    os.kill(pid, signal.SIGSTOP)  # so that the request is certainly there when it dies
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(daemon.complete, prompt, max_tokens=8, ignore_eos=True)
        daemon.wait_for(
            lambda: any(
                r["phase"] == "prefilling" for r in daemon.requests() if r["finish_reason"] is None
            )
        )
        os.kill(pid, signal.SIGKILL)
        assert reply.result()["choices"][0]["token_ids"] == expected
    wait_restarted(daemon, name, pid)
    row = daemon.log_rows(1)[0]
    assert row["recoveries"] == 1
    assert row["finish_reason"] == "length"
    assert (arm == "colocated") == ("went on at decode" not in row["route_reason"])


@pytest.mark.usefixtures("settled_roles")
def test_decode_worker_killed_in_the_handoff(daemon, arm):
    if arm == "colocated":
        pytest.skip("colocated has no handoff")
    prompt = [(5 * j) % 280 for j in range(200)]
    expected = daemon.complete(prompt, max_tokens=8, ignore_eos=True)["choices"][0]["token_ids"]
    pid = daemon.worker_pid("decode")
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(daemon.complete, prompt, max_tokens=8, ignore_eos=True)
        daemon.wait_for(
            lambda: any(
                r["output_tokens"] == 1 and r["phase"] in ("handing_off", "decoding")
                for r in daemon.requests()
                if r["finish_reason"] is None
            )
        )
        os.kill(pid, signal.SIGKILL)
        assert reply.result()["choices"][0]["token_ids"] == expected
    wait_restarted(daemon, "decode", pid)


def unfinished(daemon):
    return [r["id"] for r in daemon.requests() if r["finish_reason"] is None]


def test_a_daemon_killed_under_load_comes_back_and_its_clients_wait(
    start_daemon, tiny_llama, tmp_path
):
    """Its workers go, even those that stand still, and the next daemon continues what it had."""
    path, keys = make_keys(tmp_path, laptop="user")
    options = ("--kv-memory", "1MiB", *ARMS["shm"], "--listen", "127.0.0.1:0", "--api-keys")
    first = start_daemon(*options, str(path), model=tiny_llama).wait_ready()
    killed, url = first.pid, first.tcp_url
    pids = [w["pid"] for w in first.state()["workers"]]
    assert len(pids) == 2
    body = {"max_tokens": 600, "ignore_eos": True}  # so long that none ends before it dies

    def ask(number):
        fields = {**body, "stream": bool(number % 2), "prompt": [number] * 3}
        return first.http.post("/v1/completions", json=fields, timeout=240)

    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, number) for number in range(24)]
        first.wait_for(lambda: first.state()["queue"]["queued"])  # running, and waiting
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        first.wait_for(lambda: len(first.requests()) == 24)
        # what the workers had sent before they stood still is read first
        first.wait_for(lambda: unfinished(first) == (time.sleep(0.3), unfinished(first))[1])
        known, live = {r["id"] for r in first.requests()}, unfinished(first)
        os.kill(killed, signal.SIGKILL)
        first.wait_for(lambda: not is_alive(killed))
        # these connections wait in the backlogs, and their requests for the model
        post = partial(httpx.post, f"{url}/v1/completions", timeout=120)
        headers = {"Authorization": f"Bearer {keys['laptop']}"}
        two = {"prompt": "again", "max_tokens": 2, "ignore_eos": True}
        on_tcp = pool.submit(post, json=two, headers=headers)
        assert first.complete("again", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert on_tcp.result().json()["usage"]["completion_tokens"] == 2
        first.wait_for(lambda: not any(is_alive(pid) for pid in pids))
        assert [each.result().status_code for each in asked] == [200] * 24
    second = first.wait_ready()
    assert second.pid != killed
    assert UnixAddress(second.socket).listener_pid() == second.pid  # `penstock stop` relies on it
    rows = {row["id"]: row for row in second.log_rows()}
    assert live
    assert known <= set(rows)
    for rid in live:
        assert rows[rid]["finish_reason"] == "length"
    told = [e["message"] for e in second.state()["events"] if e["code"] == "daemon.died"]
    assert len(told) == 1
    assert second.stop() == 0
    assert not second.socket.exists()
    assert sorted(each.name for each in (first.folder / "state").glob("requests*")) == [
        "requests.db"
    ]


def test_the_others_serve_on_while_a_worker_cannot_be_started_and_that_is_said(
    start_daemon, tiny_llama, tmp_path
):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    daemon = start_daemon(*ARMS["alias"], model=model).wait_ready()
    pid = daemon.worker_pid("decode")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(daemon.complete, "a", **LONG)
        daemon.wait_for(lambda: daemon.state()["queue"]["decoding"])
        shutil.rmtree(model)
        os.kill(pid, signal.SIGKILL)
        assert len(reply.result()["choices"][0]["token_ids"]) == 1500
    told = "worker decode died 4 times in a row"
    daemon.wait_for(lambda: told in daemon.http.get("/ready").text)
    ready = daemon.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
    assert "prefill" in ready.json()["reason"]
    assert daemon.complete("b", max_tokens=8, ignore_eos=True)["usage"]["completion_tokens"] == 8
    state = daemon.fresh_state()
    assert state["state"] == "degraded"
    assert any("times in a row" in alert["message"] for alert in state["alerts"])
    assert any(event["code"] == "worker.lost" for event in state["events"])
    assert "worker decode could not" in daemon.stderr
    doctor = penstock({**daemon.env, "PENSTOCK_SOCKET": str(daemon.socket)}, "doctor")
    assert "worker decode died" in doctor.stdout
    shutil.copytree(tiny_llama, model)
    wait_restarted(daemon, "decode", None)
    assert daemon.stop() == 0


def test_the_last_worker_that_cannot_come_back_leaves_nobody_waiting(
    start_daemon, tiny_llama, tmp_path
):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    daemon = start_daemon(*ALONE, model=model).wait_ready()
    pid = daemon.worker_pid("colocated")
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a", "max_tokens": 8}
        os.kill(pid, signal.SIGSTOP)  # so that the request is certainly there when it dies
        reply = pool.submit(daemon.http.post, "/v1/completions", json=body)
        daemon.wait_live()
        shutil.rmtree(model)
        os.kill(pid, signal.SIGKILL)
        assert reply.result().status_code == 503
        assert "could not be restarted" in reply.result().json()["error"]["message"]
    refused = daemon.http.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert any(e["code"] == "worker.lost" for e in daemon.state()["events"])
    shutil.copytree(tiny_llama, model)
    daemon.wait_ready()
    assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert daemon.stop() == 0
