"""A daemon that knows several models, under load: each request is served by the one it names."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from appliance.hub.names import STARTER_FOLDER
from tests.checkpoints import load_oracle, make_checkpoint
from tests.daemons import ALONE, STEP_BY_STEP, Daemon, is_alive
from tests.hostile_models import HOSTILE, HOSTILE_TOKENIZERS, endless_template
from tests.test_exactness import assert_same, prompts


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    return make_checkpoint(folder, "qwen3", seed=1, max_position_embeddings=2048)


def settings(tmp_path, text):
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return ["--config", str(path), *STEP_BY_STEP]


NAMES = ("small", "killed", "twice", "last")
"""The other model's, one for each test in which it fails: it is left alone for a while then."""


@pytest.fixture(scope="module")
def swapping(tiny_llama, other, tmp_path_factory):
    """A daemon that serves the first model, knows the other by its names, and swaps at once."""
    folder = tmp_path_factory.mktemp("swapping")
    text = "min_stay = 0\n" + "".join(f'[models.{name}]\nmodel = "{other}"\n' for name in NAMES)
    daemon = Daemon(folder, *ALONE, *settings(folder, text), model=tiny_llama).wait_ready()
    daemon.first = daemon.state()["model"]
    yield daemon
    if daemon.process.poll() is None:
        daemon.assert_all_free()
    assert daemon.stop() == 0


def test_two_models_under_load_lose_no_request(start_daemon, tiny_llama, other, tmp_path):
    text = f'min_stay = 1\n[models.small]\nmodel = "{other}"\nmax_model_len = 512\n'
    daemon = start_daemon(*settings(tmp_path, text), model=tiny_llama)
    daemon.wait_ready()
    first = daemon.state()["model"]
    listed = daemon.http.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("is_loaded", True)) for each in listed] == [
        (first, True),
        ("small", False),
    ]
    cases = [(name, p) for p in prompts([5, 40, 130, 300], seed=7) for name in (first, "small")]

    def ask(case):
        name, prompt = case
        reply = daemon.complete(prompt, model=name, max_tokens=24, ignore_eos=True)
        assert reply["model"] == name
        return reply["choices"][0]["token_ids"]

    with ThreadPoolExecutor(len(cases)) as pool:
        asked = [pool.submit(ask, case) for case in cases]
        waiting = daemon.wait_for(
            lambda: [r for r in daemon.requests() if "model small" in (r["waits_for"] or "")]
        )
        assert {(row["phase"], row["model"]) for row in waiting} == {("queued", "small")}
        got = [each.result() for each in asked]
    oracles = {first: load_oracle(tiny_llama), "small": load_oracle(other)}
    for (name, prompt), tokens in zip(cases, got, strict=True):
        assert_same(prompt, tokens, oracles[name], 24)
    events = [e["message"] for e in daemon.fresh_state()["events"] if e["code"] == "model.swapped"]
    assert 1 <= len(events) <= 3
    assert f"in place of {first}" in events[0]
    totals = daemon.state()["totals"]
    assert (totals["accepted"], totals["finished"]) == (8, 8)
    rows = daemon.log_rows()
    assert sorted({row["model"] for row in rows}) == sorted([first, "small"])
    swaps = daemon.state()["swaps"]
    assert (swaps["num_swaps"], swaps["num_waiting"], swaps["next"]) == (len(events), 0, None)
    # Who waited for the first swap has waited in the queue; the clock of the log is the daemon's.
    waited_ms = max(row["queue_ms"] for row in rows)
    assert waited_ms >= 1000, "a model stays for a second at least"
    assert max(row["tokenize_ms"] for row in rows) < waited_ms
    assert (
        daemon.http.post("/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
    )
    daemon.complete("a", model="small", max_tokens=2)
    assert daemon.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    sizes = {one["model"]: one["size"] for one in daemon.http.get("/api/tags").json()["models"]}
    assert sizes.keys() == {first, "small"}
    assert min(sizes.values()) > 0
    loaded = daemon.http.post("/api/generate", json={"model": first}).json()
    assert (loaded["done_reason"], daemon.fresh_state()["model"]) == ("load", first)
    daemon.assert_all_free()
    assert daemon.stop() == 0


def test_a_model_that_has_become_bad_is_an_error_and_the_old_one_goes_on(
    start_daemon, tiny_llama, other, tmp_path
):
    bad, hung = tmp_path / "bad", tmp_path / "hung"
    for folder in (bad, hung):
        folder.mkdir()
        for path in other.iterdir():
            (folder / path.name).symlink_to(path)
    text = f'min_stay = 0\n[models.small]\nmodel = "{bad}"\n[models.hung]\nmodel = "{hung}"\n'
    daemon = start_daemon(*ALONE, *settings(tmp_path, text), model=tiny_llama).wait_ready()
    (bad / "config.json").unlink()
    for _ in range(2):
        assert refused(daemon).startswith("small cannot be served: ")
    failed = [e for e in daemon.fresh_state()["events"] if e["code"] == "model.swap_failed"]
    assert len(failed) == 1, "it is left alone for a while"
    assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert "takes the place" not in daemon.stderr, "the old one was never taken down"
    (reader,) = [one for one in psutil.Process(daemon.pid).children() if is_reader(one)]
    reader.suspend()  # as if it waited for a disk
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refused, daemon, "draining", "hung")
        daemon.wait_for(lambda: daemon.state()["swaps"]["num_waiting"])
        assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert daemon.stop() == 0
        assert "draining" in asked.result()


