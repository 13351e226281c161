"""Which GPUs serve, and what each worker does on them.

On one GPU both phases are one worker's unless roles are asked for: two processes take turns on it,
and what they gain by not waiting for each other's steps has to be measured first. Asked for, they
share weights and pool. A second GPU is left alone until blocks can move between two of them.
Owns: nothing; pure. Called by: boot, doctor.
Invariant: whatever is asked for and cannot be had is an error, or said, never replaced silently.
Never: asks a driver (devices does), allocates.
"""

from __future__ import annotations

from importlib import metadata

from appliance.devices.listing import Gpu
from appliance.placement import BLOCK_SIZE, MIN_BLOCKS, Placement, WorkerPlan, split_cores
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.topology import Topology

GPU_STEP_TOKENS = 4096
"""Prompt tokens in a step: where a GPU's matrix products are near their best rate."""
MAX_SEQUENCES = 256
"""Of full length; a pool with room for more than can run at once is of no use."""


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
        return _first(found)
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
    return _first([gpu for gpu in found if gpu.name in wanted])


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


def place_on_gpu(
    checkpoint: Checkpoint,
    gpu: Gpu,
    *,
    dtype: str,
    roles: str,
    transport: str,
    kv_memory_bytes: int | None,
    max_model_len: int | None,
    cores: list[int],
) -> Placement:
    """One worker, or two that share the GPU's memory; blocks are counted when they are made.

    Raises:
        ConfigError: the transport is none of a GPU's, or the KV memory holds nothing.
    """
    if transport not in {"auto", "alias"}:
        raise ConfigError(
            f"{transport!r} is not for workers on one GPU, which share its memory",
            where="transport",
            hint="leave out --transport",
        )
    config = checkpoint.config
    block_bytes = config.kv_block_bytes(BLOCK_SIZE, dtype)
    longest = config.max_position_embeddings
    wanted_len = min(max_model_len or longest, longest)
    useful = -(-wanted_len // BLOCK_SIZE) * MAX_SEQUENCES + 1
    num_blocks = min((kv_memory_bytes or gpu.memory_bytes) // block_bytes, useful)
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{kv_memory_bytes} bytes hold {num_blocks} KV blocks of {block_bytes} bytes",
            where="kv_memory",
            hint=f"give at least {MIN_BLOCKS * block_bytes} bytes",
        )
    if roles in {"auto", "colocated"}:
        topology = Topology("colocated", "colocated", "kv", "kv", None, homes={"kv": "colocated"})
        workers = [WorkerPlan("colocated", tuple(cores), "kv", gpu)]
    else:
        prefill_cores, decode_cores = split_cores(cores)
        topology = Topology("prefill", "decode", "kv", "kv", "alias", homes={"kv": "decode"})
        workers = [
            WorkerPlan("prefill", tuple(prefill_cores), "kv", gpu, shares="maps"),
            WorkerPlan("decode", tuple(decode_cores), "kv", gpu, shares="exports"),
        ]
    return Placement(
        topology=topology,
        workers=tuple(workers),
        num_blocks_by_pool={"kv": num_blocks},
        ring_pool=None,
        block_bytes=block_bytes,
        max_model_len=wanted_len,
        max_step_tokens=GPU_STEP_TOKENS,
    )
