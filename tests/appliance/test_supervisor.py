"""What the supervisor says of workers that load; their deaths are in tests of real processes."""

from __future__ import annotations

from appliance.placement import WorkerPlan
from appliance.supervisor import weights_progress
from appliance.worker_state import WorkerState
from engine.messages import GpuSpec, PoolSpec, Setup, WeightsSpec


def loading(
    loaded_bytes: int,
    total_bytes: int,
    *,
    weights: WeightsSpec | None = None,
    gpu: GpuSpec | None = None,
) -> WorkerState:
    setup = Setup(
        worker="w",
        model_dir="",
        dtype="bfloat16",
        block_size=16,
        pool=PoolSpec("kv", None, 8),
        ring=None,
        weights=weights,
        cpus=[0],
        max_step_tokens=8,
        max_model_len=8,
        gpu=gpu,
    )
    plan = WorkerPlan("w", (0,), "kv")
    return WorkerState(plan, setup, loaded_bytes=loaded_bytes, total_bytes=total_bytes)


def test_a_file_that_two_workers_map_counts_once() -> None:
    assert weights_progress([loading(269, 269), loading(269, 269)]) == (269, 269)
    assert weights_progress([loading(100, 269), loading(269, 269)]) == (100, 269)
    assert weights_progress([loading(269, 269)]) == (269, 269)


def test_shares_of_one_memory_and_copies_on_two_devices_add_up() -> None:
    share = WeightsSpec(3, 538, 0, 2, is_filled=False)
    assert weights_progress([loading(100, 269, weights=share)] * 2) == (200, 538)
    gpu = GpuSpec("GPU-1")
    assert weights_progress([loading(269, 269, gpu=gpu)] * 2) == (538, 538)
