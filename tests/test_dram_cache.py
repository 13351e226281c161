"""Blocks in an arena below pools that are too small; what comes back gives the same tokens."""

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from tests.appliance.cli_process import penstock, user_environ
from tests.checkpoints import load_oracle, make_checkpoint
from tests.daemons import ALONE, Daemon
from tests.test_exactness import assert_same, prompts

LENGTHS = [700] * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model of which a block takes longer to compute than a few to copy."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    larger = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    make_checkpoint(folder, "llama", max_position_embeddings=1024, **larger)
    return folder, load_oracle(folder)


def start(folder, model):
    """With a pool too small for what is asked, a DRAM cache, and a disk of no more than it."""
    num_bytes = 30 * Checkpoint.open(model).config.kv_block_bytes(64, "float32")
    memory = ("--kv-memory", str(num_bytes), "--dram-cache", "64MiB", "--max-model-len", "760")
    memory = (*memory, "--ssd-cache", str(num_bytes))
    return Daemon(folder, *ALONE, *memory, model=model).wait_ready()


def ask(daemon, prompt):
    reply = daemon.complete(prompt, max_tokens=12, ignore_eos=True)
    return reply["choices"][0]["token_ids"]


def restored(daemon, asked, oracle):
    """A row of a prompt that came from DRAM; None: this time computing was taken to be quicker."""
    for prompt in asked:
        assert_same(prompt, ask(daemon, prompt), oracle, 12)
    return next((row for row in daemon.log_rows() if row["restored_tokens"]), None)


def test_what_has_left_the_pool_comes_from_dram_and_everything_says_so(served, tmp_path):
    model, oracle = served
    daemon = start(tmp_path, model)
    asked = prompts(LENGTHS)
    for prompt in asked:
        for _ in range(2):
            assert_same(prompt, ask(daemon, prompt), oracle, 12)
    row = daemon.wait_for(lambda: restored(daemon, asked, oracle))
    assert "blocks from DRAM" in row["restore_reason"]
    assert row["restore_ms"] is not None
    dram = daemon.fresh_state()["dram"]
    assert (dram["state"], dram["failed_stores"]) == ("on", 0)  # a busy machine misses deadlines
    assert min(dram["stored_blocks"], dram["loaded_blocks"]) > 0
    ssd = daemon.wait_for(
        lambda: (found := daemon.fresh_state()["ssd"])["evicted_blocks"] and found
    )
    assert 0 < ssd["num_bytes"] <= ssd["max_bytes"]
    environ = user_environ(tmp_path)
    shown = penstock(environ, "show", row["id"], "--socket", str(daemon.socket)).stdout
    assert "from DRAM" in shown
    text = daemon.http.get("/metrics").text
    assert "penstock_dram_up 1" in text
    assert 'penstock_dram_blocks_total{outcome="loaded"}' in text
    assert daemon.stop() == 0


def test_more_than_the_memory_is_refused_with_a_hint(served, tmp_path):
    model, _ = served
    asked = ("--model", str(model), "--dram-cache", "900TiB")
    done = penstock(user_environ(tmp_path), "serve", "--check-config", *asked)
    assert done.returncode == 78
    assert "--dram-cache" in done.stderr
