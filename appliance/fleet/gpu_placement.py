"""Place workers on GPUs, MIG instances or cores of their own.

On one GPU, two processes avoid waiting for each other's steps but share the GPU's time. The first
start of a model tries two and measures; later starts use the better choice. The two share weights
and pool, or, if configured, copy blocks through the host.

Invariant: an unavailable choice is an error or is reported, never replaced silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata

from appliance.devices.gpu_list import Gpu
from appliance.fleet.placement import (
    MIN_BLOCKS,
    MIN_COPIED_BLOCKS,
    Placement,
    WorkerPlan,
    pool_counts,
    split_cores,
)
from appliance.fleet.spread import GPU_STEP_TOKENS, MAX_SEQUENCES
from appliance.hub.fits import GPU_OVERHEAD_BYTES
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.kernels.attention_backends import (
    AttentionChoice,
    AttentionNeeds,
    Machine,
    choose_attention,
)
from engine.kernels.attention_needs import triton_fault
from engine.scheduler.cache.block_pool import MIN_RECORDS
from engine.scheduler.cache.topology import COLOCATED, DECODE, PREFILL, Topology, make_topology

PREFILL_PERCENT = 70
"""Share of the GPU's processors for the prefill worker under MPS.

Its products gain little from the rest. Short decode kernels then find free processors at any time.
"""
WORKER_BYTES = 4 << 30
"""Bytes that a worker may need besides weights and pool: context, libraries, steps, graphs."""


def choose_gpus(
    asked: str, found: list[Gpu], torch_version: str | None
) -> tuple[list[Gpu], str | None]:
    """Choose the GPUs to serve on, none for the CPU, and a note for the operator.

    With `auto`, all GPUs like the largest are chosen: the pools of one daemon have one layout.

    Args:
        asked: `auto`, `cpu`, or GPUs by name with commas.
        torch_version: as installed; None: not installed.

    Raises:
        ConfigError: a named GPU is missing, or torch cannot use it.
    """
    if asked == "cpu" or (asked == "auto" and not found):
        return [], None
    if asked != "auto":
        return name_gpus(asked.split(","), found, torch_version, where="devices"), None
    if _is_for_cpu(torch_version):
        names = ", ".join(gpu.name for gpu in found)
        return [], f"{names} not used: torch {torch_version} is built for the CPU"
    free = [gpu for gpu in found if gpu.obstacle is None]
    reasons = [f"{gpu.name} not used: {gpu.obstacle}" for gpu in found if gpu.obstacle]
    if free:
        best = max(free, key=lambda gpu: gpu.memory_bytes)
        others = [gpu for gpu in free if gpu.model != best.model]
        reasons += [f"{gpu.name} not used: it is no {best.model}" for gpu in others]
        free = [gpu for gpu in free if gpu.model == best.model]
    return free, "; ".join(reasons) or None


def name_gpus(
    names: Sequence[str], found: list[Gpu], torch_version: str | None, where: str
) -> list[Gpu]:
    """Find the GPUs that an operator names, each once.

    Args:
        names: names in readings, CUDA numbers (`cuda:0`), or beginnings of UUIDs.
        torch_version: as installed; None: not installed.
        where: the setting that names them.

    Raises:
        ConfigError: one is missing, or torch cannot use it.
    """
    there = ", ".join(gpu.name for gpu in found) or "no GPU with a driver"
    chosen = []
    for name in dict.fromkeys(names):
        matching = [gpu for gpu in found if _is_called(gpu, name)]
        if len(matching) != 1:
            what = "several are called" if matching else "there is no"
            hint = f"there is {there}; penstock devices"
            raise ConfigError(f"{what} {name}", where=where, hint=hint)
        chosen += matching
    if _is_for_cpu(torch_version):
        raise ConfigError(
            f"torch {torch_version} is built for the CPU",
            where=where,
            hint="install torch for CUDA, or serve with --devices cpu",
        )
    for gpu in chosen:
        if gpu.obstacle is not None:
            about = f"{gpu.name}: {gpu.obstacle}"
            raise ConfigError(about, where=where, hint="name another; penstock devices")
    return chosen


def _is_called(gpu: Gpu, name: str) -> bool:
    if name.startswith("cuda:"):
        return gpu.cuda_index == int(name.removeprefix("cuda:"))
    return gpu.name == name or (name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name))


def _is_for_cpu(torch_version: str | None) -> bool:
    return torch_version is None or torch_version.endswith("+cpu")


def installed_torch() -> str | None:
    """Return torch's version without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def packing_on(gpus: Iterable[Gpu], *, is_safe: bool = False) -> tuple[str, str | None]:
    """Choose the layout of quantised matrices on these GPUs, and say why not a better one.

    Triton's kernels read them from compute capability 8.0 on, and 8.9 multiplies FP8 by FP8. All
    GPUs get one layout, because weights may be read once for all of them.

    Args:
        is_safe: no kernel of ours is to run.
    """
    if is_safe:
        return "widened", "safe kernels"
    fault = triton_fault()
    if fault is not None:
        return "widened", fault
    has_fp8 = True
    for gpu in gpus:
        if gpu.capability is not None and gpu.capability < (8, 0):
            found = ".".join(map(str, gpu.capability))
            what = f"the kernels want compute capability 8.0, {gpu.name} has {found}"
            return "widened", what
        has_fp8 = has_fp8 and gpu.capability is not None and gpu.capability >= (8, 9)
    return "fp8" if has_fp8 else "panels", None