def test_models_whose_files_take_too_much_are_refused_and_the_old_one_goes_on(
    start_daemon, tiny_llama, tmp_path
):
    makers = {
        "tokenizer": HOSTILE_TOKENIZERS["text that doubles"],
        "template": endless_template,
        "header": HOSTILE["header of 2^63 bytes"],
        "config": HOSTILE["config of nested lists"],
    }
    folders = {name: make(tmp_path / name) for name, make in makers.items()}
    good = {name: tmp_path / f"good-{name}" for name in ("header", "config")}
    for name, link in good.items():  # they turn bad once the daemon runs
        link.symlink_to(STARTER_FOLDER)
        folders[name], good[name] = link, folders[name]
    text = "min_stay = 0\n" + "".join(
        f'[models.{name}]\nmodel = "{folder}"\n' for name, folder in folders.items()
    )
    daemon = start_daemon(*ALONE, *settings(tmp_path, text), model=tiny_llama).wait_ready()
    for name, bad in good.items():
        folders[name].unlink()
        folders[name].symlink_to(bad)
    pid, before_bytes = daemon.pid, psutil.Process(daemon.pid).memory_info().rss
    with ThreadPoolExecutor(len(folders)) as pool:
        asked = [pool.submit(refused, daemon, model=name) for name in folders]
        daemon.wait_for(lambda: daemon.state()["swaps"]["num_waiting"])
        assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        for name, told in zip(folders, asked, strict=True):
            assert told.result().startswith(f"{name} cannot be served: ")
    assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert daemon.pid == pid
    assert "takes the place" not in daemon.stderr
    assert psutil.Process(pid).memory_info().rss < before_bytes + (32 << 20)
    assert daemon.stop() == 0


def test_tables_whose_files_claim_too_much_end_a_start_each_by_its_name(
    start_daemon, tiny_llama, tmp_path
):
    made = {name: make(tmp_path / name.replace(" ", "-")) for name, make in HOSTILE.items()}
    text = "".join(f'[models."{name}"]\nmodel = "{path}"\n' for name, path in made.items())
    daemon = start_daemon(*settings(tmp_path, text), model=tiny_llama)
    assert daemon.process.wait(120) == 78
    assert all(f"models.{name}: " in daemon.stderr for name in made), daemon.stderr
    assert "Traceback" not in daemon.stderr


def is_reader(process):
    return "engine.reader" in process.cmdline()


