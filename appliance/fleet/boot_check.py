"""Say what a start would serve and what it would refuse, without making anything."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from appliance.configuration.settings import ServeConfig
from appliance.fleet.boot import num_staging_blocks
from appliance.fleet.gpu_placement import attention_for
from appliance.fleet.model_files import is_to_be_fetched, model_folder
from appliance.fleet.placed_model import PlacedModel, place
from appliance.fleet.placement import (
    capacity_text,
    placement_lines,
)
from appliance.fleet.placer import this_inventory
from appliance.fleet.proposals import propose
from appliance.fleet.weights_plan import kv_text
from engine.errors import ConfigError, refuse
from engine.kernels.attention_backends import this_machine
from engine.scheduler.cache.block_pool import MIN_RECORDS
from engine.text.read_models import read_checkpoint, read_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_fit import misfits
from engine.units import size_text

NO_PREFIX_CACHE = "it extends the prefix cache, which is off"


class CacheForecast(NamedTuple):
    """What a start would say about a cache."""

    text: str
    is_missed: bool = False
    """True if the cache was configured but would not be available."""


def dram_forecast(config: ServeConfig, placed: PlacedModel) -> CacheForecast | None:
    """Predict the DRAM cache of a start; None: not configured."""
    placement = placed.placement
    if placed.num_arena_blocks:
        held = capacity_text(placement, placed.num_arena_blocks)
        return CacheForecast(f"DRAM cache below the pools: up to {held}")
    if not isinstance(config.dram_cache, int):
        return None
    why = f"a block takes {size_text(placement.whole_block_bytes)}, more than dram_cache"
    return CacheForecast(
        f"no DRAM cache: {why if config.prefix_cache else NO_PREFIX_CACHE}", is_missed=True
    )


def check_plan(config: ServeConfig, placed: PlacedModel | None = None) -> tuple[str, list[str]]:
    """Decide all of a boot without making anything; says what would be served, and where.

    Args and errors are make_plan()'s.
    """
    _, checkpoint, dtype, placement, *_ = placed = placed or place(config)
    gpu, attention = placement.workers[0].gpu, ""
    if gpu is not None:
        choice = attention_for(checkpoint, dtype, this_machine(gpu.capability))
        attention = f"; attention on {gpu.name} by {choice.title}"
    offload = "" if placed.offload is None else placed.offload.words
    words = (placed.weights.words, offload, kv_text(dtype, config.kv_dtype))
    about = "".join(f"; {each}" for each in words if each)
    if placement.record_blocks:
        size = size_text(MIN_RECORDS * placement.record_blocks * placement.block_bytes)
        about += f"; {size} of recurrent states per request"
    if num_staging := num_staging_blocks(config, placement):
        size = size_text(num_staging * placement.block_bytes)
        about += f"; {size} of host memory between GPUs and the SSD cache"
    return (
        f"it serves {checkpoint.folder} in {dtype}, "
        f"up to {placement.max_model_len} tokens per request{attention}{about}"
    ), [*placement_lines(placement), *(f"  proposed: {each}" for each in proposals(config, placed))]


def proposals(config: ServeConfig, placed: PlacedModel) -> list[str]:
    """Propose other settings where the model needs them; empty: it needs none."""
    has_gpu = any(worker.gpu is not None for worker in placed.placement.workers)
    if has_gpu or config.place.width > 1:
        return []
    inventory = replace(this_inventory(), gpus=(), memory_bytes=placed.free_bytes)
    return list(filter(None, [propose(placed.checkpoint, inventory)]))


def check_others(config: ServeConfig) -> list[str]:
    """Look at the models that a request may name, as far as they are on this machine.

    Returns:
        a sentence on each, with its name.

    Raises:
        ConfigError: as place(), of all that cannot be served, with their names.
    """
    sentences, wrong = list[str](), list[ConfigError]()
    for name, each in config.models.items():
        about = f"{each.model}, downloaded on the first request"
        try:
            if not is_to_be_fetched(each.model):
                placed = place(each)
                dram = dram_forecast(each, placed)
                about = check_plan(each, placed)[0].removeprefix("it serves ")
                about += "" if dram is None else f"; {dram.text}"
        except ConfigError as error:
            wrong += [_of_table(name, one) for one in getattr(error, "errors", (error,))]
        sentences.append(f"model {name}: {about}")
    refuse(wrong)
    return sentences


def _of_table(name: str, error: ConfigError) -> ConfigError:
    """Prefix a model's error with its table, models.NAME."""
    where = f"models.{name}: {error.where}" if error.where else f"models.{name}"
    return ConfigError(error.what, where=where, hint=error.hint)


class CheckedFiles(NamedTuple):
    """What a model's files hold."""

    tokenizer: Tokenizer
    misfits: list[str]
    """Where the tokenizer does not fit the weights."""


def check_files(config: ServeConfig) -> CheckedFiles:
    """Check a model's files alone; another served model may hold the memory for now.

    Raises:
        ConfigError: it cannot be served.
    """
    checkpoint = read_checkpoint(model_folder(config.model))
    tokenizer = read_tokenizer(checkpoint.folder)
    return CheckedFiles(
        tokenizer, misfits(tokenizer, checkpoint.config.vocab_size, checkpoint.config.unknown_ends)
    )
