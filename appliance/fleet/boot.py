"""Plan a start: the workers with their setups, and the memory that they share."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from appliance.api.formats.format_choice import output_format_of
from appliance.configuration.settings import ServeConfig
from appliance.daemon.requests.request import ModelInfo
from appliance.daemon.survival.kept_pools import KeptPools, memfd
from appliance.fleet.kept_proofs import load_proofs
from appliance.fleet.model_files import facts_by_name
from appliance.fleet.placed_model import PlacedModel, dram_bytes, place
from appliance.fleet.placement import MIN_BLOCKS, Placement, WorkerPlan, available_memory_bytes
from appliance.fleet.placer import this_inventory
from appliance.fleet.profile_store import Known
from appliance.fleet.scopes import devices_name, machine_scope, model_scope
from appliance.fleet.text_models import (
    LoadedTexts,
    load_texts,
)
from appliance.fleet.weights_file import WeightsFile, folder_of
from appliance.fleet.weights_offload import Offload
from appliance.fleet.weights_plan import (
    WeightsPlan,
)
from appliance.fleet.worker_counts import STARTED_TWO
from appliance.hub.facts import ModelFacts, facts_of, facts_of_texts
from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.shards import num_shards
from engine.checkpoint.weights_layout import gpu_layout
from engine.checkpoint.written_models import memfd_of
from engine.errors import AlreadyRunning, ConfigError
from engine.kernels.attention_backends import SAFE, this_machine
from engine.profile.facts import Profile
from engine.profile.prompt_steps import MIXTURE_STEP_TOKENS, STEP_TOKENS, choose_prompt_steps
from engine.scheduler.cache.block_pool import MIN_RECORDS
from engine.scheduler.cache.published_blocks import PoolShape
from engine.scheduler.cache.topology import DRAM, PREFILL
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.scheduler.offload.staged_disk import num_slots_for
from engine.scheduler.routing.step_times import place_of
from engine.system.own_files import check_own_folder, open_own
from engine.text.tokenizer import Tokenizer
from engine.units import size_text
from engine.wire.messages import GpuSpec, GroupSpec, PoolSpec, Setup, WeightsSpec

log = logging.getLogger("penstock")

STARTER_NOTE = "starter model: finds facts in a document, knows nothing else"


@dataclass(frozen=True, slots=True)
class BootPlan:
    """The model, workers and memory that the daemon will serve with."""

    model_id: str
    """The hub's name of the model, or its folder's."""
    checkpoint: Checkpoint
    model_note: str | None
    dtype: str
    placement: Placement
    roles: str
    """The roles at start."""
    workers: list[tuple[WorkerPlan, Setup]]
    inherited_fds: list[int]
    arena: PoolSpec | None = None
    """The DRAM cache and staging memory below the pools; None: not used."""
    num_staging: int = 0
    """Blocks at the arena's end that move KV between GPU pools and disk; 0: not needed."""
    aliases: tuple[str, ...] = ()
    """Other names of the model."""
    default_max_tokens: int | None = None
    """Maximum output tokens of a chat that sets no limit; None: the context left."""
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    """The format of tool calls and reasoning, from the settings."""
    others: Mapping[str, ModelFacts | None] = field(default_factory=dict)
    """Models that a request may name; they are swapped in on demand."""
    weights: str = "stored"
    """What matrices are quantised to at start; `stored`: nothing."""
    weights_words: str = ""
    """A description of the weights in memory, where they differ from the files."""
    kv_dtype: str = "auto"
    """The KV dtype of the pools, from the settings."""
    choices: tuple[str, ...] = ()
    """What was chosen for this machine, and why."""
    product_variants: str = ""
    """How products are computed, if that changes the bytes of a block; empty: exactly."""
    kept_pools: KeptPools | None = None
    """Its pools outlive the daemon; None: they end with it."""
    known: Known | None = None
    """Measured step times of the model; None: nothing is stored."""
    step_sizes: tuple[int, ...] = ()
    """Step sizes to choose from for prompts, the default first."""
    texts: tuple[LoadedTexts, ...] = ()
    """Models of whole texts that the prefill workers hold, too."""
    offload: Offload | None = None
    """Weights that stay on disk; None: all are in memory."""
    weights_file: WeightsFile | None = None
    """Where these are packed; None: they are mapped from the model's files, or in memory."""

    def close(self) -> None:
        """Close the shared memory; the workers have ended or never began."""
        if self.weights_file is not None:
            self.weights_file.give_up()
        if self.kept_pools is not None:
            self.kept_pools.close()
        for fd in self.inherited_fds:
            os.close(fd)