def refused(daemon, code="swap_failed", model="small"):
    """What a request for the other model is told."""
    reply = daemon.http.post("/v1/completions", json={"model": model, "prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, code)
    assert code == "draining" or int(reply.headers["retry-after"]) >= 1
    return reply.json()["error"]["message"]


def pids_of(daemon):
    return {worker["pid"] for worker in daemon.state()["workers"]} - {None}


def swapping_in(daemon, old):
    """Wait until workers of another model are coming up in place of old ones; their pids."""

    def coming():
        state = daemon.state()
        pids = {worker["pid"] for worker in state["workers"]} - {None}
        return state["swaps"]["next"] and not pids & old and len(pids) == len(old) and pids

    return daemon.wait_for(coming)


def test_a_worker_killed_in_the_middle_of_a_swap_brings_the_old_model_back(
    swapping, tiny_llama, other
):
    daemon, first = swapping, swapping.first
    num_swaps, old = daemon.state()["swaps"]["num_swaps"], pids_of(daemon)
    (prompt,) = prompts([40], seed=9)
    with ThreadPoolExecutor(2) as pool:
        told = pool.submit(refused, daemon, model="killed")
        pid = min(swapping_in(daemon, old))
        # Who comes meanwhile, for the model that was there or for any, waits and is served.
        waiting = pool.submit(daemon.complete, prompt, model=first, max_tokens=24, ignore_eos=True)
        os.kill(pid, signal.SIGKILL)
        assert "killed by SIGKILL" in told.result()
        reply = waiting.result()
    assert reply["model"] == first
    assert_same(prompt, reply["choices"][0]["token_ids"], load_oracle(tiny_llama), 24)
    codes = [event["code"] for event in daemon.fresh_state()["events"]]
    assert codes.index("model.swap_failed") < codes.index("model.back")
    assert "killed by SIGKILL" in refused(daemon, model="killed"), "it is not tried again at once"
    state = daemon.fresh_state()["swaps"]
    assert state["num_swaps"] == num_swaps
    assert [one["model"] for one in state["failed"]] == ["killed"]
    (other / "config.json").touch()
    assert daemon.complete(prompt, model="killed", max_tokens=2)["model"] == "killed"
    assert daemon.fresh_state()["swaps"]["failed"] == []


def test_a_worker_killed_on_the_way_back_too_ends_nothing(swapping):
    daemon, first, num_back = swapping, swapping.first, num_events(swapping, "model.back")
    old = pids_of(daemon)
    (prompt,) = prompts([40], seed=9)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(refused, daemon, model="twice")
        coming = swapping_in(daemon, old)
        before = children(daemon)
        os.kill(min(coming), signal.SIGKILL)
        # frames come once a second, in which a small model may be back already
        os.kill(
            daemon.wait_for(lambda: min(children(daemon) - before, default=None)), signal.SIGKILL
        )
        assert "killed by SIGKILL" in told.result()
    daemon.wait_for(lambda: num_events(daemon, "model.back") > num_back)
    assert num_events(daemon, "model.back_failed")
    assert daemon.complete(prompt, model=first, max_tokens=4)["model"] == first


def children(daemon):
    return {child.pid for child in psutil.Process(daemon.pid).children()}


def num_events(daemon, code):
    return sum(event["code"] == code for event in daemon.state()["events"])


def test_a_worker_that_dies_after_a_swap_comes_back_on_the_new_model(swapping, other):
    daemon, oracle = swapping, load_oracle(other)
    (prompt,) = prompts([200], seed=8)
    daemon.complete(prompt, model="small", max_tokens=1)
    pid, tokens = daemon.worker_pid("colocated"), []
    for event in daemon.stream(prompt, model="small", max_tokens=200, ignore_eos=True):
        if not tokens:
            os.kill(pid, signal.SIGKILL)
        tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
    assert_same(prompt, tokens, oracle, 200)


def test_a_stop_in_the_middle_of_a_swap_leaves_no_process_behind(swapping):
    """The last test of its daemon."""
    daemon, old = swapping, pids_of(swapping)
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "last", "prompt": "a"}
        told = pool.submit(daemon.http.post, "/v1/completions", json=body)
        pids = swapping_in(daemon, old)
        daemon.process.send_signal(signal.SIGTERM)
        reply = told.result()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
    assert daemon.process.wait(120) == 0
    assert [pid for pid in pids if is_alive(pid)] == []


def test_who_waits_for_a_swap_holds_a_place_only_as_long_as_its_client_stays(
    start_daemon, tiny_llama, other, tmp_path
):
    text = f'min_stay = "1h"\nmax_queued = 1\n[models."o/small"]\nmodel = "{other}"\n'
    daemon = start_daemon(*ALONE, *settings(tmp_path, text), model=tiny_llama).wait_ready()
    body = b'{"model": "o/small:latest", "messages": [{"role": "user", "content": "a"}]}'
    head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"

    def num_waiting():
        return daemon.state()["swaps"]["num_waiting"]

    def use():
        """Keep the first model in use for a while, so that it stays."""
        daemon.complete("a", max_tokens=1500, ignore_eos=True)

    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as client:
        pool.submit(use)
        daemon.wait_for(lambda: daemon.state()["queue"]["decoding"])
        client.connect(str(daemon.socket))
        client.sendall(head % len(body) + body)
        daemon.wait_for(lambda: num_waiting() == 1)
        full = daemon.http.post("/v1/completions", json={"model": "o/small", "prompt": "a"})
        assert (full.status_code, full.headers["retry-after"]) == (429, "5")
        assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        client.close()
        daemon.wait_for(lambda: num_waiting() == 0)
    assert daemon.state()["totals"]["refused"] == 1
    done, left, _ = daemon.log_rows()[-3:]
    assert (done["http_status"], left["http_status"], left["cancelled_by"]) == (200, 499, "client")
    assert (left["model"], left["queue_ms"]) == ("o/small", left["e2e_ms"])
    tags = [each["name"] for each in daemon.http.get("/api/tags").json()["models"]]
    assert tags == [daemon.state()["model"], "o/small"]
    tokenized = daemon.http.post("/tokenize", json={"model": "o/small", "prompt": "a"})
    assert (tokenized.status_code, tokenized.json()["error"]["code"]) == (404, "model_not_found")
    assert "is not served now" in tokenized.json()["error"]["message"]
    assert "penstock_model_swap_waiting 0.0" in daemon.http.get("/metrics").text
    with ThreadPoolExecutor(2) as pool:
        pool.submit(use)
        daemon.wait_for(lambda: daemon.state()["queue"]["decoding"])
        late = pool.submit(daemon.http.post, "/api/chat", content=body)
        daemon.wait_for(lambda: num_waiting() == 1)
        daemon.http.post("/v1/penstock/drain")
        assert late.result().status_code == 503
    assert daemon.state()["totals"]["refused"] == 2
    (shown,) = [each for each in daemon.requests() if each["error"]]
    (row,) = [each for each in daemon.log_rows() if each["error"]]
    assert (shown["finish_reason"], "draining" in shown["error"]) == ("error", True)
    assert (row["id"], row["http_status"], row["error"]) == (shown["id"], 503, shown["error"])
    daemon.http.post("/v1/penstock/resume")
    assert daemon.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert daemon.stop() == 0


def test_a_table_that_cannot_be_served_ends_the_start(start_daemon, tiny_llama, tmp_path):
    text = f'[models.small]\nmodel = "{tmp_path / "nowhere"}"\n'
    daemon = start_daemon(*settings(tmp_path, text), model=tiny_llama)
    assert daemon.process.wait(120) == 78
    assert f"models.small: {tmp_path}/nowhere: no model here" in daemon.stderr


@pytest.mark.parametrize(
    "cache", [("--ssd-cache", "64MiB"), ("--dram-cache", "16MiB")], ids=["ssd", "dram"]
)
def test_a_swap_and_back_computes_only_the_last_unfinished_block_again(
    cache, start_daemon, tiny_llama, other, tmp_path
):
    text = f'min_stay = 0\n[models.small]\nmodel = "{other}"\n'
    daemon = start_daemon(*ALONE, *settings(tmp_path, text), *cache, model=tiny_llama).wait_ready()
    first, (prompt,) = daemon.state()["model"], prompts([300], seed=3)
    name = cache[0].split("-")[2]
    oracles = {first: load_oracle(tiny_llama), "small": load_oracle(other)}
    num_blocks = 300 // 64
    for turn, model in enumerate((first, "small", first, "small")):
        reply = daemon.complete(prompt, model=model, max_tokens=12, ignore_eos=True)
        assert_same(prompt, reply["choices"][0]["token_ids"], oracles[model], 12)
        tier = daemon.fresh_state()[name]
        assert tier["blocks"] == (0 if turn < 2 else num_blocks)
        if not tier["declined_loads"] and not tier["missed_deadlines"]:
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if turn < 2 else 64 * num_blocks)
        if model == first:  # blocks with a salt stay out of the caches, and go with their model
            reply = daemon.complete(prompt, model=first, max_tokens=1, cache_salt="mine")
            why = reply["usage"]["prompt_tokens_details"]["cache_miss"]
            assert why == f"token 0: {'evicted' if turn else 'another salt'}"
        if turn:
            ((kept, num_bytes),) = tier["other_models"].items()
            assert kept.split()[0] == (first if model == "small" else "small")
            assert num_bytes > 0
    assert daemon.stop() == 0


