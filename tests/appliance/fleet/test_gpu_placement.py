"""Which GPUs serve, and how workers are laid out on one."""

from dataclasses import replace

import pytest

from appliance.devices.gpu_list import Gpu, list_gpus
from appliance.devices.nvml import Nvml
from appliance.fleet.gpu_placement import PREFILL_PERCENT, choose_gpus, name_gpus, place_on_gpu
from appliance.fleet.placement import BLOCK_SIZE
from appliance.fleet.spread import GPU_STEP_TOKENS
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype
from engine.errors import ConfigError
from engine.kernels.attention_backends import Machine
from tests.appliance.fake_nvml import FakeNvml as FakeMachine
from tests.appliance.fake_nvml import a100_divided, h100

GPUS = [Gpu(f"gpu{i}", "Test", f"GPU-{i}", 16 << 30, (9, 0)) for i in range(2)]
CUDA, CPU = "2.11.0+cu130", "2.13.0+cpu"


def test_without_a_gpu_it_serves_on_cores_and_says_nothing():
    assert choose_gpus("auto", [], CUDA) == ([], None)


def test_a_gpu_is_used_where_torch_can():
    assert choose_gpus("auto", GPUS[:1], CUDA) == (GPUS[:1], None)
    gpus, about = choose_gpus("auto", GPUS[:1], CPU)
    assert gpus == []
    assert "gpu0 not used" in about
    assert choose_gpus("cpu", GPUS, CUDA) == ([], None)


def test_all_gpus_of_a_kind_serve_and_others_are_named():
    assert choose_gpus("auto", GPUS, CUDA) == (GPUS, None)
    small = replace(GPUS[0], model="Another", memory_bytes=2 << 30)
    gpus, about = choose_gpus("auto", [small, GPUS[1]], CUDA)
    assert gpus == GPUS[1:]
    assert about.startswith("gpu0 not used")
    assert about.endswith("Test")
    assert choose_gpus("gpu1", GPUS, CUDA) == (GPUS[1:], None)
    assert choose_gpus("gpu1,gpu0", GPUS, CUDA) == ([GPUS[1], GPUS[0]], None)


def test_a_gpu_is_named_by_cudas_number_or_by_its_uuid():
    numbered = [replace(GPUS[0], obstacle="hidden"), replace(GPUS[1], cuda_index=0)]
    for name in ("cuda:0", "gpu1", "GPU-1"):
        assert name_gpus([name], numbered, CUDA, "place") == numbered[1:]
    with pytest.raises(ConfigError, match="several are called GPU-"):
        name_gpus(["GPU-"], GPUS, CUDA, "place")
    with pytest.raises(ConfigError, match="there is no cuda:1"):
        name_gpus(["cuda:1"], numbered, CUDA, "place")


@pytest.mark.parametrize(("found", "torch"), [(GPUS[:1], CUDA), (GPUS, CPU), ([], CUDA)])
def test_a_gpu_that_is_asked_for_and_cannot_be_had_is_an_error(found, torch):
    with pytest.raises(ConfigError) as refused:
        choose_gpus("gpu1", found, torch)
    assert refused.value.where == "devices"
    assert refused.value.hint


def test_a_hidden_or_divided_gpu_is_passed_over_for_the_next_one():
    hidden = replace(GPUS[0], obstacle="CUDA_VISIBLE_DEVICES hides it")
    gpus, about = choose_gpus("auto", [hidden, GPUS[1]], CUDA)
    assert gpus == GPUS[1:]
    assert about.startswith("gpu0 not used")
    assert "CUDA_VISIBLE_DEVICES" in about
    gpus, about = choose_gpus("auto", [hidden], CUDA)
    assert gpus == []
    with pytest.raises(ConfigError, match="gpu0: CUDA_VISIBLE_DEVICES hides it"):
        choose_gpus("gpu0", [hidden, GPUS[1]], CUDA)