def lock_state_dir(state_dir: Path, socket: Path) -> int:
    """Lock the state directory for this daemon; the lock lives as long as the returned fd.

    Args:
        socket: this daemon's socket, written into the lock for a second daemon's error.

    Raises:
        AlreadyRunning: another daemon holds the lock.
        ConfigError: the directory cannot be made or written, or other users can write to it.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        check_own_folder(state_dir)
        fd = open_own(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o640)
    except OSError as error:
        raise ConfigError(
            f"cannot use the state directory: {error.strerror}",
            where=str(state_dir),
            hint="choose another with --state-dir",
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid, _, path = os.pread(fd, 4096, 0).decode(errors="replace").strip().partition(" ")
        os.close(fd)
        who = f", pid {pid}, on {path}" if path else ""
        raise AlreadyRunning(
            f"a daemon runs already{who}",
            where=str(state_dir),
            hint="penstock status shows it; one beside it needs its own --state-dir and --socket",
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {socket}\n".encode(), 0)
    return fd


def make_plan(
    config: ServeConfig,
    placed: PlacedModel | None = None,
    memory: CacheMemory | None = None,
    kept_pools: KeptPools | None = None,
) -> BootPlan:
    """Time the choices that depend on speed, and make the memory that workers share.

    Args:
        placed: the result of place(); None: place() is called.
        memory: of the daemon's DRAM cache; None: this plan has no such cache.
        kept_pools: keeps the plan's pools; None: they end with the daemon.

    Raises:
        ConfigError: as place().
    """
    placed = placed or place(config, memory, kept_pools)
    model_id, checkpoint, dtype, placement, *_ = placed
    weights, known = placed.weights, _known(config, placed)
    placement, sizes, prompts_why = _with_prompt_steps(placement, checkpoint.config, known.profile)
    if placement.is_trial:  # before anything can fail
        known.profile.put(STARTED_TWO, [1.0])
        known.save()
    arena, num_staging = (None, 0) if memory is None else _arena(memory, config, placement)
    if not config.prefix_cache or placement.windows.num_each:
        kept_pools = None
    file = _weights_file(config, placed)
    pools, pool_fds = _pools(placement, kept_pools, placed.free_bytes)
    workers, fds = _setups(config, placed, placement, pools, arena, file)
    texts = load_texts(placed.text_models, has_gpu=any(w.gpu for w in placement.workers))
    workers = _with_texts(workers, texts, placement.topology.playing(PREFILL))
    return BootPlan(
        model_id,
        checkpoint,
        STARTER_NOTE if checkpoint.folder == STARTER_FOLDER else None,
        dtype,
        placement,
        "colocated" if placement.topology.is_colocated else _roles(config),
        workers,
        pool_fds + fds,
        arena,
        num_staging,
        aliases=config.model_aliases,
        default_max_tokens=config.default_max_tokens,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        others=facts_by_name(config.models),
        weights=config.weights,
        weights_words=weights.words,
        kv_dtype=config.kv_dtype,
        choices=tuple(filter(None, (weights.choice.why, prompts_why))),
        product_variants=_product_variants(config, checkpoint, weights),
        kept_pools=kept_pools,
        known=known,
        step_sizes=sizes,
        texts=texts,
        offload=placed.offload,
        weights_file=file,
    )


def _known(config: ServeConfig, placed: PlacedModel) -> Known:
    """Read what was measured of a model on these devices."""
    devices = devices_name(placed.placement.workers, this_inventory().driver)
    if placed.offload is not None:  # its steps take another time
        devices += f"; {placed.offload.disk_bytes} bytes of weights on disk"
    scope = model_scope(machine_scope(), placed.checkpoint, placed.dtype, devices)
    return Known.of(config.state_dir, scope)


def _weights_file(config: ServeConfig, placed: PlacedModel) -> WeightsFile | None:
    """Open or make the file of packed weights; None: they are in memory, or the model's files."""
    layout, offload = placed.weights.layout, placed.offload
    if offload is None or offload.identity is None or layout is None:
        return None
    folder = folder_of(config)
    try:
        return WeightsFile(folder, offload.identity, layout.num_bytes, config.log_keep_days)
    except OSError as error:
        what = f"cannot keep weights here: {error.strerror}"
        raise ConfigError(what, where=str(folder), hint="choose another with --ssd-dir") from error


