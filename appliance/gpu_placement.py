"""Which GPUs serve, and what each worker does on them.

On one GPU both phases are one worker's unless roles or a transport are asked for: two processes
take turns on it, and what they gain by not waiting for each other's steps has to be measured first.
Asked for, they share weights and pool, or, if that is asked for, copy blocks by way of the host. A
second GPU is left alone until blocks can move between two of them.
Owns: nothing; pure.
Invariant: whatever is asked for and cannot be had is an error, or said, never replaced silently.
Never: asks a driver (devices does), allocates.
"""

from __future__ import annotations

from importlib import metadata

from appliance.devices.listing import Gpu
from appliance.placement import (
    MIN_BLOCKS,
    MIN_COPIED_BLOCKS,
    Placement,
    WorkerPlan,
    pool_counts,
    split_cores,
)
from engine.attention_backends import Choice, Machine, Needs, choose_attention
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.places import COLOCATED, DECODE, PREFILL, Places, make_places

GPU_STEP_TOKENS = 4096
"""Prompt tokens in a step: where a GPU's matrix products are near their best rate."""
MAX_SEQUENCES = 256
"""Of full length; a pool with room for more than can run at once is of no use."""

WORKER_BYTES = 4 << 30
"""That a worker may need beside weights and pool: its context, libraries, steps and graphs."""


def choose_gpus(
    asked: str, found: list[Gpu], torch_version: str | None
) -> tuple[list[Gpu], str | None]:
    """The GPUs to serve on, none for the CPU, and what the operator should be told.

    Args:
        asked: `auto`, `cpu`, or GPUs by name with commas.
        found: by the driver.
        torch_version: as installed; None if it is not.

    Raises:
        ConfigError: a GPU is asked for that is not there, or that torch could not use.
    """
    if asked == "cpu":
        return [], None
    is_cpu_build = torch_version is None or torch_version.endswith("+cpu")
    names = [gpu.name for gpu in found]
    if asked == "auto":
        if not found:
            return [], None
        if is_cpu_build:
            about = f"{', '.join(names)} not used: torch {torch_version} is built for the CPU"
            return [], about
        usable = [gpu for gpu in found if gpu.obstacle is None]
        passed_over = "; ".join(f"{g.name} not used: {g.obstacle}" for g in found if g.obstacle)
        if not usable:
            return [], passed_over
        gpus, others = _first(usable)
        return gpus, "; ".join(filter(None, (passed_over, others))) or None
    wanted = asked.split(",")
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ConfigError(
            f"there is no {', '.join(missing)}",
            where="devices",
            hint=f"there is {', '.join(names) or 'no GPU with a driver'}; penstock devices",
        )
    if is_cpu_build:
        raise ConfigError(
            f"torch {torch_version} is built for the CPU",
            where="devices",
            hint="install torch for CUDA, or serve with --devices cpu",
        )
    chosen = [gpu for gpu in found if gpu.name in wanted]
    for gpu in chosen:
        if gpu.obstacle is not None:
            raise ConfigError(
                f"{gpu.name}: {gpu.obstacle}",
                where="devices",
                hint="name another; penstock devices",
            )
    return _first(chosen)


def _first(gpus: list[Gpu]) -> tuple[list[Gpu], str | None]:
    if len(gpus) == 1:
        return gpus, None
    others = ", ".join(gpu.name for gpu in gpus[1:])
    return gpus[:1], f"{others} not used: blocks cannot move between GPUs yet"


def installed_torch() -> str | None:
    """Torch's version without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def attention_for(checkpoint: Checkpoint, dtype: str, machine: Machine) -> Choice:
    """What computes attention, with blocks as large as it likes them."""
    return choose_attention(Needs.of(checkpoint.config, dtype), machine)


def _room_of_two(checkpoint: Checkpoint, gpu: Gpu) -> int:
    """Bytes for pools where each of two workers has weights of its own; each checks it again."""
    return gpu.memory_bytes - 2 * (checkpoint.num_bytes + WORKER_BYTES)


def _places(*, has_two: bool, is_copied: bool) -> Places:
    if not has_two:
        return make_places([COLOCATED], [COLOCATED], "alias", home=COLOCATED)
    if is_copied:
        return make_places([PREFILL], [DECODE], "shm", pools_are_workers=True)
    return make_places([PREFILL], [DECODE], "alias", home=DECODE)


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
) -> Placement:
    """One worker, or two that share the GPU's memory; blocks are counted when they are made.

    A block is as large as the attention wants it that the machine gets. Two workers with the `shm`
    transport share nothing but the ring.

    Raises:
        ConfigError: the KV memory holds nothing.
    """
    config = checkpoint.config
    block_size = attention_for(checkpoint, dtype, machine).backend.default_block_size
    block_bytes = config.kv_block_bytes(block_size, dtype)
    longest = config.max_position_embeddings
    wanted_len = min(max_model_len or longest, longest)
    useful = -(-wanted_len // block_size) * MAX_SEQUENCES + 1
    has_two = roles not in {"auto", "colocated"} or (roles == "auto" and transport != "auto")
    is_copied = has_two and transport == "shm"
    room = kv_memory_bytes or (_room_of_two(checkpoint, gpu) if is_copied else gpu.memory_bytes)
    num_blocks = min(room // block_bytes, useful)
    min_blocks = MIN_COPIED_BLOCKS if is_copied else MIN_BLOCKS
    if num_blocks < min_blocks:
        raise ConfigError(
            f"{room} bytes hold {max(num_blocks, 0)} KV blocks of {block_bytes} bytes",
            where="kv_memory",
            hint=f"give at least {min_blocks * block_bytes} bytes",
        )
    places = _places(has_two=has_two, is_copied=is_copied)
    places = places.with_pools(pool_counts(places, num_blocks, block_bytes))
    workers = [WorkerPlan(COLOCATED, tuple(cores), places.pool_of(places.names[0]), gpu)]
    if has_two:
        workers = [
            WorkerPlan(name, tuple(own), places.pool_of(name), gpu, None if is_copied else shares)
            for name, own, shares in zip(
                places.names, split_cores(cores), ("maps", "exports"), strict=True
            )
        ]
    return Placement(
        places=places,
        workers=tuple(workers),
        block_bytes=block_bytes,
        max_model_len=wanted_len,
        max_step_tokens=GPU_STEP_TOKENS,
        block_size=block_size,
    )
