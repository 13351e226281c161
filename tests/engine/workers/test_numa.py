"""Memory on a NUMA node, on a machine that has at least node 0."""

import mmap
import os

import torch

from engine.workers.affinity import node_of, prefer_node


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
