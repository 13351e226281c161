"""Cores of a real process; the test's own would not come back to those it had."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading, torch
from engine.workers.affinity import use_cores
cpus = sorted(os.sched_getaffinity(0))[:2]
stop = threading.Event()
other = threading.Thread(target=stop.wait, daemon=True)
other.start()
a = torch.rand(8, 200, 200)
expected = None
for chosen in (cpus[:1], cpus, cpus[1:], cpus, cpus[:1]):
    use_cores(chosen)
    product = a @ a
    assert expected is None or torch.allclose(product, expected, rtol=1e-5)
    expected = product
    assert torch.get_num_threads() == len(chosen)
    masks = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
    assert masks == {tuple(chosen)}, masks
stop.set()
print("ok")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_and_their_number_follow_the_cores_back_and_forth():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stdout == "ok\n", ended.stderr
