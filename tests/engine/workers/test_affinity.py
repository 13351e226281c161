"""Memory on a NUMA node, on a machine that has at least node 0."""

import mmap
import os
import subprocess
import sys

import pytest
import torch

from engine.workers.device import node_of, prefer_node


def shared_memory(num_bytes=1 << 20):
    fd = os.memfd_create("test")
    os.ftruncate(fd, num_bytes)
    memory = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    os.close(fd)
    return memory


def test_memory_is_on_the_node_that_is_asked_for_or_that_is_said():
    memory = shared_memory()
    refused = prefer_node(memory, 0)  # which a container may not be allowed to ask for
    memory.fill_(1)
    assert node_of(memory) in (0, None) or refused


def test_a_node_that_is_not_there_is_said_and_the_memory_is_good():
    memory = shared_memory()
    assert "NUMA node 1000" in prefer_node(memory, 1000)
    memory.fill_(7)
    assert memory.sum() == 7 * memory.numel()


# --------------------------------------------------------------------------------------------------
# Cores of a real process; the test's own would not come back to those it had.

SCRIPT = """
import os, threading, torch
from engine.workers.device import use_cores
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
