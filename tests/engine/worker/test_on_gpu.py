"""The start of workers on a GPU, up to the first tokens: alone, and two over one memory."""

import contextlib
import os

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import arena_layout
from engine.errors import CheckpointError, WorkerFailed
from engine.wire.messages import (
    Copy,
    FilledBy,
    GpuSpec,
    MapPool,
    MapShared,
    PoolMade,
    PoolSpec,
    TextModelSpec,
    Unmapped,
    WeightsComplete,
    WeightsLoaded,
    WeightsSpec,
)
from engine.worker import weight_streaming
from engine.worker.device import CudaDevice, Memory, check_allocator
from engine.worker.gpu_sizes import MIN_STEP_TOKENS, num_blocks_that_fit, step_tokens
from engine.worker.grammars import Grammars
from engine.worker.kv_pool import block_shape
from engine.worker.model import attention
from engine.worker.model import backend as backend_file
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.on_gpu import SLOW_ATTENTION, run_largest_steps
from engine.worker.runner import Runner
from engine.worker.weight_streaming import arena_views, stream_weights
from tests.checkpoints import make_checkpoint
from tests.engine.gpu_worker import BLOCK_SIZE, GpuWorker, admit, no_grammars, start_alone
from tests.live_bytes import LiveBytes
from tests.worlds.accelerator import DEVICE, FakeDevice
from tests.worlds.worker_loop import reports_in

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "one-layer"
    return Checkpoint.open(
        make_checkpoint(folder, dtype="bfloat16", num_hidden_layers=1, max_shard_size="40KB")
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 1000])
def test_streamed_weights_are_the_files_in_the_serving_dtype(
    checkpoint, dtype, piece_bytes, monkeypatch
):
    monkeypatch.setattr(weight_streaming, "PIECE_BYTES", piece_bytes)
    assert len({tensor.file for tensor in checkpoint.tensors.values()}) > 2
    stored = load_weights(checkpoint, "bfloat16", None, None, lambda *_: None)
    device, told = FakeDevice(), []
    with device.accelerator.on():
        layout = arena_layout(checkpoint, dtype)
        arena = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE)
        views = arena_views(layout, dtype, arena)
        stream_weights(checkpoint, views, device, lambda *progress: told.append(progress))
        for name, view in views.items():
            assert torch.equal(view.cpu(), stored[name].values.to(getattr(torch, dtype)))
    assert told[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workers_on_several_devices_read_each_byte_once_between_them(
    checkpoint, dtype, monkeypatch
):
    monkeypatch.setattr(weight_streaming, "PIECE_BYTES", 1000)
    num_bytes = arena_layout(checkpoint, dtype).num_bytes
    fd = os.memfd_create("weights")
    os.ftruncate(fd, num_bytes)
    workers = []
    for index in range(3):
        spec = WeightsSpec(fd, num_bytes, index, 3, is_filled=False)
        name, gpu = f"decode{index}", GpuSpec(f"GPU-{index}")
        device = FakeDevice()
        workers.append(GpuWorker(checkpoint, name, device, gpu, dtype=dtype, weights=spec))
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.enter_context(contextlib.closing(worker))
            worker.report(WeightsLoaded)
        # what each was to read is a part of the whole, and nobody else's
        assert all(worker.told[-1][0] == worker.told[-1][1] for worker in workers)
        assert sum(worker.told[-1][1] for worker in workers) == sum(
            view.nbytes for view in views_of(checkpoint, dtype).values()
        )
        for worker in workers:
            worker.send(WeightsComplete())
            worker.report(PoolMade)
            worker.loop()
        answers = [
            [token for entry in worker.run(admit()) for token in entry.token_ids]
            for worker in workers
        ]
    os.close(fd)
    with contextlib.closing(start_alone(checkpoint, FakeDevice(), dtype=dtype)) as alone:
        alone.report(PoolMade)
        alone.loop()
        expected = [token for entry in alone.run(admit()) for token in entry.token_ids]
    assert len(expected) == 12
    assert answers == [expected] * 3


def test_a_worker_that_starts_again_reads_no_file(checkpoint):
    num_bytes = arena_layout(checkpoint, "float32").num_bytes
    fd = os.memfd_create("weights")
    os.ftruncate(fd, num_bytes)
    layout = arena_layout(checkpoint, "float32")
    weight_streaming.read_share(checkpoint, "float32", layout, fd, (0, 1), lambda *_: None)
    spec = WeightsSpec(fd, num_bytes, 0, 2, is_filled=True)
    with contextlib.closing(start_alone(checkpoint, FakeDevice(), weights=spec)) as worker:
        worker.report(PoolMade)
        worker.loop()
        assert not worker.told
        tokens = [token for entry in worker.run(admit()) for token in entry.token_ids]
    os.close(fd)
    assert len(tokens) == 12


def views_of(checkpoint, dtype):
    layout = arena_layout(checkpoint, dtype)
    return arena_views(layout, dtype, torch.zeros(layout.num_bytes, dtype=torch.uint8))


def test_a_file_that_has_shrunk_is_named(tmp_path):
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    checkpoint, device = Checkpoint.open(folder), FakeDevice()
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(2000)
    with device.accelerator.on():
        layout = arena_layout(checkpoint, "float32")
        arena = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE)
        views = arena_views(layout, "float32", arena)
        with pytest.raises(CheckpointError, match="ends at 2000"):
            stream_weights(checkpoint, views, device, lambda *_: None)


