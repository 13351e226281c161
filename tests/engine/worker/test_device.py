"""Lives of graphs, their pool and their stream, on a torch.cuda that records them."""

import contextlib
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine.worker.affinity import node_of, prefer_node
from engine.worker.device import CudaDevice, finished_at_the_end
from tests.worlds.accelerator import DEVICE, FakeDevice

# Memory on a NUMA node, on a machine that has at least node 0.


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
from engine.worker.affinity import use_cores
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


# --------------------------------------------------------------------------------------------------


class FakeCuda:
    """What CudaDevice.capture asks of torch.cuda, with the rules that torch 2.11 asserts."""

    def __init__(self):
        self.graphs, self.streams, self.workspaces = [], [], set()
        self.main = self.current = SimpleNamespace(wait_stream=lambda other: None)
        self.warmed, self.captured = [], []
        """Streams of steps run, and of steps captured."""
        self.events = []
        self.done = []
        """In order."""

    def Stream(self):  # noqa: N802
        self.streams.append(SimpleNamespace(wait_stream=lambda other: None))
        return self.streams[-1]

    def Event(self, enable_timing=False, blocking=False):  # noqa: N802
        event = SimpleNamespace(is_blocking=blocking, calls=[])
        event.record = lambda: event.calls.append(("record", self.current))
        event.synchronize = lambda: event.calls.append(("synchronize", self.current))
        self.events.append(event)
        return event

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self):  # noqa: N802
        graph = _Graph(self)
        self.graphs.append(weakref.ref(graph))
        return graph

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None):
        live = [g for ref in self.graphs if (g := ref()) is not None and g is not graph]
        if pool is not None and not any(g.own_pool is pool for g in live):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # its last graph has died
        graph.own_pool = pool or object()
        with self.stream(stream or object()):
            self.is_capturing = True
            yield
            self.is_capturing = False

    is_capturing = False

    def synchronize(self):
        self.done.append("synchronize")

    def step(self):
        """As a product does: the first on a stream sets up a workspace that stays."""
        (self.captured if self.is_capturing else self.warmed).append(self.current)
        self.workspaces.add(id(self.current))


class _Graph:
    def __init__(self, cuda):
        self.own_pool = None

    def pool(self):
        return self.own_pool

    def replay(self):
        pass


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    names = "Stream", "Event", "current_stream", "stream", "CUDAGraph", "graph", "synchronize"
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr("engine.worker.device._index_of", lambda uuid: 0)
    monkeypatch.setattr("engine.worker.device.check_allocator", lambda: None)
    return cuda


def test_all_graphs_are_warmed_up_and_recorded_on_one_stream_into_one_pool(cuda):
    device = CudaDevice("GPU-0")
    replays = [device.capture(cuda.step) for _ in range(4)]
    assert len(cuda.workspaces) == 1
    assert len({*map(id, cuda.warmed), *map(id, cuda.captured)}) == 1
    assert cuda.captured[0] is not cuda.main
    assert len(cuda.captured) == len(replays)
    assert len({id(ref().own_pool) for ref in cuda.graphs}) == 1
    assert cuda.current is cuda.main


def test_a_graph_outlives_whoever_has_dropped_its_replay_and_the_pool_goes_on(cuda):
    device = CudaDevice("GPU-0")
    for _ in range(3):  # as a bench captures one kernel after the other
        device.capture(cuda.step)
        gc.collect()
    assert all(ref() is not None for ref in cuda.graphs)


def test_who_waits_for_a_step_sleeps_until_an_event_behind_it(cuda):
    # an event that is not blocking spins: a hung device would look like a worker that computes
    wait = CudaDevice("GPU-0").mark()
    (event,) = cuda.events
    assert event.is_blocking
    assert event.calls == [("record", cuda.main)]
    wait()
    assert event.calls[1:] == [("synchronize", cuda.main)]


def test_products_in_halves_are_added_up_in_float32(cuda, monkeypatch):
    settings = SimpleNamespace(
        allow_bf16_reduced_precision_reduction=True, allow_fp16_reduced_precision_reduction=True
    )
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    CudaDevice("GPU-0")
    assert set(vars(settings).values()) == {False}


class SharedStorage:
    """What torch's storages on a GPU do for CUDA IPC: an event if it is asked for."""

    def __init__(self, cuda):
        self.cuda = cuda

    def untyped_storage(self):
        return self

    def _share_cuda_(self):
        self.cuda.done.append("share")
        return 1, b"handle", 64, 0, b"counter", 3, b"event", True

    def _new_shared_cuda(self, *where):
        self.cuda.done.append(where)
        return torch.zeros(8, dtype=torch.uint8).untyped_storage()


def test_shared_memory_is_complete_when_it_is_exported_and_no_event_is_opened(cuda, monkeypatch):
    device, storage = CudaDevice("GPU-0"), SharedStorage(cuda)
    exported = device.export(storage)
    assert cuda.done == ["synchronize", "share"]
    monkeypatch.setattr(torch, "UntypedStorage", storage)
    monkeypatch.setattr(device, "torch_device", SimpleNamespace(index=0))
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **kinds: torch.zeros(0, **kinds))
    device.map(exported)
    device_index, *_, has_event = cuda.done[-1]
    assert (device_index, has_event) == (0, False)


def test_a_worker_that_fails_has_waited_for_its_device():
    device = FakeDevice()
    with device.accelerator.on():
        with pytest.raises(ZeroDivisionError), finished_at_the_end(device):  # noqa: PT012
            torch.ones(3, device=DEVICE)
            1 / 0  # noqa: B018
        assert device.accelerator.num_done == device.accelerator.num_launched > 0


class Timeline:
    """Events and copies of one stream by the host's clock: each copy takes a made-up time."""

    def __init__(self):
        self.free_at_ns = 0

    def Event(self, enable_timing=False, blocking=False):  # noqa: N802
        event = SimpleNamespace(at_ns=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ns", max(time.monotonic_ns(), self.free_at_ns))
        event.elapsed_time = lambda end: (end.at_ns - event.at_ns) / 1e6
        return event

    def copy(self, elapsed_ns):
        self.free_at_ns = max(time.monotonic_ns(), self.free_at_ns) + elapsed_ns


NUM_COPIES, COPY_NS = 16, 24_000
"""Blocks of 8 MiB over NVLink."""


def copied_beside(device, timeline, pause_s=None):
    with device.beside() as taken:
        for _ in range(NUM_COPIES):
            timeline.copy(COPY_NS)
            if pause_s is not None:
                time.sleep(pause_s)  # lets go of the lock, as torch does in each copy
    return taken


def test_copies_beside_a_thread_that_hogs_the_lock_say_nothing_of_their_link(cuda, monkeypatch):
    timeline = Timeline()
    monkeypatch.setattr(torch.cuda, "Event", timeline.Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    device, stop = CudaDevice("GPU-0"), threading.Event()

    def hog():
        while not stop.is_set():
            pass

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        assert copied_beside(device, timeline, pause_s=1e-4).reliable_ns is None
    finally:
        stop.set()
        thread.join()
    undisturbed = (copied_beside(device, timeline).reliable_ns for _ in range(1000))
    elapsed_ns = next(x for x in undisturbed if x is not None)
    assert elapsed_ns >= NUM_COPIES * COPY_NS