def test_instances_of_a_divided_gpu_are_listed_in_its_place():
    listed = list_gpus(Nvml(FakeMachine(a100_divided(), h100())), visible=None)
    assert [(gpu.name, gpu.uuid, gpu.obstacle) for gpu in listed] == [
        ("gpu0/mig0", "MIG-0-3", None),
        ("gpu0/mig2", "MIG-2-5", None),
        ("gpu1", "GPU-h100", None),
    ]
    assert {gpu.capability for gpu in listed} == {(9, 0)}
    assert listed[0].memory_bytes == 20 << 30
    bare = a100_divided()
    bare.instances.clear()
    (gpu,) = list_gpus(Nvml(FakeMachine(bare)), visible=None)
    assert "MIG" in gpu.obstacle


@pytest.mark.parametrize(
    ("visible", "used"),
    [
        (None, ["gpu0", "gpu1", "gpu2"]),
        ("", []),
        ("-1", []),
        ("1", ["gpu1"]),
        ("2,0", ["gpu0", "gpu2"]),
        ("1,-1,2", ["gpu1"]),
        ("GPU-h", ["gpu0"]),
        ("GPU-nobodys,1", []),
        ("7,1", []),
    ],
)
def test_what_cuda_would_not_see_is_hidden(visible, used):
    gpus = [h100(), h100(), h100()]
    for index, gpu in enumerate(gpus[1:], 1):
        gpu.uuid = f"GPU-{index}"
    listed = list_gpus(Nvml(FakeMachine(*gpus)), visible=visible)
    assert [gpu.name for gpu in listed if gpu.obstacle is None] == used
    order = [gpu.name for gpu in sorted(listed, key=lambda gpu: gpu.cuda_index or 0)]
    assert visible != "2,0" or order.index("gpu2") < order.index("gpu0")
    assert len(listed) == 3


def test_an_instance_is_visible_by_its_own_name_alone():
    listed = list_gpus(Nvml(FakeMachine(a100_divided())), visible="MIG-2")
    assert [gpu.uuid for gpu in listed if gpu.obstacle is None] == ["MIG-2-5"]


def place(checkpoint, **changes):
    options = {
        "machine": Machine((2, 11), {"flash_attn": "no flash_attn"}, (9, 0)),
        "dtype": "bfloat16",
        "roles": "auto",
        "transport": "auto",
        "kv_memory_bytes": None,
        "max_model_len": None,
        "cores": [0, 1],
    }
    return place_on_gpu(checkpoint, GPUS[0], **options | changes)


@pytest.fixture(scope="module")
def checkpoint(tiny_llama):
    return Checkpoint.open(tiny_llama)


def test_one_gpu_is_one_worker_unless_roles_are_asked_for(checkpoint):
    placement = place(checkpoint)
    (worker,) = placement.workers
    assert (worker.name, worker.device, worker.shares) == ("colocated", "gpu0", None)
    assert placement.topology.is_colocated
    assert placement.max_num_batched_tokens == GPU_STEP_TOKENS
    assert placement.topology.home_of("kv") == "colocated"


@pytest.mark.parametrize("roles", ["static", "elastic"])
def test_two_workers_on_a_gpu_share_what_the_decoding_one_exports(checkpoint, roles):
    placement = place(checkpoint, roles=roles)
    prefill, decode = placement.workers
    assert (prefill.shares, decode.shares) == ("maps", "exports")
    assert prefill.pool == decode.pool == "kv"
    assert prefill.cpus != decode.cpus
    assert placement.topology.transport == "alias"
    assert placement.topology.home_of("kv") == "decode"