@given(
    st.integers(0, 80 * GIB),
    st.integers(0, 4 * GIB),
    st.integers(1 << 16, 1 << 25),
    st.booleans(),
    st.booleans(),
)
def test_a_pool_leaves_room_for_what_is_allocated_after_it(
    free_bytes, step_bytes, block_bytes, has_graphs, is_shared
):
    options = {"static_bytes": 1 << 20, "has_graphs": has_graphs, "is_shared": is_shared}
    sizes = {"free_bytes": free_bytes, "step_bytes": step_bytes, "block_bytes": block_bytes}
    num_blocks = num_blocks_that_fit(**sizes, **options)
    assert num_blocks >= 0
    if num_blocks:
        assert free_bytes - num_blocks * block_bytes >= step_bytes * (2 if is_shared else 1)
    assert num_blocks <= num_blocks_that_fit(**sizes, **options | {"is_shared": False})


@pytest.mark.parametrize(
    "setting", ["expandable_segments:True", "max_split_size_mb:64, backend:cudaMallocAsync"]
)
def test_an_allocator_whose_memory_cannot_be_shared_is_refused(setting, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with pytest.raises(WorkerFailed) as refused:
        check_allocator()
    assert refused.value.where == "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_torch_can_use_the_worker_says_so(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with pytest.raises(WorkerFailed, match="built for the CPU"):
        CudaDevice("GPU-0")


@pytest.fixture(scope="module")
def expected(checkpoint):
    with contextlib.closing(
        start_alone(checkpoint, FakeDevice(), GpuSpec("GPU-0", has_graphs=False))
    ) as worker:
        worker.report(PoolMade)
        worker.loop()
        assert worker.started.ready.num_graphs == 0
        return [t for e in worker.run(admit()) for t in e.token_ids]


def test_attention_that_gathers_whole_tables_is_in_no_graph_and_that_is_said(checkpoint, expected):
    with contextlib.closing(start_alone(checkpoint, FakeDevice())) as worker:
        worker.report(PoolMade)
        worker.loop()
        ready = worker.started.ready
        assert (ready.num_graphs, ready.notes) == (0, [SLOW_ATTENTION])
        assert [t for e in worker.run(admit()) for t in e.token_ids] == expected


def test_a_worker_alone_makes_its_pool_and_graphs_and_steps(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(TorchBackend, "is_paged", True)
    with contextlib.closing(start_alone(checkpoint, FakeDevice())) as worker:
        made = worker.report(PoolMade)
        assert (made.num_blocks, made.memory) == (64, None)
        worker.loop()
        assert worker.started.ready.num_graphs == worker.device.num_captures > 0
        assert worker.started.ready.max_num_batched_tokens == 32
        assert worker.started.ready.sharing is None
        assert worker.told[-1][0] == worker.told[-1][1]
        tokens = [t for e in worker.run(admit()) for t in e.token_ids]
        assert tokens == expected
        assert worker.device.replayed


def test_the_pool_is_what_is_left_and_too_little_is_a_failure(checkpoint):
    block_bytes = checkpoint.config.kv_block_bytes(BLOCK_SIZE, "float32")
    gpu = GpuSpec("GPU-0", has_graphs=False)
    for spare_blocks, min_blocks, is_enough in ((10, 2, True), (10, 11, False)):  # of 64 at most
        device = FakeDevice()
        free_bytes = (512 << 20) + (1 << 20) + spare_blocks * block_bytes
        device.memory_now = Memory(free_bytes, free_bytes, 1 << 20, 2 << 20)
        spec = GpuSpec("GPU-0", min_blocks=min_blocks, has_graphs=gpu.has_graphs)
        with contextlib.closing(start_alone(checkpoint, device, spec)) as worker:
            if is_enough:
                assert worker.report(PoolMade).num_blocks == spare_blocks
                continue
            worker.thread.join()
            assert "10 KV blocks" in worker.failure.what


def test_a_pool_leaves_room_for_what_the_largest_texts_are_computed_with(checkpoint):
    block_bytes = checkpoint.config.kv_block_bytes(BLOCK_SIZE, "float32")
    texts = [
        TextModelSpec(name, "", "embedding", "float32", scratch_bytes=count * block_bytes)
        for name, count in (("small", 1), ("large", 3))
    ]
    device, free_bytes = FakeDevice(), (512 << 20) + (1 << 20) + 10 * block_bytes
    device.memory_now = Memory(free_bytes, free_bytes, 1 << 20, 2 << 20)
    gpu = GpuSpec("GPU-0", has_graphs=False)
    with contextlib.closing(start_alone(checkpoint, device, gpu, text_models=texts)) as worker:
        assert worker.report(PoolMade).num_blocks == 7


@pytest.mark.parametrize(("taken_bytes", "is_enough"), [(100 << 20, True), (500 << 20, False)])
def test_a_worker_that_starts_again_finds_its_pool_though_something_has_taken_memory(
    checkpoint, taken_bytes, is_enough
):
    block_bytes = checkpoint.config.kv_block_bytes(BLOCK_SIZE, "float32")
    device, free_bytes = FakeDevice(), (512 << 20) + (1 << 20) + 40 * block_bytes
    device.memory_now = Memory(free_bytes - taken_bytes, free_bytes, 1 << 20, 2 << 20)
    again = GpuSpec("GPU-0", min_blocks=40, has_graphs=False)
    with contextlib.closing(start_alone(checkpoint, device, again, num_blocks=40)) as worker:
        if is_enough:
            assert worker.report(PoolMade).num_blocks == 40
            return
        worker.thread.join()
        assert "40 are needed" in worker.failure.what


def test_two_workers_hand_over_through_one_memory(checkpoint, expected):
    exported = []
    devices = [FakeDevice(exported) for _ in range(2)]
    prefill = GpuWorker(checkpoint, "prefill", devices[0], GpuSpec("GPU-0", "maps"))
    decode = GpuWorker(checkpoint, "decode", devices[1], GpuSpec("GPU-0", "exports"))
    with contextlib.closing(prefill), contextlib.closing(decode):
        for worker in (prefill, decode):
            worker.report(WeightsLoaded)
            worker.send(WeightsComplete())
        made = decode.report(PoolMade)
        prefill.send(MapShared(made.memory))
        for worker in (prefill, decode):
            worker.loop()
        assert len(exported) == 2
        assert prefill.started.pools["kv"].data_ptr() == decode.started.pools["kv"].data_ptr()
        first = prefill.run(admit(until=1))
        token, computed = first[-1].token_ids[0], first[-1].num_computed_tokens
        moved = admit([token], computed)
        rest = [t for e in decode.run(moved) for t in e.token_ids]
        assert [token, *rest] == expected


def test_two_workers_hand_over_through_a_pinned_ring(checkpoint, expected):
    num_slots = 5
    fd = os.memfd_create("ring")
    os.ftruncate(fd, num_slots * checkpoint.config.kv_block_bytes(BLOCK_SIZE, "float32"))
    staging, gpu = PoolSpec("ring", fd, num_slots), GpuSpec("GPU-0", is_shared=True)
    prefill, decode = (
        GpuWorker(checkpoint, name, FakeDevice(), gpu, other=staging)
        for name in ("prefill", "decode")
    )
    with contextlib.closing(prefill), contextlib.closing(decode):
        for worker in (prefill, decode):
            worker.report(WeightsLoaded)
            worker.send(WeightsComplete())
            assert worker.report(PoolMade).memory is None
            worker.loop()
            assert worker.started.ready.sharing == "time-sliced"
            assert worker.device.pinned_memory == [worker.started.pools["ring"]]
        behind = FilledBy(1, 1, 0)
        first = prefill.run(admit(until=1), Copy(1, "kv", "ring", [(1, 3), (2, 1)], behind))
        assert first[-1].released == "moved"
        assert prefill.copied() == (1, 2)
        token, computed = first[-1].token_ids[0], first[-1].num_computed_tokens
        moved = admit([token], computed, seq_id=2)
        decode.run(Copy(7, "ring", "kv", list(zip([3, 1], moved.block_table, strict=False)), None))
        assert decode.copied() == (7, 2)
        rest = [t for e in decode.run(moved) for t in e.token_ids]
        assert [token, *rest] == expected
    os.close(fd)


@contextlib.contextmanager
def peers(checkpoint, is_broken=False):
    """Two workers with devices of their own, of which one writes into the other's pool."""
    exported = []
    devices = [FakeDevice(exported) for _ in range(2)]
    there = PoolSpec("decode", None, 64)
    prefill = GpuWorker(checkpoint, "prefill", devices[0], GpuSpec("GPU-0"), other=there)
    decode = GpuWorker(checkpoint, "decode", devices[1], GpuSpec("GPU-1", exports_pool=True))
    with contextlib.closing(prefill), contextlib.closing(decode):
        for worker in (prefill, decode):
            worker.report(WeightsLoaded)
            worker.send(WeightsComplete())
        assert prefill.report(PoolMade).memory is None
        memory = decode.report(PoolMade).memory
        if is_broken:
            memory = msgspec.structs.replace(memory, seal=b"another's")
        prefill.send(MapPool("decode", None))  # it has died and come back meanwhile
        assert prefill.report(Unmapped).pool == "decode"
        prefill.send(MapPool("decode", memory))
        for worker in (prefill, decode):
            worker.loop()
        yield prefill, decode


def test_blocks_are_written_into_the_pool_of_another_device(checkpoint, expected):
    with peers(checkpoint) as (prefill, decode):
        assert prefill.started.ready.probes["decode"] > 0
        assert decode.started.ready.probes == {}
        moved = admit(seq_id=2)
        pairs = list(zip([1, 2], moved.block_table, strict=False))
        first = prefill.run(admit(until=1), Copy(1, "kv", "decode", pairs, FilledBy(1, 1, 0)))
        assert prefill.copied() == (1, 2)
        token, computed = first[-1].token_ids[0], first[-1].num_computed_tokens
        entries = decode.run(admit([token], computed, seq_id=2))
        assert [token, *(t for e in entries for t in e.token_ids)] == expected
        prefill.run(MapPool("decode", None))
        prefill.sockets[0].settimeout(120)
        assert reports_in(prefill.sockets[0], at_least=1) == [Unmapped("decode")]


def test_a_pool_that_cannot_be_mapped_is_a_link_that_failed_and_the_worker_starts(checkpoint):
    with peers(checkpoint, is_broken=True) as (prefill, _):
        assert prefill.started.ready.probes == {"decode": 0.0}
        assert prefill.started.pools.keys() == {"kv"}


@given(
    max_tokens=st.integers(1, 1 << 15), overhead_s=st.floats(0, 1), token_s=st.floats(1e-6, 1e-3)
)
def test_a_step_has_the_fewest_tokens_at_a_good_rate(max_tokens, overhead_s, token_s):
    asked = []

    def seconds_of(size):
        asked.append(size)
        return overhead_s + size * token_s

    chosen = step_tokens(max_tokens, seconds_of)
    rates = {size: size / (overhead_s + size * token_s) for size in asked}
    assert asked[0] == max_tokens
    assert min(asked) >= min(max_tokens, MIN_STEP_TOKENS)
    assert rates[chosen] >= 0.9 * max(rates.values())
    assert all(rate < 0.9 * max(rates.values()) for n, rate in rates.items() if n < chosen)


def test_a_mapping_worker_that_starts_again_finds_what_was_computed(checkpoint, expected):
    exported = []
    decode = GpuWorker(checkpoint, "decode", FakeDevice(exported), GpuSpec("GPU-0", "exports"))
    with contextlib.closing(decode):
        decode.report(WeightsLoaded)
        decode.send(WeightsComplete())
        memory = decode.report(PoolMade).memory
        decode.loop()
        outputs, computed = [], 0
        for until in (1, 5):
            device = FakeDevice(exported)
            prefill = GpuWorker(checkpoint, "prefill", device, GpuSpec("GPU-0", "maps"))
            with contextlib.closing(prefill):
                prefill.report(WeightsLoaded)
                prefill.send(WeightsComplete())
                prefill.send(MapShared(memory))
                prefill.loop()
                entries = prefill.run(admit(outputs, computed, until))
                outputs = outputs + [t for e in entries for t in e.token_ids]
                computed = entries[-1].num_computed_tokens
        rest = [t for e in decode.run(admit(outputs, computed)) for t in e.token_ids]
        assert outputs + rest == expected


def test_a_worker_that_maps_other_memory_says_so(checkpoint):
    exported = []
    devices = [FakeDevice(exported) for _ in range(2)]
    decode = GpuWorker(checkpoint, "decode", devices[1], GpuSpec("GPU-0", "exports"))
    prefill = GpuWorker(checkpoint, "prefill", devices[0], GpuSpec("GPU-0", "maps"))
    with contextlib.closing(decode), contextlib.closing(prefill):
        for worker in (prefill, decode):
            worker.report(WeightsLoaded)
            worker.send(WeightsComplete())
        memory = decode.report(PoolMade).memory
        decode.loop()
        with devices[1].accelerator.on():
            exported[1] = torch.zeros_like(exported[1])
            devices[1].mark()()
        prefill.send(MapShared(memory))
        prefill.thread.join()
        assert "not the exported memory" in prefill.failure.what


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_no_step_needs_more_memory_than_those_tried(family, tmp_path, monkeypatch):
    """Of attention by torch, which gathers what it reads; every block is the same one."""
    monkeypatch.setattr(backend_file, "find_kernels", lambda *_: (None, "torch"))
    monkeypatch.setattr(attention, "GATHERED_TOKENS", 2048)
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "m", family, num_hidden_layers=1))
    config, longest, step_tokens = checkpoint.config, 512, 64
    weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
    model = Transformer(config, weights, "float32", longest, 16)
    pool = torch.zeros(2, *block_shape(config, 16, "float32"))
    runner = Runner(model, pool, 16, Grammars(no_grammars))
    with torch.inference_mode(), LiveBytes() as memory:
        runner.dummy_step(1, 1)
        memory.forget_peak()
        run_largest_steps(runner, step_tokens, longest)
        largest_bytes, largest = memory.peak, {}
        for how in [(200, 500, 1), (1, 500, 64), (64, 300, 1), (30, 2, 2), (3, 512, 20)]:
            memory.forget_peak()
            runner.dummy_step(*how)
            largest[how] = memory.peak
    assert max(largest.values()) <= largest_bytes, largest
