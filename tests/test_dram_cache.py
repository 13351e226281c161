"""Blocks in an arena below pools that are too small; what comes back gives the same tokens."""

import pytest

from engine.checkpoint import Checkpoint
from tests.appliance.cli_process import penstock, user_environ
from tests.daemons import ARMS, MANY, Daemon
from tests.test_exactness import assert_same, make_served, prompts

LENGTHS = [700] * 5
ALL = {**ARMS, **MANY}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return make_served(tmp_path_factory, "llama")


NUM_BLOCKS = {"shm": 72, "2x2": 100}
"""Of all pools; each is too small for what is asked. Elsewhere there is one, of half of it."""


def start(folder, model, arm, *settings):
    """With small pools and a DRAM cache."""
    num_blocks = NUM_BLOCKS.get(arm, 36)
    num_bytes = num_blocks * Checkpoint.open(model).config.kv_block_bytes(64, "float32")
    memory = ("--kv-memory", str(num_bytes), "--dram-cache", "64MiB", "--max-model-len", "760")
    return Daemon(folder, *ALL[arm], *memory, *settings, model=model).wait_ready()


def ask(daemon, prompt):
    reply = daemon.complete(prompt, max_tokens=12, ignore_eos=True)
    return reply["choices"][0]["token_ids"]


@pytest.mark.parametrize("arm", ["colocated", "alias", "shm", "elastic", "2x2"])
def test_what_has_left_the_pool_comes_from_dram_with_the_same_tokens(arm, served, tmp_path):
    model, oracle = served
    daemon = start(tmp_path, model, arm)
    asked = prompts(LENGTHS)
    for prompt in asked:
        for _ in range(2):
            assert_same(prompt, ask(daemon, prompt), oracle, 12)
    for prompt in asked:
        assert_same(prompt, ask(daemon, prompt), oracle, 12)
    dram = daemon.fresh_state()["dram"]
    assert (dram["state"], dram["failed_stores"], dram["missed_deadlines"]) == ("on", 0, 0)
    assert dram["stored_blocks"]
    assert dram["loaded_blocks"] or dram["declined_loads"]
    assert daemon.stop() == 0


def test_show_and_metrics_say_that_blocks_came_from_dram(served, tmp_path):
    model, oracle = served
    daemon = start(tmp_path, model, "alias")
    asked = prompts(LENGTHS)
    for prompt in asked:
        for _ in range(2):
            ask(daemon, prompt)

    def restored():
        for prompt in asked:
            assert_same(prompt, ask(daemon, prompt), oracle, 12)
        rows = daemon.log_rows()
        return next((row for row in rows if row["restored_tokens"]), None)

    row = daemon.wait_for(restored)  # on a busy machine computing may be taken to be quicker
    assert "blocks from DRAM" in row["restore_reason"]
    assert row["restore_ms"] is not None
    environ = user_environ(tmp_path)
    shown = penstock(environ, "show", row["id"], "--socket", str(daemon.socket)).stdout
    assert "from DRAM" in shown
    text = daemon.http.get("/metrics").text
    assert "penstock_dram_up 1" in text
    assert 'penstock_dram_blocks_total{outcome="loaded"}' in text
    assert daemon.stop() == 0


def test_on_cpus_there_is_none_unless_it_is_asked_for(served, tmp_path):
    model, _ = served
    daemon = Daemon(tmp_path, *ARMS["alias"], model=model).wait_ready()
    assert daemon.fresh_state()["dram"] is None
    assert daemon.stop() == 0


def test_more_than_the_memory_is_refused_with_a_hint(served, tmp_path):
    model, _ = served
    asked = ("--model", str(model), "--dram-cache", "900TiB")
    done = penstock(user_environ(tmp_path), "serve", "--check-config", *asked)
    assert done.returncode == 78
    assert "dram_cache" in done.stderr