def _roles(config: ServeConfig) -> str:
    """Return the roles of two workers and more."""
    usual = "elastic" if config.place.width == 1 else "static"  # a group lends no cores
    return usual if config.roles == "auto" else config.roles


def _product_variants(config: ServeConfig, checkpoint: Checkpoint, weights: WeightsPlan) -> str:
    """Describe how products are computed and blocks laid out, if that is unusual."""
    if config.place.width == 1:
        return weights.variants_text
    return f"{weights.variants_text}; shards of {num_shards(checkpoint)}"


def _with_prompt_steps(
    placement: Placement, config: ModelConfig, profile: Profile
) -> tuple[Placement, tuple[int, ...], str]:
    """Choose how many prompt tokens a step computes.

    Args:
        placement: of workers; a worker on a GPU measures its own step size.
        config: the model's shape; each expert gets only a few tokens of a step.

    Returns:
        The placement, the step sizes to choose from, and the reason for the choice.
    """
    if any(plan.gpu is not None for plan in placement.workers):
        return placement, (placement.max_num_batched_tokens,), ""
    candidates = STEP_TOKENS if config.experts is None else MIXTURE_STEP_TOKENS
    fitting = tuple(size for size in candidates if size <= placement.max_model_len)
    sizes = fitting or candidates[:1]
    end = placement.workers[-1]
    num_cores = len({cpu for plan in placement.workers for cpu in plan.cpus})
    choice = choose_prompt_steps(profile, sizes, place_of(end.name, num_cores))
    return replace(placement, max_num_batched_tokens=choice.step_tokens), sizes, choice.why


def _pools(
    placement: Placement, kept_pools: KeptPools | None, free_bytes: int
) -> tuple[dict[str, PoolSpec], list[int]]:
    """Make the pools in host memory; return all pools, and the memfds."""
    specs: dict[str, PoolSpec] = {}
    for pool in placement.topology.pools:
        fd, shape = None, PoolShape(pool.num_blocks, placement.block_bytes, free_bytes)
        if pool.home is None and kept_pools is not None and pool.tier == "device":
            fd = kept_pools.memory_of(pool.name, shape)
        elif pool.home is None:
            fd = memfd(f"penstock-{pool.name}", shape.num_blocks * shape.block_bytes)
        specs[pool.name] = PoolSpec(pool.name, fd, pool.num_blocks)
    return specs, [spec.fd for spec in specs.values() if spec.fd is not None]


