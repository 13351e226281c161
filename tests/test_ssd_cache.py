"""Blocks on disk outlive the daemon, however it ends; what comes back gives the same tokens."""

import shutil

import pytest

from tests.daemons import ALONE, ARMS, Daemon
from tests.test_exactness import assert_same, make_served, prompts
from tests.worlds.accelerated import AcceleratedDaemon

CACHE = ("--ssd-cache", "64MiB")
LENGTHS = [130, 513, 700]
NUM_OUTPUTS = 12
NUM_BLOCKS = sum((length - 1) // 64 for length in LENGTHS)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return make_served(tmp_path_factory, "llama")


def start(folder, model, *settings):
    daemon = Daemon(folder, *CACHE, *settings, model=model).wait_ready()
    daemon.wait_for(lambda: daemon.state()["ssd"]["state"] == "on")
    return daemon


def ask(daemon, prompt):
    reply = daemon.complete(prompt, max_tokens=NUM_OUTPUTS, ignore_eos=True)
    return reply["choices"][0]["token_ids"]


def chat(daemon, question):
    """Ask a question under a system prompt of some 200 tokens; count what was cached."""
    said = {"system": "Answer in a few words. " * 13, "user": question}
    messages = [{"role": role, "content": content} for role, content in said.items()]
    body = {"model": "", "messages": messages, "max_tokens": 2}
    reply = daemon.http.post("/v1/chat/completions", json=body, timeout=120).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def ssd(daemon):
    return daemon.state()["ssd"]


def store(daemon, asked, *, times=2):
    """Ask for prompts so often; twice is enough to have them stored."""
    for prompt in asked:
        for _ in range(times):
            ask(daemon, prompt)


def store_until(daemon, asked, is_stored):
    """Ask for prompts again and again: a store that a busy machine gave up is made when used."""

    def is_over():
        store(daemon, asked, times=1)
        return is_stored()

    daemon.wait_for(is_over, 240)


def assert_loaded(daemon):
    """Everything came from disk, but for what was quicker computed, or late on a busy machine."""
    found = ssd(daemon)
    if not found["declined_loads"] and not found["missed_deadlines"]:
        assert found["loaded_blocks"] == NUM_BLOCKS
        rows = daemon.log_rows()
        assert sum(row["restored_tokens"] for row in rows) == 64 * NUM_BLOCKS
        assert sum(row["restore_reason"] is not None for row in rows) == len(LENGTHS)
        assert sum(row["restore_ms"] is not None for row in rows) == len(LENGTHS)
    else:
        assert found["loads"] + found["declined_loads"] >= len(LENGTHS)


def test_after_kill_minus_nine_stored_prompts_come_from_disk_with_the_same_tokens(served, tmp_path):
    model, oracle = served
    asked = prompts(LENGTHS)
    daemon = start(tmp_path, model, *ARMS["shm"])
    store_until(daemon, asked, lambda: ssd(daemon)["stored_blocks"] >= NUM_BLOCKS)
    daemon.kill()
    daemon = start(tmp_path, model, *ARMS["shm"])
    for prompt in asked:
        assert_same(prompt, ask(daemon, prompt), oracle, NUM_OUTPUTS)
    assert_loaded(daemon)
    assert daemon.stop() == 0


def test_after_kill_minus_nine_a_conversation_goes_on_from_a_stored_recurrent_state(
    tmp_path, tmp_path_factory
):
    model, oracle = make_served(tmp_path_factory, "qwen3_5_text")
    (prompt,) = prompts([700])
    daemon = start(tmp_path, model, *ALONE)
    assert [chat(daemon, question) for question in ("Why?", "How?")] == [0, 192]
    first, (pool, *_) = ask(daemon, prompt), daemon.state()["pools"]
    num_blocks = 10 + pool["record_blocks"]
    store_until(daemon, [prompt], lambda: ssd(daemon)["blocks"] >= num_blocks > 10)
    daemon.kill()
    daemon = start(tmp_path, model, *ALONE)
    turn = [*prompt, *first, *prompts([90], seed=2)[0]]
    assert_same(turn, ask(daemon, turn), oracle, NUM_OUTPUTS)
    found = ssd(daemon)
    if not found["declined_loads"] and not found["missed_deadlines"]:
        (row,) = [row for row in daemon.log_rows() if row["restored_tokens"]]
        assert row["restored_tokens"] == row["cached_tokens"] == 640
    assert daemon.stop() == 0


def test_what_gpus_have_computed_is_on_disk_after_a_kill(served, tmp_path):
    """By way of the host's memory."""
    model, oracle = served
    asked = prompts(LENGTHS)

    def start_on_gpus():
        options = (*CACHE, "--dtype", "float32", "--eager")
        daemon = AcceleratedDaemon(
            tmp_path, 2, *options, reach=False, pool_bytes=8 << 20, model=model
        ).wait_ready()
        daemon.wait_for(lambda: ssd(daemon)["state"] == "on")
        return daemon

    daemon = start_on_gpus()
    store_until(daemon, asked, lambda: ssd(daemon)["stored_blocks"] >= NUM_BLOCKS)
    daemon.kill()
    daemon = start_on_gpus()
    for prompt in asked:
        assert_same(prompt, ask(daemon, prompt), oracle, NUM_OUTPUTS)
    assert_loaded(daemon)
    assert ssd(daemon)["damaged_blocks"] == 0
    assert daemon.stop() == 0


@pytest.fixture(scope="module")
def ended(served, tmp_path_factory):
    """The state of a daemon that has been asked each prompt once, and others with a salt."""
    folder = tmp_path_factory.mktemp("ended")
    daemon = start(folder, served[0], *ALONE)
    for _ in range(2):
        daemon.complete(prompts([300], seed=1)[0], max_tokens=4, cache_salt="a secret")
    store(daemon, prompts(LENGTHS), times=1)
    assert ssd(daemon)["stored_blocks"] == 0
    assert daemon.stop() == 0
    return folder / "state"


def test_a_daemon_that_ends_stores_what_it_has_computed_but_not_salted(served, ended, tmp_path):
    model, oracle = served
    asked = prompts(LENGTHS)
    shutil.copytree(ended, tmp_path / "state")
    daemon = start(tmp_path, model, *ALONE)
    # with outputs, whose last token is not computed
    assert ssd(daemon)["blocks"] == sum((length + NUM_OUTPUTS - 1) // 64 for length in LENGTHS)
    for prompt in asked:
        assert_same(prompt, ask(daemon, prompt), oracle, NUM_OUTPUTS)
    assert_loaded(daemon)
    assert daemon.stop() == 0


class HangingDaemon(Daemon):
    """Its disk takes no blocks: who writes one never comes back."""

    program = (
        "-c",
        "import threading\nfrom appliance.cli import main\n"
        "from engine.scheduler.offload import disk, copy_deadlines\n"
        "disk.Slabs.write = lambda *_: threading.Event().wait()\n"
        "patience = copy_deadlines.Context.__dataclass_fields__['patience'].default\n"
        "object.__setattr__(patience, 'store_s', 0.5)\n"
        "main()",
    )


def test_a_daemon_whose_disk_hangs_ends_in_time(served, tmp_path):
    model, _ = served
    daemon = HangingDaemon(tmp_path, *CACHE, *ALONE, model=model).wait_ready()
    daemon.wait_for(lambda: ssd(daemon)["state"] == "on")
    store(daemon, prompts(LENGTHS))
    daemon.wait_for(lambda: "ssd.down" in {alert["code"] for alert in daemon.state()["alerts"]})
    assert ask(daemon, prompts(LENGTHS)[0])
    assert daemon.stop() == 0


def test_damage_and_another_layout_are_found_out_and_computed_again(served, ended, tmp_path):
    model, oracle = served
    asked = prompts(LENGTHS)
    shutil.copytree(ended, tmp_path / "state")
    (slab,) = (tmp_path / "state" / "kv").glob("slab-*.kv")
    data = bytearray(slab.read_bytes())
    for at in range(4096 + 1000, len(data), 4096):
        data[at] ^= 1  # in every block, for none is smaller
    slab.write_bytes(data)
    daemon = start(tmp_path, model, *ALONE)
    for prompt in asked:
        assert_same(prompt, ask(daemon, prompt), oracle, NUM_OUTPUTS)
    assert ssd(daemon)["loaded_blocks"] == 0
    assert ssd(daemon)["damaged_blocks"] >= 1  # of the other prompts computing may be quicker
    assert "ssd.damaged" in {event["code"] for event in daemon.fresh_state()["events"]}
    assert daemon.stop() == 0
    daemon = start(tmp_path, model, *ALONE, "--dtype", "bfloat16")
    assert ssd(daemon)["blocks"] == 0
    (kept,) = ssd(daemon)["other_models"].values()
    assert kept > 0
    assert daemon.stop() == 0


def test_a_folder_that_cannot_hold_it_is_an_alert_and_the_daemon_serves(served, tmp_path):
    model, _ = served
    folder = tmp_path / "file"
    folder.write_text("x")
    daemon = Daemon(tmp_path, *CACHE, *ALONE, "--ssd-dir", str(folder), model=model)
    daemon.wait_ready()
    daemon.wait_for(lambda: ssd(daemon)["state"] == "failed")
    assert "file is not a folder" in ssd(daemon)["reason"]
    assert "(ssd_dir)" in ssd(daemon)["reason"]
    daemon.wait_for(lambda: "ssd.off" in {alert["code"] for alert in daemon.state()["alerts"]})
    assert ask(daemon, prompts(LENGTHS)[0])
    assert daemon.stop() == 0
