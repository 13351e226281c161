"""Two GPUs, one worker each: the link is proved at start, answers are those of one, deaths pass."""

import os
import signal

import pytest
import torch

from tests.daemons import Daemon, is_alive

PROMPTS = [[(5 * i + 3 * j) % 280 + 5 for j in range(300 + 90 * i)] for i in range(3)]
READY_S = 300

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def answers(daemon):
    replies = [daemon.complete(prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    return [reply["choices"][0]["token_ids"] for reply in replies]


def serve(folder, checkpoint, dtype, *args):
    daemon = Daemon(folder, "--dtype", dtype, *args, model=checkpoint.folder)
    daemon.ready_s = READY_S
    return daemon.wait_ready()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_blocks_go_from_one_gpu_to_the_other(checkpoint, transport, dtype, tmp_path):
    alone = serve(tmp_path / "one", checkpoint, dtype, "--devices", "cuda:0")
    try:
        expected = answers(alone)
    finally:
        alone.stop()
    place = "prefill=cuda:0 decode=cuda:1"
    options = ["--place", place, "--transport", transport, "--roles", "static"]
    daemon = serve(tmp_path / "two", checkpoint, dtype, *options)
    try:
        (link,) = daemon.fresh_state()["links"]
        assert link["down"] is None
        assert link["probe_bytes_per_s"] > 0
        print(f"{link['transport']}: {link['probe_bytes_per_s'] / 1e9:.1f} GB/s there and back")
        assert answers(daemon) == expected
        assert {row["transport"] for row in daemon.log_rows()} == {link["transport"]}
        for name in ("decode", "prefill"):
            pid = daemon.worker_pid(name)
            os.kill(pid, signal.SIGKILL)
            daemon.wait_for(lambda pid=pid: not is_alive(pid))
            assert answers(daemon) == expected
        daemon.assert_all_free()
    finally:
        daemon.stop()
