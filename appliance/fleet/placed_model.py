"""Check a model and its options against this machine, and place it.

Invariant: whatever is wrong with the options or the checkpoint is an error here, before a worker
or a socket exists.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from appliance.configuration.settings import ServeConfig
from appliance.daemon.survival.kept_pools import KeptPools
from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import Inventory
from appliance.fleet.gpu_placement import installed_torch
from appliance.fleet.group_memory import share_group_memory
from appliance.fleet.model_files import model_folder
from appliance.fleet.placement import Placement
from appliance.fleet.placer import Placer, this_inventory
from appliance.fleet.profile_store import Known
from appliance.fleet.proposals import check_copies
from appliance.fleet.scopes import gpus_name, machine_scope, model_scope
from appliance.fleet.text_models import TextModel, read_text_models, room_for_texts
from appliance.fleet.weights_offload import MemoryShares, Offload, share_memory
from appliance.fleet.weights_plan import WeightsPlan, check_weights, plan_weights
from appliance.hub.names import STARTER_FOLDER, HubName, model_name
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.kernels.attention_backends import SAFE, this_machine
from engine.profile.facts import Profile
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.text.read_models import read_checkpoint
from engine.units import size_text

log = logging.getLogger("penstock")


class PlacedModel(NamedTuple):
    """A model that can be served here and its placement; nothing is made or timed yet."""

    model_id: str
    """The hub's name of the model, or its folder's."""
    checkpoint: Checkpoint
    dtype: str
    """The serving dtype."""
    placement: Placement
    num_arena_blocks: int
    """Blocks of the DRAM cache; 0: no cache."""
    notes: tuple[str, ...]
    """What the operator should know of the placement."""
    free_bytes: int
    """The free memory that it was placed by."""
    weights: WeightsPlan
    offload: Offload | None
    """Weights that would stay on disk; None: none."""
    text_models: tuple[TextModel, ...] = ()
    """Models of whole texts beside it."""


def place(
    config: ServeConfig, memory: CacheMemory | None = None, kept_pools: KeptPools | None = None
) -> PlacedModel:
    """Place a model as predict_place() does, and log its notes.

    Pools of a dead daemon are adopted or freed, so the memory counts that was free before them.
    """
    free_bytes = None if kept_pools is None else kept_pools.free_bytes
    placed = predict_place(config, memory, free_bytes=free_bytes)
    for note in placed.notes:
        log.warning("%s", note)
    return placed


def predict_place(
    config: ServeConfig,
    memory: CacheMemory | None,
    freed_bytes: int = 0,
    free_bytes: int | None = None,
) -> PlacedModel:
    """Check options and checkpoint against each other and this machine: all that can be refused.

    Args:
        memory: of the DRAM cache; None: it is still to be made.
        freed_bytes: memory that will be free besides.
        free_bytes: memory that counts as free; None: what is free now.

    Raises:
        ConfigError: naming what is wrong.
    """
    checkpoint = read_checkpoint(model_folder(config.model))
    model_id = _model_id(config, checkpoint.folder)
    is_starter = checkpoint.folder == STARTER_FOLDER and config.dtype == "auto"
    inventory = this_inventory()
    if free_bytes is None:
        free_bytes = inventory.memory_bytes
    text_models = read_text_models(config, model_id)
    room_bytes = free_bytes + freed_bytes
    host_bytes = None if inventory.gpus else room_bytes
    texts_bytes = room_for_texts(text_models, len(config.place.prefill), host_bytes)
    room_bytes = max(room_bytes - texts_bytes, 0)
    inventory = replace(inventory, memory_bytes=room_bytes)

    def known(gpus: Sequence[Gpu], serving_dtype: str) -> Profile:
        devices = gpus_name([gpu.uuid for gpu in gpus], inventory.driver)
        scope = model_scope(machine_scope(), checkpoint, serving_dtype, devices)
        return Known.of(config.state_dir, scope).profile

    machine = this_machine()
    if config.safe_kernels:
        machine = replace(machine, faults={**machine.faults, **SAFE})
    placer = Placer(config, checkpoint, inventory, installed_torch(), machine, known)
    # the starter's greedy output is exactly reproducible in float32
    placed = placer.place("float32" if is_starter else None)
    dtype, placement = placed.dtype, placed.placement
    is_on_gpu = any(worker.gpu is not None for worker in placement.workers)
    check_weights(checkpoint, dtype, config.weights, is_on_gpu=is_on_gpu)
    num_arena_blocks = _num_arena_blocks(config, placement, memory, room_bytes)
    weights = plan_weights(checkpoint, dtype, config, placement)
    if memory is None or memory.num_bytes < dram_bytes(config):
        room_bytes -= dram_bytes(config) - (0 if memory is None else memory.num_bytes)
    here = replace(inventory, memory_bytes=room_bytes)
    shares = _shared_memory(config, checkpoint, dtype, placement, weights, here)
    if shares.kv_bytes is not None:
        placement = placer.place_with(shares.kv_bytes, dtype)
    notes = [*([] if placed.about is None else [placed.about]), *shares.notes]
    own_len, max_len = checkpoint.config.max_position_embeddings, placement.max_model_len
    wanted_len = config.max_model_len or own_len
    if max_len < wanted_len:
        limit = "model's maximum context" if max_len == own_len else "capacity of the KV pools"
        notes.append(f"Model length lowered from {wanted_len} to {max_len} tokens, the {limit}.")
    about = tuple(notes), free_bytes, weights, shares.offload, text_models
    return PlacedModel(model_id, checkpoint, dtype, placement, num_arena_blocks, *about)


def _shared_memory(
    config: ServeConfig,
    checkpoint: Checkpoint,
    dtype: str,
    placement: Placement,
    weights: WeightsPlan,
    inventory: Inventory,
) -> MemoryShares:
    """Divide the memory between weights and KV, of workers of one process or of several."""
    share = share_memory if config.place.width == 1 else share_group_memory
    shares = share(config, checkpoint, dtype, placement, weights, inventory.memory_bytes)
    if shares.offload is None:
        check_copies(checkpoint, weights.layout, placement, inventory)
    return shares


def _model_id(config: ServeConfig, folder: Path) -> str:
    """Return the model's name for clients; raise if another model has it."""
    model_id = model_name(config.model if isinstance(config.model, HubName) else folder)
    if model_id in config.models:
        what = "the model served first has this name, too"
        raise ConfigError(what, where=f"models.{model_id}", hint="give it another")
    return model_id


def dram_bytes(config: ServeConfig) -> int:
    """Return the bytes of the DRAM cache; 0: it is off."""
    asked = config.dram_cache if config.prefix_cache else "off"
    return asked if isinstance(asked, int) else 0


def _num_arena_blocks(
    config: ServeConfig, placement: Placement, memory: CacheMemory | None, free_bytes: int
) -> int:
    """Count the blocks of the DRAM cache; 0: no cache.

    Raises:
        ConfigError: less memory is free than configured.
    """
    asked = dram_bytes(config)
    free_bytes += 0 if memory is None else memory.num_bytes
    if asked > free_bytes:
        what = f"{size_text(asked)} of DRAM cache, and {size_text(free_bytes)} of memory free"
        raise ConfigError(what, where="dram_cache", hint="set a smaller dram_cache, or off")
    return asked // placement.whole_block_bytes
