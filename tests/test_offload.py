"""Weights on disk: the same tokens as from memory, a file that is written once, figures of both."""

import os
import signal

import pytest

from tests.checkpoints import make_checkpoint
from tests.daemons import ARMS, Daemon

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64}
ON_DISK = ("--offload-weights", "2MiB")
PROMPTS = [list(range(7, 7 + length)) for length in (5, 70, 150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("models") / "model", **SIZES, max_position_embeddings=512
    )


def replies(daemon):
    asked = {"max_tokens": 16, "ignore_eos": True, "temperature": 0}
    return [daemon.complete(prompt, **asked)["choices"][0]["token_ids"] for prompt in PROMPTS]


@pytest.mark.parametrize(("weights", "arm"), [("q8", "elastic"), ("stored", "colocated")])
def test_replies_are_the_same_and_packed_weights_are_written_once(folder, tmp_path, weights, arm):
    settings = ["--dtype", "float32", "--weights", weights, *ARMS[arm]]
    daemon = Daemon(tmp_path, *settings, model=folder).wait_ready()
    expected = replies(daemon)
    assert daemon.state()["offload"] is None
    assert daemon.stop() == 0
    is_packed = weights != "stored"  # the rest is mapped from the model's files
    written = []
    for _ in range(1 + is_packed):
        daemon = Daemon(tmp_path, *settings, *ON_DISK, model=folder).wait_ready()
        assert replies(daemon) == expected
        offload = daemon.fresh_state()["offload"]
        assert 2 << 20 <= offload["disk_bytes"] < offload["weights_bytes"]
        assert offload["resident_bytes"] is None or offload["resident_bytes"] > 0
        found = list((tmp_path / "state" / "kv" / "weights").glob("*"))
        assert len(found) == is_packed
        written += [(path.suffix, path.stat().st_ino) for path in found]
        if found:  # a worker that dies finds them again
            os.kill(daemon.worker_pid("decode"), signal.SIGKILL)
            assert replies(daemon) == expected
            assert daemon.fresh_state()["workers"][-1]["num_restarts"] == 1
        assert daemon.stop() == 0
    assert len(set(written)) == is_packed
    assert all(suffix == ".weights" for suffix, _ in written)
