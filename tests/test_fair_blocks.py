"""One user's long streams fill a small pool; another user's chat does not wait for their ends."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.daemons import ALONE, STEP_BY_STEP, Daemon, make_keys

NUM_STREAMS = 10
STREAM = {"prompt": "Once " * 60, "max_tokens": 500, "ignore_eos": True, "temperature": 1}
CHAT = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fair")
    path, keys = make_keys(folder, heavy="user", light="user")
    options = ("--listen", "127.0.0.1:0", "--api-keys", str(path), "--kv-memory", "1MiB")
    daemon = Daemon(folder, *options, *ALONE, *STEP_BY_STEP, model=tiny_llama).wait_ready()
    daemon.clients = {name: client_of(daemon, key) for name, key in keys.items()}
    yield daemon
    for client in daemon.clients.values():
        client.close()
    daemon.assert_all_free()
    assert daemon.stop() == 0


def client_of(daemon, key):
    return httpx.Client(
        base_url=daemon.tcp_url, headers={"Authorization": f"Bearer {key}"}, timeout=300
    )


def ask(daemon, name, body, seed=0):
    reply = daemon.clients[name].post("/v1/completions", json={**body, "seed": seed})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_chat_is_answered_while_another_users_streams_wait_for_blocks(daemon):
    alone = ask(daemon, "light", CHAT)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(ask, daemon, "heavy", STREAM, seed) for seed in range(NUM_STREAMS)]
        daemon.wait_for(lambda: daemon.state()["queue"]["paused"])
        for _ in range(3):
            chat = ask(daemon, "light", CHAT)
            assert chat["choices"][0]["text"] == alone["choices"][0]["text"]
        assert sum(stream.done() for stream in streams) < NUM_STREAMS // 2
        replies = [stream.result() for stream in streams]
    assert {reply["usage"]["completion_tokens"] for reply in replies} == {500}
    rows = [row for row in daemon.log_rows() if row["user"] == "key:light"]
    assert [row["preemptions"] for row in rows] == [0] * 4
