import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import Inventory
from appliance.fleet.boot import (
    lock_state_dir,
    make_cache_memory,
    make_plan,
    model_info,
)
from appliance.fleet.boot_check import check_plan, dram_forecast
from appliance.fleet.placed_model import place, predict_place
from engine.checkpoint.weights_layout import packed_layout
from engine.errors import AlreadyRunning, CheckpointError, ConfigError
from engine.kernels.attention_backends import (
    SAFE,
    AttentionNeeds,
    Machine,
    choose_attention,
    this_machine,
)
from engine.kernels.attention_needs import triton_fault
from engine.kernels.cpu import WIDENED, ProductVariants, has_kernels
from engine.kernels.product_choice import ProductChoice
from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey
from engine.profile.prompt_steps import MIN_SAMPLES, STEP_TOKENS
from engine.scheduler.measurer import ALONE
from engine.scheduler.routing.step_times import place_of
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import GpuSpec
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.tiny_tokenizers import byte_level


def config(tmp_path, **fields):
    folders = {n: tmp_path / n for n in ("socket", "state_dir")}
    return ServeConfig(**folders | fields)


@pytest.fixture
def plan_of(tmp_path):
    plans, memories = [], []

    def make(**fields):
        settings = config(tmp_path, **fields)
        memories.append(make_cache_memory(settings))
        plans.append(make_plan(settings, memory=memories[-1]))
        return plans[-1]

    yield make
    for plan in plans:
        for fd in plan.inherited_fds:
            os.close(fd)
    for memory in memories:
        memory.close()


