"""Blocks between pools, and the try at start."""

import contextlib
import mmap
import os
import platform
import time
import weakref
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import WorkerFailed
from engine.wire.messages import Admit, Copy, FilledBy, Unmapped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker import copying
from engine.worker.copying import Copier, copy_blocks, probe
from engine.worker.device import DeviceTime
from engine.worker.worker_request import WorkerRequest
from tests.worlds.accelerator import DEVICE, FakeDevice

SHAPE = (2, 2, 4, 1, 8)


def pool_and_staging(dtype=torch.float32):
    return torch.randn(6, *SHAPE).to(dtype), torch.randn(4, *SHAPE).to(dtype)


def test_copy_blocks_copies_whole_blocks_in_order():
    source, target = torch.rand(4, 2, 2, 3, 1, 5), torch.zeros(6, 2, 2, 3, 1, 5)
    num_bytes, _ = copy_blocks(source, target, [(3, 5), (1, 2)])
    assert target[5].equal(source[3])
    assert target[2].equal(source[1])
    assert num_bytes == 2 * source[0].numel() * 4
    assert not target[[0, 1, 3, 4]].any()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_blocks_that_follow_each_other_are_copied_as_each_would_be(pairs):
    source, target = torch.rand(6, *SHAPE), torch.zeros(6, *SHAPE)
    expected = target.clone()
    for from_id, to_id in pairs:
        expected[to_id] = source[from_id]
    assert copy_blocks(source, target, pairs)[0] == len(pairs) * source[0].nbytes
    assert target.equal(expected)


