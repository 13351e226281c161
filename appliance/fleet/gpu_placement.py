"""Workers on devices of their own: which GPUs, MIG instances or cores, and how blocks pass between.

On one GPU it is measured whether two processes gain more by not waiting for each other's steps
than they lose by taking turns: a model's first start tries two, and what it finds holds after that.
Two share weights and pool, or, if that is asked for, copy blocks by way of the host.

Owns: nothing; pure.
Invariant: whatever is asked for and cannot be had is an error, or said, never replaced silently.
Never: asks a driver (devices does), allocates.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from appliance.devices.inventory import Gpu, Inventory
from appliance.fleet.placement import (
    CPU_STEP_TOKENS,
    MAX_RING_BYTES,
    MAX_RING_SLOTS,
    MIN_BLOCKS,
    MIN_COPIED_BLOCKS,
    MIN_RING_SLOTS,
    Placement,
    WorkerPlan,
    cpu_names,
    default_kv_bytes,
    pool_counts,
    split_cores,
)
from appliance.models.fits import GPU_OVERHEAD_BYTES
from engine.cache.places import COLOCATED, DECODE, PREFILL, RING, Places, make_places
from engine.errors import ConfigError
from engine.folder.checkpoint import Checkpoint
from engine.folder.model_config import ModelConfig
from engine.kernels.attention_backends import (
    AttentionChoice,
    AttentionNeeds,
    Machine,
    choose_attention,
    triton_fault,
)
from engine.units import size_text

# Workers on devices of their own: GPUs, MIG instances, cores, in any mixture.
# Each worker has a pool in its device's memory, and each that prefills a link to each that decodes.
# Between GPUs that reach each other's memory, and from a GPU into the host's, whoever prefills
# writes the blocks where they go (`peer`); everywhere else they pass a pinned ring in the host
# (`shm`).
# Invariant: pools of one daemon have one layout and KV dtype; each choice has its reason in words;
# what cannot be is refused with what could.
# Never: asks a driver, allocates.


GPU_STEP_TOKENS = 4096
"""Prompt tokens in a step: where a GPU's matrix products are near their best rate."""
MAX_SEQUENCES = 256
"""Of full length; a pool with room for more than can run at once is of no use."""


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """The GPU or the cores that one worker computes on."""

    name: str
    """The worker's."""
    gpu: Gpu | None
    cpus: tuple[int, ...] = ()
    """Its own; of one on a GPU they are chosen."""

    @property
    def device(self) -> str:
        """The name of its GPU or its cores, for people."""
        return cpu_names(self.cpus) if self.gpu is None else self.gpu.name


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of the model placement depends on, in the dtype and with the blocks that it gets."""

    weights_bytes: int
    block_bytes: int
    block_size: int
    max_model_len: int
    """The longest that is wanted."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights_bytes: int,
        dtype: str,
        block_size: int,
        wanted: int | None,
    ) -> ModelShape:
        """The shape of a model served in this dtype."""
        longest = config.max_position_embeddings
        block_bytes = config.kv_block_bytes(block_size, dtype)
        return cls(weights_bytes, block_bytes, block_size, min(wanted or longest, longest))

    @property
    def full_length_bytes(self) -> int:
        """Bytes of KV that one request of the greatest length takes."""
        return -(-self.max_model_len // self.block_size) * self.block_bytes

    def room_bytes(self, gpu: Gpu) -> int:
        """Bytes that a GPU has left for KV, about; the worker measures them later."""
        return gpu.memory_bytes - self.weights_bytes - GPU_OVERHEAD_BYTES


def too_small(gpu: Gpu, shape: ModelShape) -> str | None:
    """Why a GPU cannot even hold the weights; None: it can."""
    short_bytes = MIN_BLOCKS * shape.block_bytes - shape.room_bytes(gpu)
    if short_bytes <= 0:
        return None
    return (
        f"{gpu.name} has {size_text(gpu.memory_bytes)}, and the weights of "
        f"{size_text(shape.weights_bytes)} with what a worker needs beside them take "
        f"{size_text(gpu.memory_bytes + short_bytes)}"
    )


def check_weights(gpus: Sequence[Gpu], shape: ModelShape, where: str) -> None:
    """Refuse a GPU that cannot even hold the weights.

    Raises:
        ConfigError: naming it, what is missing, and what would do.
    """
    for gpu in gpus:
        reason = too_small(gpu, shape)
        if reason is not None:
            what = "a larger MIG instance" if gpu.is_instance else "a larger GPU"
            hint = f"{what}, a smaller or quantised model, or --devices cpu; penstock models show"
            raise ConfigError(reason, where=where, hint=hint)


def spread(
    prefill: Sequence[WorkerDevice],
    decode: Sequence[WorkerDevice],
    inventory: Inventory,
    shape: ModelShape,
    *,
    transport: str,
    kv_memory_bytes: int | None,
    reasons: Sequence[str] = (),
) -> Placement:
    """Places, cores and pools for workers of which at least one is on a GPU.

    Args:
        prefill: those that prefill, no GPU twice.
        decode: those that decode, likewise and none of the others.
        inventory: for links, cores and memory.
        shape: of the model.
        transport: `auto`, `peer` or `shm`.
        kv_memory_bytes: of all pools together; None: as much as is of use.
        reasons: for what has been chosen before.

    Raises:
        ConfigError: a transport or a pool that cannot be.
    """
    spots = [*prefill, *decode]
    gpus = [spot.gpu for spot in spots if spot.gpu is not None]
    check_weights(gpus, shape, "place")
    links = {
        (one.name, other.name): _transport(one, other, inventory, transport)
        for one, other in itertools.product(prefill, decode)
    }
    places = make_places(
        [spot.name for spot in prefill],
        [spot.name for spot in decode],
        {pair: kind for pair, (kind, _) in links.items()},
        in_workers={spot.name for spot in spots if spot.gpu is not None},
        buses={spot.name: "host" if spot.gpu is None else spot.gpu.board for spot in spots},
    )
    rooms = _rooms(spots, inventory, shape, kv_memory_bytes)
    places = places.with_pools(_counts(places, rooms, shape))
    cores = _cores(spots, inventory)
    held = min(pool.num_blocks for pool in places.pools if pool.tier == "device") - 1
    return Placement(
        places=places,
        workers=tuple(
            WorkerPlan(spot.name, cores[spot.name], places.pool_of(spot.name), spot.gpu)
            for spot in spots
        ),
        block_bytes=shape.block_bytes,
        max_model_len=min(shape.max_model_len, held * shape.block_size),
        max_step_tokens=GPU_STEP_TOKENS if gpus else CPU_STEP_TOKENS,
        block_size=shape.block_size,
        reasons=(*reasons, *_link_reasons(links), *_core_reasons(spots, cores, inventory)),
    )


def _transport(
    one: WorkerDevice, other: WorkerDevice, inventory: Inventory, asked: str
) -> tuple[str, str]:
    """How blocks go from the one to the other, and why so."""
    best, why = _best_transport(one, other, inventory)
    if asked in ("auto", best):
        return best, why
    if asked == "shm":
        return "shm", "asked for"
    raise ConfigError(
        f"blocks cannot go from {one.device} to {other.device} by {asked}: "
        + ("they do not share memory" if asked == "alias" else why),
        where="transport",
        hint=f"leave it out; between these two there is {best}",
    )


def _best_transport(
    one: WorkerDevice, other: WorkerDevice, inventory: Inventory
) -> tuple[str, str]:
    if other.gpu is None:
        return "peer", "written into the host's memory" if one.gpu else "within the host's memory"
    if one.gpu is None:
        return "shm", "the host's memory is copied by the GPU"
    link = inventory.link(one.gpu, other.gpu)
    if link.can_reach:
        return "peer", link.words if link.num_nvlinks else f"P2P over {link.words}"
    if one.gpu.is_instance or other.gpu.is_instance:
        return "shm", "a MIG instance reaches no other's memory"
    if link.can_reach is None:
        return "shm", f"{link.words}; the driver does not say that they reach each other's memory"
    return "shm", f"{link.words}, by which they do not reach each other's memory (no P2P)"


def _rooms(
    spots: Sequence[WorkerDevice], inventory: Inventory, shape: ModelShape, asked: int | None
) -> dict[str, int]:
    """Bytes by worker for its pool, at most."""
    on_host = [spot for spot in spots if spot.gpu is None]
    useful = shape.full_length_bytes * MAX_SEQUENCES + shape.block_bytes
    host_bytes = default_kv_bytes(shape.full_length_bytes, inventory.memory_bytes)
    rooms = {
        spot.name: host_bytes // len(on_host)
        if spot.gpu is None
        else min(shape.room_bytes(spot.gpu), useful)
        for spot in spots
    }
    if asked is None:
        return rooms
    each = asked // len(spots)
    for spot in spots:
        most = rooms[spot.name] if spot.gpu else inventory.memory_bytes // len(on_host)
        if each > most:
            raise ConfigError(
                f"{each} bytes of KV memory for {spot.name}, but {spot.device} has {most}",
                where="kv_memory",
                hint=f"it is divided among {len(spots)} workers: at most "
                f"{most * len(spots)} bytes, or leave it out",
            )
    return dict.fromkeys(rooms, each)


def _counts(places: Places, rooms: Mapping[str, int], shape: ModelShape) -> dict[str, int]:
    counts = {
        places.pool_of(name): num_bytes // shape.block_bytes for name, num_bytes in rooms.items()
    }
    for name, count in counts.items():
        if count < MIN_BLOCKS:
            raise ConfigError(
                f"the pool of {name} would have {max(count, 0)} KV blocks of "
                f"{shape.block_bytes} bytes; at least {MIN_BLOCKS} are needed",
                where="kv_memory",
                hint=f"give at least {MIN_BLOCKS * shape.block_bytes * len(rooms)} bytes",
            )
    if RING in places.pool_by_name:
        slots = min(MAX_RING_BYTES // shape.block_bytes, MAX_RING_SLOTS)
        counts[RING] = max(slots, MIN_RING_SLOTS) + 1
    return counts


def _cores(spots: Sequence[WorkerDevice], inventory: Inventory) -> dict[str, tuple[int, ...]]:
    """By worker: those on GPUs divide what is near their GPU and nobody else's."""
    found = {spot.name: spot.cpus for spot in spots if spot.gpu is None}
    taken = {cpu for cpus in found.values() for cpu in cpus}
    by_cores: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for spot in spots:
        if spot.gpu is not None:
            near = inventory.cores_near(spot.gpu)
            free = [cpu for cpu in near if cpu not in taken]
            free = free or [cpu for cpu in inventory.cores if cpu not in taken]
            by_cores[tuple(free or near)].append(spot.name)
    for cores, names in by_cores.items():
        for place, name in enumerate(names):
            own = cores[len(cores) * place // len(names) : len(cores) * (place + 1) // len(names)]
            found[name] = own or (cores[place % len(cores)],)
    return found


def _link_reasons(links: Mapping[tuple[str, str], tuple[str, str]]) -> list[str]:
    """Pairs that are alike in one sentence."""
    pairs = Counter(links.values())
    reasons = []
    for (kind, why), count in pairs.items():
        if count == len(links):
            (source, target), *others = links
            which = "every pair" if others else f"{source} to {target}"
        else:
            which = ", ".join(
                f"{a} to {b}" for (a, b), link in links.items() if link == (kind, why)
            )
        reasons.append(f"{which} by {kind}: {why}")
    return reasons


def _core_reasons(
    spots: Sequence[WorkerDevice], cores: Mapping[str, tuple[int, ...]], inventory: Inventory
) -> list[str]:
    """Which cores are near which GPU, where that makes a difference."""
    if len(inventory.nodes) == 1:
        return []
    near: defaultdict[int, list[str]] = defaultdict(list)
    reasons = []
    for spot in spots:
        if spot.gpu is None:
            continue
        if spot.gpu.node is None:
            reasons.append(
                f"{spot.gpu.name}'s NUMA node is not known: {spot.name}'s cores may be far"
            )
        elif not set(cores[spot.name]) <= set(inventory.cores_near(spot.gpu)):
            reasons.append(f"NUMA node {spot.gpu.node} has no core free: {spot.name}'s are far")
        else:
            near[spot.gpu.node].append(spot.name)
    return [
        *(
            f"{', '.join(names)}: cores of NUMA node {node}, where their GPUs are"
            for node, names in sorted(near.items())
        ),
        *reasons,
    ]


# --------------------------------------------------------------------------------------------------


PREFILL_PERCENT = 70
"""Of a GPU's processors for the worker that prefills, where MPS lets two compute at once: its
products gain little from the rest, and the short kernels of decoding find room at any time."""
WORKER_BYTES = 4 << 30
"""That a worker may need beside weights and pool: its context, libraries, steps and graphs."""


def choose_gpus(
    asked: str, found: list[Gpu], torch_version: str | None
) -> tuple[list[Gpu], str | None]:
    """The GPUs to serve on, none for the CPU, and what the operator should be told.

    Without being told, all that are like the largest: pools of one daemon have one layout.

    Args:
        asked: `auto`, `cpu`, or GPUs by name with commas.
        found: by the driver.
        torch_version: as installed; None if it is not.

    Raises:
        ConfigError: a GPU is asked for that is not there, or that torch could not use.
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
    """Those that an operator names, as often as they are named differently.

    Args:
        names: as readings have them, by CUDA's number (`cuda:0`), or by the beginning of a UUID.
        found: by the driver.
        torch_version: as installed; None if it is not.
        where: the setting that names them.

    Raises:
        ConfigError: one is not there, or torch could not use it.
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
    """Torch's version without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def packing_on(gpus: Iterable[Gpu]) -> tuple[str, str | None]:
    """What becomes of quantised matrices on these GPUs, as gpu_layout() has it; why not better.

    Triton's kernels read them from compute capability 8.0 on, and 8.9 multiplies FP8 by FP8. All
    GPUs have one layout, for weights may be read once for all of them.
    """
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
    """What computes attention, with blocks as large as it likes them."""
    return choose_attention(AttentionNeeds.of(checkpoint.config, dtype), machine)


def _room_of_one(checkpoint: Checkpoint, gpu: Gpu) -> int:
    """Bytes that a pool has beside the weights, at most; it is made when steps have been run."""
    return gpu.memory_bytes - checkpoint.num_bytes - GPU_OVERHEAD_BYTES


def _room_of_two(checkpoint: Checkpoint, gpu: Gpu) -> int:
    """Bytes for pools where each of two workers has weights of its own; each checks it again."""
    return gpu.memory_bytes - 2 * (checkpoint.num_bytes + WORKER_BYTES)


def _places(*, has_two: bool, is_copied: bool) -> Places:
    if not has_two:
        return make_places([COLOCATED], [COLOCATED], "alias", home=COLOCATED)
    if is_copied:
        return make_places([PREFILL], [DECODE], "shm", in_workers=(PREFILL, DECODE))
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
    has_mps: bool = False,
    why: str | None = None,
) -> Placement:
    """One worker, or two that share the GPU's memory; blocks are counted when they are made.

    A block is as large as the attention wants it that the machine gets. Two workers with the `shm`
    transport share nothing but the ring. `why` says what has been measured, or is to be.

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
    room = kv_memory_bytes or (_room_of_two if is_copied else _room_of_one)(checkpoint, gpu)
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
        workers = _two(places, gpu, cores, is_copied=is_copied, has_mps=has_mps)
    return Placement(
        places=places,
        workers=tuple(workers),
        block_bytes=block_bytes,
        max_model_len=wanted_len,
        max_step_tokens=GPU_STEP_TOKENS,
        block_size=block_size,
        reasons=(_why(gpu, why, has_two=has_two, is_copied=is_copied, has_mps=has_mps),),
    )


def _two(
    places: Places, gpu: Gpu, cores: list[int], *, is_copied: bool, has_mps: bool
) -> list[WorkerPlan]:
    """Both workers on one GPU."""
    return [
        WorkerPlan(
            name,
            tuple(own),
            places.pool_of(name),
            gpu,
            None if is_copied else shares,
            mps_percent=PREFILL_PERCENT if has_mps and name == PREFILL else None,
        )
        for name, own, shares in zip(
            places.names, split_cores(cores), ("maps", "exports"), strict=True
        )
    ]


def _why(gpu: Gpu, why: str | None, *, has_two: bool, is_copied: bool, has_mps: bool) -> str:
    if not has_two:
        return f"one worker on {gpu.name}: {why or 'asked for'}; roles static makes two"
    how = "copy blocks through the host" if is_copied else "share its memory: no block is copied"
    turns = "they take turns, for MPS does not run"
    if has_mps:
        turns = f"by MPS they compute at once, prefill on {PREFILL_PERCENT} % of the processors"
    return f"two workers on {gpu.name}: {why or 'asked for'}; they {how}; {turns}"