def test_a_state_directory_belongs_to_one_daemon(tmp_path):
    state, socket = tmp_path / "state", tmp_path / "socket"
    fd = lock_state_dir(state, socket)
    with pytest.raises(AlreadyRunning) as refused:
        lock_state_dir(state, tmp_path / "other")
    assert f"pid {os.getpid()}, on {socket}" in str(refused.value)
    assert refused.value.exit_code == 9
    os.close(fd)
    os.close(lock_state_dir(state, socket))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused_and_left_alone(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("1")
    lock = tmp_path / "state" / "lock"
    lock.parent.mkdir()
    lock.symlink_to(precious) if kind == "link" else os.mkfifo(lock)
    with pytest.raises(ConfigError):
        lock_state_dir(lock.parent, tmp_path / "socket")
    assert precious.read_text() == "1"


def test_a_state_directory_that_others_can_write_to_is_refused_before_anything_is_made(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(ConfigError) as refused:
        lock_state_dir(state, tmp_path / "socket")
    assert "0777" in str(refused.value)
    assert "--state-dir" in refused.value.hint
    assert not any(state.iterdir())


def test_a_state_directory_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        lock_state_dir(tmp_path / "file" / "state", tmp_path / "socket")
    assert "--state-dir" in refused.value.hint


def test_workers_of_one_plan_share_pools_and_weights(plan_of, tiny_llama):
    plan = plan_of(model=tiny_llama, dtype="bfloat16", transport="shm")
    prefill, decode = (setup for _, setup in plan.workers)
    assert prefill.pool.name == "prefill"
    assert decode.pool.name == "decode"
    (staging,) = prefill.other_pools
    assert decode.other_pools == [staging]
    assert prefill.weights.fd == decode.weights.fd
    assert [s.weights.share_index for s in (prefill, decode)] == [0, 1]
    for spec in (prefill.pool, decode.pool, staging):
        assert os.fstat(spec.fd).st_size == spec.num_blocks * plan.placement.block_bytes


def test_a_plan_keeps_what_was_chosen_for_it_and_what_follows(plan_of, tiny_llama):
    plan = plan_of(model=tiny_llama)
    size = plan.placement.max_num_batched_tokens
    assert size == plan.step_sizes[0] == STEP_TOKENS[0]
    assert [setup.max_num_batched_tokens for _, setup in plan.workers] == [size, size]
    assert plan.choices[-1].startswith(f"prefill step: {size} tokens (default")


def test_a_start_reads_what_was_measured_before(plan_of, tiny_llama, tmp_path):
    (tmp_path / "state_dir").mkdir()
    first = plan_of(model=tiny_llama, dtype="bfloat16")
    place = place_of("decode", len({cpu for w in first.placement.workers for cpu in w.cpus}))
    for size, ms in ((256, 100.0), (512, 120.0)):
        first.known.profile.put(FactKey(PROMPT_MS, size, 0, place), [ms] * MIN_SAMPLES)
    first.known.save()

    again = plan_of(model=tiny_llama, dtype="bfloat16")
    assert again.placement.max_num_batched_tokens == 512
    assert [setup.attention_variant for _, setup in again.workers] == [
        setup.attention_variant for _, setup in first.workers
    ]
    other = plan_of(model=tiny_llama, dtype="float32")
    assert other.placement.max_num_batched_tokens == STEP_TOKENS[0], "of that nothing is known"


def test_a_dram_cache_is_memory_that_every_worker_copies_to_and_from(plan_of, tiny_llama):
    plan = plan_of(model=tiny_llama, dram_cache=16 << 20)
    assert [setup.other_pools for _, setup in plan.workers] == [[plan.arena], [plan.arena]]
    block_bytes = plan.placement.block_bytes
    assert plan.arena.num_blocks - 1 == (16 << 20) // block_bytes  # and one of padding
    assert os.fstat(plan.arena.fd).st_size == plan.arena.num_blocks * block_bytes
    assert plan.arena.fd in plan.inherited_fds
    assert plan_of(model=tiny_llama, dram_cache=16 << 20, prefix_cache=False).arena is None


def test_weights_in_their_own_dtype_need_no_arena(plan_of, tiny_llama):
    plan = plan_of(model=tiny_llama)
    assert plan.dtype == "float32"
    assert all(setup.weights is None for _, setup in plan.workers)


def test_without_a_model_the_starter_is_served_in_float32(plan_of, monkeypatch):
    monkeypatch.setattr(
        "engine.checkpoint.checkpoint._cpu_flags", lambda: {"avx512_bf16", "amx_bf16"}
    )
    plan = plan_of()
    assert plan.checkpoint.folder.name == "penstock-starter-1"
    assert plan.checkpoint.stored_dtype == "bfloat16"
    assert plan.dtype == "float32"
    assert "starter" in plan.model_note
    assert plan_of(dtype="bfloat16").dtype == "bfloat16"


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu("gpu0", "Test", "GPU-0", 16 << 30)
    machine = Inventory((found,), memory_bytes=8 << 30)
    monkeypatch.setattr("appliance.fleet.placed_model.this_inventory", lambda: machine)
    monkeypatch.setattr("appliance.fleet.placed_model.installed_torch", lambda: "2.11.0+cu130")
    return found


def test_on_a_gpu_one_worker_does_both_and_makes_its_own_pool(plan_of, gpu, tiny_llama):
    plan = plan_of(model=tiny_llama, roles="colocated")
    ((placed, setup),) = plan.workers
    assert (plan.roles, plan.dtype) == ("colocated", "bfloat16")
    assert (placed.device, setup.gpu) == ("gpu0", GpuSpec("GPU-0", faults=setup.gpu.faults))
    assert setup.gpu.faults == this_machine().faults  # it tries no import that the daemon tried
    assert setup.pool.fd is None
    assert plan.inherited_fds == [setup.checkpoint_fd, plan.arena.fd]
    assert setup.weights is None


def test_on_a_gpu_one_worker_starts_first_and_two_are_tried_once_steps_were_timed(
    plan_of, gpu, tiny_llama, tmp_path
):
    (tmp_path / "state_dir").mkdir(mode=0o700)
    plan = plan_of(model=tiny_llama)
    assert not plan.placement.is_trial
    assert [setup.gpu.shares for _, setup in plan.workers] == [None]
    plan.known.profile.put(FactKey(DECODE_MS, 8, 1024, ALONE), [9.0])
    plan.known.save()
    plan = plan_of(model=tiny_llama)
    assert plan.placement.is_trial
    assert [setup.gpu.shares for _, setup in plan.workers] == ["maps", "exports"]
    assert plan.roles == "elastic"


def test_safe_kernels_are_libraries_and_torch_alone(plan_of, gpu, tiny_llama):
    ((_, setup),) = plan_of(model=tiny_llama, safe_kernels=True).workers
    assert setup.gpu.faults.items() >= SAFE.items()
    assert setup.gpu.packing == "widened"
    machine = Machine((2, 13), setup.gpu.faults, (9, 0))
    needs = AttentionNeeds("bfloat16", 64, has_softcap=False)
    assert choose_attention(needs, replace_faults(machine, "flash_attn")).backend.name == "flash"
    capped = AttentionNeeds("bfloat16", 64, has_softcap=True, has_sinks=True)
    assert choose_attention(capped, machine).backend.name == "torch"


def replace_faults(machine, *mended):
    kept = {name: why for name, why in machine.faults.items() if name not in (*mended, "triton")}
    return replace(machine, faults=kept)


def test_a_worker_that_never_decodes_captures_no_steps(plan_of, gpu, tiny_llama):
    plan = plan_of(model=tiny_llama, roles="static", transport="shm")
    has_graphs = {setup.worker: setup.gpu.has_graphs for _, setup in plan.workers}
    assert has_graphs == {"prefill": False, "decode": True}


def test_two_workers_on_a_gpu_are_told_who_exports(plan_of, gpu, tiny_llama):
    plan = plan_of(model=tiny_llama, roles="static", eager=True)
    prefill, decode = (setup.gpu for _, setup in plan.workers)
    how = {"has_graphs": False, "is_shared": True, "faults": prefill.faults}
    assert prefill == GpuSpec("GPU-0", "maps", **how)
    assert decode == GpuSpec("GPU-0", "exports", **how)
    assert plan.roles == "static"


def test_two_workers_on_a_gpu_that_copy_inherit_the_ring_and_the_weights_on_their_variant(
    plan_of, gpu, tiny_llama
):
    plan = plan_of(model=tiny_llama, transport="shm")
    assert plan.roles == "elastic"
    assert [setup.gpu.shares for _, setup in plan.workers] == [None, None]
    assert [setup.pool.fd for _, setup in plan.workers] == [None, None]
    fds = {spec.name: spec.fd for _, setup in plan.workers for spec in setup.other_pools}
    (weights,) = {setup.weights.fd for _, setup in plan.workers}
    (headers,) = {setup.checkpoint_fd for _, setup in plan.workers}
    assert {fds["ring"], fds["dram"], weights, headers} == set(plan.inherited_fds)


def test_workers_on_several_gpus_read_a_share_of_the_weights_each(
    plan_of, gpu, tiny_llama, monkeypatch, caplog
):
    gpus = tuple(replace(gpu, name=f"gpu{i}", uuid=f"GPU-{i}") for i in range(4))
    machine = Inventory(gpus, memory_bytes=8 << 30)
    monkeypatch.setattr("appliance.fleet.placed_model.this_inventory", lambda: machine)
    plan = plan_of(model=tiny_llama)
    shares = [setup.weights for _, setup in plan.workers]
    assert [(each.share_index, each.share_count) for each in shares] == [(i, 4) for i in range(4)]
    assert not any(each.is_filled for each in shares)
    (fd,) = {each.fd for each in shares}
    assert os.fstat(fd).st_size == shares[0].num_bytes > 0
    monkeypatch.setattr("appliance.fleet.boot.available_memory_bytes", lambda: 1000)
    plan = plan_of(model=tiny_llama)
    assert [setup.weights for _, setup in plan.workers] == [None] * 4
    assert "each of 4 workers" in caplog.text


def test_what_would_compute_attention_is_said_beforehand(gpu, tiny_llama, tmp_path):
    assert "attention on gpu0 by " in check_plan(config(tmp_path, model=tiny_llama))[0]
    on_cores = config(tmp_path, model=tiny_llama, devices="cpu")
    assert "attention" not in check_plan(on_cores)[0]


def test_memory_of_recurrent_states_is_said_beforehand(tiny_llama, tmp_path):
    hybrid = make_checkpoint(tmp_path / "hybrid", "qwen3_5_text")
    said = check_plan(config(tmp_path, model=hybrid))[0]
    assert said.partition(" of recurrent states")[0].endswith(" 128 KiB")
    assert "states" not in check_plan(config(tmp_path, model=tiny_llama))[0]


def test_memory_below_the_pools_is_said_beforehand(gpu, tiny_llama, tmp_path):
    def said(**fields):
        return check_plan(config(tmp_path, model=tiny_llama, **fields))[0]

    between = "MiB of host memory between GPUs and the SSD cache"
    assert between in said()
    assert between not in said(ssd_cache="off")
    assert between not in said(prefix_cache=False)
    assert between not in said(devices="cpu")


def test_a_dram_cache_is_said_beforehand_or_why_there_would_be_none(tiny_llama, tmp_path):
    def said(**fields):
        settings = config(tmp_path, model=tiny_llama, devices="cpu", **fields)
        return dram_forecast(settings, place(settings))

    there = said(dram_cache=1 << 20)
    assert ("up to 1.0 MiB" in there.text, there.is_missed) == (True, False)
    assert said() is None
    off = "no DRAM cache: it extends the prefix cache, which is off"
    assert said(dram_cache=1 << 20, prefix_cache=False) == (off, True)
    small = said(dram_cache=1)
    assert (small.text.startswith("no DRAM cache"), small.is_missed) == (True, True)


def test_an_arena_has_blocks_of_the_cache_first_and_then_those_for_the_disk(
    plan_of, gpu, tiny_llama
):
    alone, both = plan_of(model=tiny_llama), plan_of(model=tiny_llama, dram_cache=1 << 20)
    num_blocks = (1 << 20) // both.placement.block_bytes
    assert alone.num_staging == both.num_staging > 0
    assert alone.arena.num_blocks == 1 + alone.num_staging
    assert both.arena.num_blocks == 1 + num_blocks + both.num_staging
    for plan in (alone, both):
        size = plan.arena.num_blocks * plan.placement.block_bytes
        assert os.fstat(plan.arena.fd).st_size == size
        assert all(plan.arena in setup.other_pools for _, setup in plan.workers)
    assert plan_of(model=tiny_llama, devices="cpu").arena is None


def test_what_becomes_of_quantised_weights_is_said_beforehand(gpu, tiny_llama, tmp_path):
    path = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "Q8_0")
    on_cores, _ = check_plan(config(tmp_path, model=path, devices="cpu"))
    assert "q8_0 in the file" in on_cores
    assert ("quantised as they are" in on_cores) == has_kernels()
    on_gpu, _ = check_plan(config(tmp_path, model=path))
    fault = triton_fault()
    said = f"widened to bfloat16 at start: {fault}" if fault else "quantised as they are"
    assert said in on_gpu


def test_cores_serve_where_they_are_asked_for(plan_of, gpu, tiny_llama):
    plan = plan_of(model=tiny_llama, devices="cpu")
    assert plan.roles == "elastic"
    assert all(setup.gpu is None for _, setup in plan.workers)


def test_a_lowered_model_length_is_said_once_however_often_it_is_predicted(
    plan_of, tiny_llama, tmp_path, caplog
):
    fields = {"model": tiny_llama, "kv_memory_bytes": 400_000}
    with caplog.at_level(logging.WARNING, "penstock"):
        (note,) = predict_place(config(tmp_path, **fields), None).notes
        assert caplog.messages == []
        plan = plan_of(**fields)
    assert plan.placement.max_model_len < 2048
    assert f"to {plan.placement.max_model_len} tokens" in note
    assert caplog.messages == [note]


def test_what_a_chat_without_a_limit_gets_is_the_operators_word(plan_of, tiny_llama):
    for asked in (None, 300):
        plan = plan_of(model=tiny_llama, default_max_tokens=asked)
        assert model_info(plan, Tokenizer(byte_level())).default_max_tokens == asked


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(CheckpointError) as refused:
        make_plan(config(tmp_path, model=Path("/nonexistent/model")))
    assert refused.value.where == "/nonexistent/model"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_matrices_are_packed_where_the_rule_says_and_all_workers_multiply_alike(
    plan_of, tiny_llama, monkeypatch, dtype
):
    choice = ProductChoice(ProductVariants(WIDENED, has_tiles=True), WIDENED, "repacked")
    monkeypatch.setattr("appliance.fleet.weights_plan.products_here", lambda *_, **__: choice)
    plan = plan_of(model=tiny_llama, dtype=dtype)
    specs = [setup.weights for _, setup in plan.workers]
    if dtype == "float32":
        assert specs == [None, None]
        return
    assert plan.choices[0] == "repacked"
    for spec in specs:
        assert (spec.is_packed, spec.variant, spec.has_tiles) == (True, WIDENED, True)
        layout = packed_layout(plan.checkpoint, dtype)
        assert os.fstat(spec.fd).st_size == spec.num_bytes == layout.num_bytes