def _setups(
    config: ServeConfig,
    placed: PlacedModel,
    placement: Placement,
    specs: Mapping[str, PoolSpec],
    arena: PoolSpec | None,
    file: WeightsFile | None,
) -> tuple[list[tuple[WorkerPlan, Setup]], list[int]]:
    """Make one Setup per worker, and the memfds of headers, weights and arena that all inherit."""
    topology, weights, offload = placement.topology, placed.weights, placed.offload
    specs_by_worker = _arenas(weights, placement, file)
    how = placed.checkpoint, placed.dtype, placement
    specs_by_worker |= _staged(*how, packing=weights.packing)
    model_fd = memfd_of(placed.checkpoint)
    fds = [model_fd, *([] if arena is None or arena.fd is None else [arena.fd])]
    fds += {spec.fd for spec in specs_by_worker.values()}
    decoding = topology.playing("decode")
    workers = []
    for plan in placement.workers:
        decodes = config.roles != "static" or plan.name in decoding
        setup = Setup(
            worker=plan.name,
            model_dir=str(placed.checkpoint.folder),
            checkpoint_fd=model_fd,
            dtype=placed.dtype,
            block_size=placement.block_size,
            pool=specs[plan.pool],
            weights=specs_by_worker.get(plan.name),
            cpus=list(plan.ranks[0] if plan.ranks else plan.cpus),
            max_num_batched_tokens=placement.max_num_batched_tokens,
            max_model_len=placement.max_model_len,
            gpu=_gpu_spec(
                config,
                plan,
                placement,
                has_graphs=decodes and not config.eager,
                packing=weights.packing,
            ),
            node=plan.node,
            other_pools=[
                *(specs[name] for name in topology.copied_by(plan.name)),
                *(() if arena is None else (arena,)),
            ],
            kv_dtype=config.kv_dtype,
            attention_variant=weights.choice.attention,
            max_drafted=config.max_drafted,
            has_window_blocks=placement.windows.num_each > 0,
            measures_kv=config.kv_dtype != "auto" and plan is placement.workers[0],
            disk_bytes=None if offload is None else offload.disk_bytes,
            group=_group_spec(plan, placed.checkpoint, weights),
        )
        workers.append((plan, setup))
    return workers, fds


def _group_spec(plan: WorkerPlan, checkpoint: Checkpoint, weights: WeightsPlan) -> GroupSpec | None:
    if not plan.ranks:
        return None
    return GroupSpec(
        [list(cpus) for cpus in plan.ranks],
        num_shards(checkpoint),
        variant=None if weights.variants is None else weights.variants.few,
        has_tiles=weights.variants is not None and weights.variants.has_tiles,
    )


def _with_texts(
    workers: list[tuple[WorkerPlan, Setup]],
    texts: Sequence[LoadedTexts],
    holders: Collection[str],
) -> list[tuple[WorkerPlan, Setup]]:
    """Give the workers of prompts the models of texts."""
    specs = [each.spec for each in texts]
    return [
        (plan, msgspec.structs.replace(setup, text_models=specs if plan.name in holders else []))
        for plan, setup in workers
    ]


def make_cache_memory(config: ServeConfig) -> CacheMemory:
    """Make the DRAM cache's memory, of 0 bytes if that is off; it outlives each model."""
    return CacheMemory(dram_bytes(config), is_shared=bool(config.models))


def _arena(
    memory: CacheMemory, config: ServeConfig, placement: Placement
) -> tuple[PoolSpec | None, int]:
    """Describe the cache's memory as a pool of a model's blocks, the last of them for staging.

    Returns:
        The pool, None if nothing needs it, and how many blocks are for staging.
    """
    num_staging = num_staging_blocks(config, placement)
    block_bytes = placement.whole_block_bytes
    num_blocks = memory.make_room(block_bytes, num_staging)
    if memory.fd is None or not (num_staging or memory.max_places(block_bytes)):
        return None, 0
    num_blocks *= 1 + placement.windows.num_each
    return PoolSpec(DRAM, os.dup(memory.fd), num_blocks), num_staging


def num_staging_blocks(config: ServeConfig, placement: Placement) -> int:
    """Count the blocks that stage KV between disk and device pools; 0: not needed."""
    is_on_device = any(pool.home is not None for pool in placement.topology.pools)
    if not is_on_device or config.ssd_cache == "off" or not config.prefix_cache:
        return 0
    return num_slots_for(placement.block_bytes)