FAULTY_DISK = (
    "-c",
    "import os, pathlib, time\nfrom appliance.cli import main\n"
    "from engine.scheduler.offload import disk\n"
    "folder, write = pathlib.Path(os.environ['DISK']), disk.Slabs.write\n"
    "def faulty(*args):\n"
    "    while (says := (folder / 'disk').read_text()) == 'hangs':\n"
    "        (folder / 'hung').touch()\n"
    "        time.sleep(0.02)\n"
    "    if says == 'is full':\n"
    "        raise OSError(28, 'No space left on device')\n"
    "    return write(*args)\n"
    "disk.Slabs.write = faulty\n"
    "main()",
)
"""A daemon whose disk is full, or hangs, while a file says so; it makes the file `hung` then."""


def test_a_disk_that_fails_while_a_model_makes_room_costs_its_blocks_alone(
    start_daemon, tiny_llama, other, tmp_path, monkeypatch
):
    monkeypatch.setattr(Daemon, "program", FAULTY_DISK)
    (prompt,), disk = prompts([300], seed=3), tmp_path / "disk"
    text = f'min_stay = 0\n[models.small]\nmodel = "{other}"\n'

    def start(model, *more):
        disk.write_text("works")
        args, env = (*ALONE, *more, "--ssd-cache", "64MiB"), {"DISK": str(tmp_path)}
        return start_daemon(*args, folder=tmp_path / "d", model=model, env=env).wait_ready()

    def ask(daemon, model):
        """Ask a model, perhaps after a swap; its reply is right, and says what was cached."""
        reply = daemon.complete(prompt, model=model, max_tokens=12, ignore_eos=True)
        assert_same(prompt, reply["choices"][0]["token_ids"], oracles[model], 12)
        return reply["usage"]["prompt_tokens_details"]

    daemon = start(tiny_llama, *settings(tmp_path, text))
    first = daemon.state()["model"]
    oracles = {first: load_oracle(tiny_llama), "small": load_oracle(other)}
    ask(daemon, first)
    disk.write_text("is full")
    ask(daemon, "small")
    disk.write_text("works")
    assert ask(daemon, first) == {"cached_tokens": 0, "cache_miss": "token 0: evicted"}
    disk.write_text("hangs")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(daemon.complete, prompt, model="small")
        daemon.wait_for((tmp_path / "hung").exists)
        daemon.kill()
        assert isinstance(asked.exception(), httpx.HTTPError)
    daemon = start(other)  # its blocks were stored when the disk worked again
    oracles[other.name] = oracles["small"]
    told = ask(daemon, other.name)
    ssd = daemon.fresh_state()["ssd"]
    if not ssd["declined_loads"] and not ssd["missed_deadlines"]:
        assert told["cached_tokens"] == 256
    assert list(ssd["other_models"]) in ([], [f"{first} in float32"])
    daemon.assert_all_free()
    assert daemon.stop() == 0