def test_copied_blocks_are_there_with_all_layers_also_on_a_device():
    pool, staging = pool_and_staging()
    device = FakeDevice()
    with device.accelerator.on():
        on_device = pool.to(DEVICE)
        assert copy_blocks(on_device, staging, [(5, 1), (2, 3)], device)[0] == 2 * pool[0].nbytes
        assert copy_blocks(staging, on_device, [(3, 4)], device)[0] == pool[0].nbytes
        assert torch.equal(on_device[4].cpu(), pool[2])
    assert torch.equal(staging[1], pool[5])
    assert torch.equal(staging[3], pool[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_try_touches_nobodys_block_and_says_how_fast_it_was(dtype):
    pool, staging = pool_and_staging(dtype)
    pool_before, staging_before = pool.clone(), staging.clone()
    assert probe(pool, staging) > 0
    assert torch.equal(pool, pool_before)
    assert torch.equal(staging[1:], staging_before[1:])


def test_a_try_outlasts_another_worker_that_writes_its_padding_meanwhile(monkeypatch):
    writes = iter(range(40))

    def disturbed(source, target, pairs, device=None):
        copied = copy_blocks(source, target, pairs, device)
        if target is staging and next(writes, None) is not None:
            staging[0].fill_(-1)
        return copied

    pool, staging = pool_and_staging()
    monkeypatch.setattr(copying, "copy_blocks", disturbed)
    monkeypatch.setattr(copying, "_PROBE_PATIENCE_S", 60.0)
    assert probe(pool, staging) > 0
    assert next(writes, None) is None


def test_a_ring_that_loses_a_byte_is_found_out(monkeypatch):
    def lossy(source, target, pairs, device=None):
        copied = copy_blocks(source, target, pairs, device)
        target[pairs[0][1]].view(-1)[-1] = 300
        return copied

    monkeypatch.setattr(copying, "copy_blocks", lossy)
    monkeypatch.setattr(copying, "_PROBE_PATIENCE_S", 0.0)
    with pytest.raises(WorkerFailed, match="came back changed"):
        probe(*pool_and_staging())


def test_a_pool_that_is_mapped_anew_takes_what_comes_after_and_nothing_before():
    old, new, own = (torch.zeros(3, 1, 2, 4, 1, 4) for _ in range(3))
    own[1], own[2] = 1, 2
    sent = Queue()
    copier = Copier({"own": own, "decode": old}, 4, sent.put)

    def answer():
        copier.work(time.monotonic_ns() + 60_000_000_000)
        return sent.get(timeout=120)

    def copy(number, pairs):
        copier.take(Copy(number, "own", "decode", pairs, None), None)
        return answer()

    assert copy(1, [(1, 1)]).error is None
    copier.remap("decode", None)
    assert answer() == Unmapped("decode")
    failed = copy(2, [(1, 2)])
    assert (failed.num_pairs, failed.is_last) == (0, True)
    assert failed.error
    copier.remap("decode", lambda: new)
    assert copy(3, [(2, 2)]).error is None
    assert torch.equal(old[1], own[1])
    assert not old[2].any()
    assert not new[1].any()
    assert torch.equal(new[2], own[2])


LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(LINUX < (5, 14), reason="madvise() has no MADV_POPULATE_WRITE")
def test_pages_of_a_copys_target_are_made_before_there_is_something_to_copy():
    shape = (1, 2, 64, 1, 50)  # a block is 6.25 pages
    num_bytes, block_bytes = 40 * 25_600, 25_600
    fd = os.memfd_create("pool")
    os.ftruncate(fd, num_bytes)
    memory = mmap.mmap(fd, num_bytes)
    target = torch.frombuffer(memory, dtype=torch.float32).view(40, *shape)
    source = torch.rand(40, *shape)
    target[30] = 7.0
    before = os.fstat(fd).st_blocks
    copier = Copier({"kv": source, "other": target}, 64, lambda report: None)
    pairs = [(3, 10), (4, 11), (5, 12), (6, 30)]
    sampling = SamplingParams(max_tokens=1, seed=0)
    waiting = WorkerRequest.of(
        Admit(1, 1, [7] * 200, 200, 0, [3, 4, 5, 6], RunSpec(sampling), 1), (), 0
    )
    copier.take(Copy(1, "kv", "other", pairs, FilledBy(1, 1, 0)), waiting)

    def made_bytes():
        return 512 * (os.fstat(fd).st_blocks - before)

    while made_bytes() < 3 * block_bytes:
        time.sleep(0.001)
    assert made_bytes() < 5 * block_bytes
    assert not copier.has_work
    assert not target[10:13].any()
    assert target[30].eq(7.0).all()


@pytest.mark.parametrize("num_pairs", [3, 2 * copying.REPORTED_PAIRS + 1])
def test_a_copy_that_fails_is_over_once_and_the_next_is_made(num_pairs):
    pool, other = torch.rand(40, *SHAPE), torch.zeros(40, *SHAPE)
    reports = []
    copier = Copier({"kv": pool, "other": other}, 4, reports.append)
    pairs = [(i, i) for i in range(num_pairs)]
    copier.take(Copy(1, "kv", "gone", pairs, None), None)
    copier.take(Copy(2, "kv", "other", pairs, None), None)
    while copier.has_work:
        copier.work(time.monotonic_ns())
    failed, *copied = reports
    assert (failed.copy_id, failed.num_pairs, failed.is_last) == (1, 0, True)
    assert "gone" in failed.error
    assert {report.copy_id for report in copied} == {2}
    assert [report.is_last for report in copied] == [False] * (len(copied) - 1) + [True]
    assert sum(report.num_pairs for report in copied) == num_pairs
    assert other[:num_pairs].equal(pool[:num_pairs])


@pytest.mark.parametrize(("waited_ns", "told_ns"), [(0, 1000), (250, 1000), (251, None)])
def test_what_a_copy_took_is_told_by_the_devices_clock_unless_the_host_was_late(waited_ns, told_ns):
    @contextlib.contextmanager
    def beside():
        yield DeviceTime(1000, waited_ns)

    sent = Queue()
    pools = {"a": torch.rand(3, *SHAPE), "b": torch.zeros(3, *SHAPE)}
    copier = Copier(pools, 4, sent.put, SimpleNamespace(beside=beside))
    copier.take(Copy(1, "a", "b", [(1, 2)], None), None)
    assert sent.get(timeout=120).link_ns == told_ns


def test_a_devices_link_is_tried_with_bytes_enough_to_hide_what_one_copy_costs(monkeypatch):
    """A made-up link: each pass takes 100 us of the device's time, and 1 us more for each byte."""
    sizes = []

    @contextlib.contextmanager
    def beside():
        yield DeviceTime(sizes[-1])

    def counted(source, target, pairs, device=None):
        sizes.append(100_000 + 1000 * len(pairs) * source[0].nbytes)
        return copy_blocks(source, target, pairs, device)

    device = SimpleNamespace(beside=beside, mark=lambda: lambda: None)
    monkeypatch.setattr(copying, "copy_blocks", counted)
    rate = probe(*pool_and_staging(), device)
    assert 0.99e6 < rate <= 1e6


def test_memory_of_another_worker_is_let_go_of_before_that_is_said():
    """Whoever made it starts again as soon as that is said, and needs the room."""
    closed, sent = [], Queue()

    def start():  # as a worker's start does, which hands its pools over and ends
        mapping = mmap.mmap(-1, 6 * torch.empty(SHAPE).nbytes)
        weakref.finalize(mapping, closed.append, "closed")
        other = torch.frombuffer(mapping, dtype=torch.float32).view(6, *SHAPE)
        return SimpleNamespace(pools={"own": torch.rand(6, *SHAPE), "other": other})

    started = start()  # which lives as long as the worker
    copier = Copier(started.pools, 4, lambda report: sent.put((report, list(closed))), FakeDevice())
    copier.take(Copy(1, "own", "other", [(1, 2)], None), None)
    copier.remap("other", None)
    assert sent.get(timeout=120)[0].num_pairs == 1
    assert sent.get(timeout=120) == (Unmapped("other"), ["closed"])