def attention_for(checkpoint: Checkpoint, dtype: str, machine: Machine) -> AttentionChoice:
    """Choose the attention backend and its preferred block size."""
    return choose_attention(AttentionNeeds.of(checkpoint.config, dtype), machine)


def _room_of_one(checkpoint: Checkpoint, gpu: Gpu) -> int:
    """Return the maximum bytes of a pool beside the weights; steps run before it is made."""
    return gpu.memory_bytes - checkpoint.num_bytes - GPU_OVERHEAD_BYTES


def _room_of_two(checkpoint: Checkpoint, gpu: Gpu) -> int:
    """Return the bytes for pools where both workers hold weights; each checks it again."""
    return gpu.memory_bytes - 2 * (checkpoint.num_bytes + WORKER_BYTES)


def _make_topology(*, has_two: bool, is_copied: bool) -> Topology:
    if not has_two:
        return make_topology([COLOCATED], [COLOCATED], "alias", home=COLOCATED)
    if is_copied:
        return make_topology([PREFILL], [DECODE], "shm", in_workers=(PREFILL, DECODE))
    return make_topology([PREFILL], [DECODE], "alias", home=DECODE)


def place_on_gpu(
    checkpoint: Checkpoint,
    gpu: Gpu,
    *,
    machine: Machine,
    dtype: str,
    roles: str,
    transport: str,
    kv_memory_bytes: int | None,
    max_model_len: int | None,
    cores: list[int],
    has_mps: bool = False,
    why: str | None = None,
) -> Placement:
    """Place one worker, or two that share the GPU's memory; blocks are counted when they are made.

    A block is as large as the chosen attention backend wants it. Two workers with the `shm`
    transport share nothing but the staging buffer. `why` says what has been measured, or is to be.

    Raises:
        ConfigError: the KV memory does not hold a block.
    """
    config = checkpoint.config
    block_size = attention_for(checkpoint, dtype, machine).backend.default_block_size
    block_bytes = config.kv_block_bytes(block_size, dtype)
    longest = config.max_position_embeddings
    wanted_len = min(max_model_len or longest, longest)
    record_blocks = config.record_blocks(block_size, dtype)
    num_own_blocks = MIN_RECORDS * record_blocks
    useful = (-(-wanted_len // block_size) + num_own_blocks) * MAX_SEQUENCES + 1
    has_two = roles not in {"auto", "colocated"} or (roles == "auto" and transport != "auto")
    is_copied = has_two and transport == "shm"
    room = kv_memory_bytes or (_room_of_two if is_copied else _room_of_one)(checkpoint, gpu)
    num_blocks = min(room // block_bytes, useful)
    min_blocks = (MIN_COPIED_BLOCKS if is_copied else MIN_BLOCKS) + num_own_blocks
    min_blocks += num_own_blocks if is_copied else 0
    if num_blocks < min_blocks:
        raise ConfigError(
            f"{room} bytes hold {max(num_blocks, 0)} KV blocks of {block_bytes} bytes",
            where="kv_memory",
            hint=f"give at least {min_blocks * block_bytes} bytes",
        )
    topology = _make_topology(has_two=has_two, is_copied=is_copied)
    topology = topology.with_pools(pool_counts(topology, num_blocks, block_bytes))
    workers = [WorkerPlan(COLOCATED, tuple(cores), topology.pool_of(topology.names[0]), gpu)]
    if has_two:
        workers = _two(topology, gpu, cores, is_copied=is_copied, has_mps=has_mps)
    return Placement(
        topology=topology,
        workers=tuple(workers),
        block_bytes=block_bytes,
        max_model_len=wanted_len,
        max_num_batched_tokens=GPU_STEP_TOKENS,
        block_size=block_size,
        record_blocks=record_blocks,
        reasons=(_why(gpu, why, has_two=has_two, is_copied=is_copied, has_mps=has_mps),),
    )


def _two(
    topology: Topology, gpu: Gpu, cores: list[int], *, is_copied: bool, has_mps: bool
) -> list[WorkerPlan]:
    """Plan both workers on one GPU."""
    return [
        WorkerPlan(
            name,
            tuple(own),
            topology.pool_of(name),
            gpu,
            None if is_copied else shares,
            mps_percent=PREFILL_PERCENT if has_mps and name == PREFILL else None,
        )
        for name, own, shares in zip(
            topology.names, split_cores(cores), ("maps", "exports"), strict=True
        )
    ]


def _why(gpu: Gpu, why: str | None, *, has_two: bool, is_copied: bool, has_mps: bool) -> str:
    if not has_two:
        return f"one worker on {gpu.name}: {why or 'asked for'}; roles static makes two"
    how = "copy blocks through the host" if is_copied else "share its memory: no block is copied"
    turns = "they take turns: MPS does not run"
    if has_mps:
        turns = f"by MPS they compute at once, prefill on {PREFILL_PERCENT} % of the processors"
    return f"two workers on {gpu.name}: {why or 'asked for'}; they {how}; {turns}"