@pytest.mark.parametrize("roles", ["auto", "elastic"])
def test_two_workers_that_copy_have_pools_of_their_own_and_a_ring(checkpoint, roles):
    placement = place(checkpoint, roles=roles, transport="shm")
    prefill, decode = placement.workers
    assert (prefill.shares, decode.shares) == (None, None)
    assert (prefill.pool, decode.pool) == ("prefill", "decode")
    homes = {pool.name: pool.home for pool in placement.topology.pools}
    assert homes == {"prefill": "prefill", "decode": "decode", "ring": None}
    num_blocks = sum(pool.num_blocks for pool in placement.topology.pools)
    num_bytes = num_blocks * placement.block_bytes
    assert num_bytes + 2 * checkpoint.num_bytes <= GPUS[0].memory_bytes


def test_by_mps_the_one_that_prefills_leaves_processors_to_the_other(checkpoint):
    workers = place(checkpoint, roles="static", has_mps=True).workers
    assert [worker.mps_percent for worker in workers] == [PREFILL_PERCENT, None]
    assert [w.mps_percent for w in place(checkpoint, roles="static").workers] == [None, None]
    assert "compute at once" in place(checkpoint, roles="static", has_mps=True).reasons[0]


def test_one_worker_copies_nothing(checkpoint):
    placement = place(checkpoint, roles="colocated", transport="shm")
    assert placement.topology.pool_by_name.keys() == {"kv"}
    assert place(checkpoint, transport="alias").topology.transport == "alias"


def test_the_pool_is_bounded_by_what_is_asked_for_and_by_what_is_of_use(checkpoint):
    block_bytes = checkpoint.config.kv_block_bytes(BLOCK_SIZE, "bfloat16")
    asked = place(checkpoint, kv_memory_bytes=10 * block_bytes)
    assert [pool.num_blocks for pool in asked.topology.pools] == [10]
    useful = place(checkpoint, max_model_len=BLOCK_SIZE)
    assert [pool.num_blocks for pool in useful.topology.pools] == [257]


def test_a_block_is_as_large_as_the_attention_wants_it(checkpoint):
    assert place(checkpoint).block_size == BLOCK_SIZE
    with_flash = Machine((2, 11), {}, (9, 0))
    placement = place(checkpoint, machine=with_flash, kv_memory_bytes=1 << 20)
    assert placement.block_size == 256
    assert placement.block_bytes == checkpoint.config.kv_block_bytes(256, "bfloat16")
    (pool,) = placement.pools()
    assert (pool.block_size, pool.num_blocks) == (256, (1 << 20) // placement.block_bytes)


def test_what_cannot_be_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="blocks"):
        place(checkpoint, transport="shm", kv_memory_bytes=1)
    with pytest.raises(ConfigError, match="blocks"):
        place(checkpoint, kv_memory_bytes=1)


def test_on_a_gpu_the_dtype_is_bfloat16_unless_it_is_asked_for(checkpoint):
    assert choose_dtype("auto", checkpoint.stored_dtype, has_gpu=True) == "bfloat16"
    assert choose_dtype("float32", checkpoint.stored_dtype, has_gpu=True) == "float32"


class FakeNvml:
    """A driver with two GPUs, of which one does not answer."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index == 0:
            raise self.NVMLError("lost")
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "Test"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetCudaComputeCapability(self, _handle):  # noqa: N802
        return [9, 0]

    def nvmlDeviceGetComputeRunningProcesses(self, _handle):  # noqa: N802
        return []

    def nvmlDeviceGetMigMode(self, _handle):  # noqa: N802
        return [0, 0]

    def nvmlDeviceGetMemoryAffinity(self, _handle, _size, _scope):  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetMemoryInfo(self, handle, _version):  # noqa: N802
        return type("Memory", (), {"total": 16 << 30})()


def test_gpus_that_answer_are_used_and_one_that_does_not_is_named():
    silent, answering = list_gpus(Nvml(FakeNvml()), visible=None)
    assert answering == replace(GPUS[1], cuda_index=0)
    used, about = choose_gpus("auto", [silent, answering], CUDA)
    assert used == [answering]
    assert silent.name == "gpu0"
    assert "nvidia-modprobe -c 0" in silent.obstacle
    assert silent.obstacle in about