def _arenas(
    weights: WeightsPlan, placement: Placement, file: WeightsFile | None
) -> dict[str, WeightsSpec]:
    """Make arenas of converted weights for workers on cores; none: files are mapped.

    Workers of one NUMA node share an arena; each node has its own. A file is all workers'.
    """
    is_divided = any(plan.ranks for plan in placement.workers)
    if weights.layout is None or is_divided:  # each process of a group has its own part
        return {}
    if file is not None:
        names = [plan.name for plan in placement.workers]
        return {
            name: weights.spec(file.fd, index, len(names), is_file=True, is_filled=file.is_whole)
            for index, name in enumerate(names)
        }
    by_node: dict[int | None, list[str]] = {}
    for plan in placement.workers:
        if plan.gpu is None:
            by_node.setdefault(plan.node, []).append(plan.name)
    found = {}
    for node, names in by_node.items():
        at = "" if node is None else f"-node{node}"
        fd = memfd(f"penstock-weights{at}", weights.layout.num_bytes)
        for index, name in enumerate(names):
            found[name] = weights.spec(fd, index, len(names))
    return found


def _staged(
    checkpoint: Checkpoint, dtype: str, placement: Placement, *, packing: str
) -> dict[str, WeightsSpec]:
    """Make host memory through which several GPUs get weights that are read from disk once.

    It stays, so that a restarted worker reads nothing from disk. None: one device alone, or too
    little host memory, so each worker reads all files.
    """
    names = [p.name for p in placement.workers if p.gpu is not None and p.shares != "maps"]
    num_bytes = gpu_layout(checkpoint, dtype, packing).num_bytes
    room_bytes = available_memory_bytes() // 2
    if len(names) < 2:
        return {}
    if num_bytes > room_bytes:
        log.warning(
            "each of %d workers reads all weights: sharing needs %s of host memory; half of the "
            "free memory is %s",
            len(names), size_text(num_bytes), size_text(room_bytes),
        )  # fmt: skip
        return {}
    log.info("%d workers read the weights once, into host memory", len(names))
    fd = memfd("penstock-weights-staged", num_bytes)
    return {
        name: WeightsSpec(fd, num_bytes, index, len(names), is_filled=False)
        for index, name in enumerate(names)
    }


def _gpu_spec(
    config: ServeConfig, plan: WorkerPlan, placement: Placement, *, has_graphs: bool, packing: str
) -> GpuSpec | None:
    if plan.gpu is None:
        return None
    is_shared = sum(plan.gpu == other.gpu for other in placement.workers) > 1
    hops = [hop for link in placement.topology.links for hop in link.hops]
    exports_pool = any(hop.to_pool == plan.pool and hop.worker != plan.name for hop in hops)
    fewest = MIN_BLOCKS + MIN_RECORDS * placement.record_blocks
    return GpuSpec(
        plan.gpu.uuid,
        plan.shares,
        fewest,
        has_graphs,
        is_shared,
        exports_pool,
        packing,
        dict(this_machine().faults) | (SAFE if config.safe_kernels else {}),
        proofs=load_proofs(config.state_dir),
    )


def model_info(plan: BootPlan, tokenizer: Tokenizer) -> ModelInfo:
    """Collect what the API needs to know about the model."""
    config, facts = plan.checkpoint.config, facts_of(plan.checkpoint)
    return ModelInfo(
        model_id=plan.model_id,
        max_model_len=plan.placement.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        note=plan.model_note,
        created=facts.modified,
        sampling=config.sampling,
        aliases=plan.aliases,
        default_max_tokens=plan.default_max_tokens,
        output_format=output_format_of(tokenizer, plan.tool_parser, plan.reasoning_parser),
        tool_parser=plan.tool_parser,
        reasoning_parser=plan.reasoning_parser,
        folder=str(plan.checkpoint.folder),
        others=plan.others,
        text_models={one.model.name: facts_of_texts(one.model.config) for one in plan.texts},
        text_folders={one.model.name: str(one.model.folder) for one in plan.texts},
        facts=facts,
        has_records=plan.placement.record_blocks > 0,
    )