def start_resident(other, start_daemon, first, tmp_path, *more, keep_alive="forever"):
    """A daemon that keeps both of its models loaded."""
    text = f'keep_resident = 2\nkeep_alive = "{keep_alive}"\n[models.small]\nmodel = "{other}"\n'
    return start_daemon(*more, *settings(tmp_path, text), model=first).wait_ready()


def test_two_resident_models_take_turns_without_a_load_and_find_their_blocks(
    start_daemon, tiny_llama, other, tmp_path
):
    daemon = start_resident(other, start_daemon, tiny_llama, tmp_path)
    first, (prompt,) = daemon.state()["model"], prompts([300], seed=3)
    oracles = {first: load_oracle(tiny_llama), "small": load_oracle(other)}
    pids = set()
    for turn, model in enumerate((first, "small", first, "small", first)):
        reply = daemon.complete(prompt, model=model, max_tokens=12, ignore_eos=True)
        assert reply["model"] == model
        assert_same(prompt, reply["choices"][0]["token_ids"], oracles[model], 12)
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (0 if turn < 2 else 64 * (300 // 64)), "its pool is as it was"
        why = reply["usage"]["prompt_tokens_details"].get("cache_miss")
        assert why == (["token 0: never stored", "token 0: another model"] + [None] * 3)[turn]
        pids |= {worker["pid"] for worker in daemon.fresh_state()["workers"]}
    assert len(pids) == 4, "no process was started again"
    state = daemon.fresh_state()
    assert [(one["model"], one["expires_at"]) for one in state["swaps"]["resident"]] == [
        ("small", None)
    ]
    assert (state["totals"]["prompt_tokens"], state["totals"]["finished"]) == (1500, 5)
    running = daemon.http.get("/api/ps").json()["models"]
    assert [one["model"] for one in running] == [first, "small"]
    assert min(one["size"] for one in running) > 0
    listed = daemon.http.get("/v1/models").json()["data"]
    assert [each.get("is_loaded", True) for each in listed] == [True, True]
    cases = [(name, p) for p in prompts([5, 40, 130, 300], seed=7) for name in (first, "small")]

    def ask(case):
        name, prompt = case
        reply = daemon.complete(prompt, model=name, max_tokens=24, ignore_eos=True)
        assert_same(prompt, reply["choices"][0]["token_ids"], oracles[name], 24)

    with ThreadPoolExecutor(len(cases)) as pool:
        assert len(list(pool.map(ask, cases))) == len(cases)
    daemon.assert_all_free()
    assert daemon.stop() == 0
    assert [pid for pid in pids if is_alive(pid)] == []


def test_an_unused_resident_is_unloaded_and_a_dead_one_is_noticed(
    start_daemon, tiny_llama, other, tmp_path
):
    daemon = start_resident(other, start_daemon, tiny_llama, tmp_path, *ALONE)
    first = daemon.state()["model"]

    def resident():
        return [one["model"] for one in daemon.fresh_state()["swaps"]["resident"]]

    def load(**more):
        return daemon.http.post("/api/generate", json={"model": "small", **more}).json()

    load()
    small_pid = daemon.worker_pid("colocated")
    assert load(keep_alive="1s")["done_reason"] == "load"
    daemon.complete("a", model=first, max_tokens=2)
    daemon.wait_for(lambda: not is_alive(small_pid))
    assert resident() == []
    first_pid = daemon.worker_pid("colocated")
    load()
    assert resident() == [first]
    os.kill(first_pid, signal.SIGKILL)  # while it is loaded and not served
    daemon.wait_for(lambda: not resident())
    assert daemon.complete("a", model=first, max_tokens=2)["model"] == first
    assert resident() == ["small"]
    assert load(keep_alive=0)["done_reason"] == "unload", "it is not served before"
    assert (resident(), daemon.state()["model"]) == ([], first)
    load()
    assert load(keep_alive=0)["done_reason"] == "unload"
    daemon.wait_for(lambda: daemon.fresh_state()["model"] == first and not resident())
    events = [event["message"] for event in daemon.state()["events"]]
    assert any("unused for 1 s" in about for about in events)
    assert any("killed by SIGKILL" in about for about in events)
    daemon.assert_all_free()
    assert daemon.stop() == 0
