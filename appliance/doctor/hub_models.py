"""Describe a model on the hub and where it would fit, without its weights.

Invariant: the cache stays unchanged.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance.devices.gpu_list import list_gpus
from appliance.fleet.placement import available_cores, available_memory_bytes
from appliance.hub import cache, fits, hub_http
from appliance.hub import download as hub
from appliance.hub.names import HubName
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.text_model import TextModelConfig
from engine.text.read_models import read_any_config
from engine.units import size_text


def places(imagined: Sequence[tuple[int, int]] = ()) -> list[fits.ServingPlace]:
    """List this machine's memory and GPUs, and imagined GPUs.

    Args:
        imagined: how many, and bytes of each.
    """
    cores = f"this machine, {len(available_cores())} cores"
    found = [fits.ServingPlace(cores, available_memory_bytes(), is_gpu=False)]
    found += [
        fits.ServingPlace(f"{gpu.name}, {gpu.model}", gpu.memory_bytes, is_gpu=True)
        for gpu in list_gpus()
        if gpu.obstacle is None
    ]
    for count, num_bytes in imagined:
        name = f"{count if count > 1 else 'a'} GPU{'s' if count > 1 else ''}"
        found.append(fits.ServingPlace(f"{name} of {size_text(num_bytes)}", num_bytes, True, count))
    return found


def on_hub(name: HubName, where: Sequence[fits.ServingPlace]) -> dict[str, Any]:
    """Describe a model on the hub for `models show`.

    Raises:
        HubError: the hub does not describe it.
        CheckpointError: it cannot be served; the hint names alternatives.
    """
    repository = hub.look_up(name)
    weights = hub_http.weight_files(repository)
    root = cache.hub_cache(os.environ)
    about: dict[str, Any] = {
        "name": str(name),
        "commit": repository.commit,
        "files": len(weights),
        "download_bytes": sum(hub.left_bytes(repository, file, root) for file in weights),
        "size_bytes": sum(file.size_bytes for file in weights),
    }
    if name.file is not None:
        need = fits.need_of_file(weights[0].path, about["size_bytes"])
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            config = _config(repository, Path(folder))
        if isinstance(config, TextModelConfig):
            need = fits.MemoryNeed(None, about["size_bytes"], None, config.max_tokens)
            about |= {"kind": config.kind, "max_model_len": config.max_tokens}
        else:
            need = fits.need_of_files(config, about["size_bytes"])
            about |= described(config, need)
    files = [(file.path, file.size_bytes) for file in repository.gguf]
    return about | {"fits": fits.rows(need, where, files)}


def described(config: ModelConfig, need: fits.MemoryNeed) -> dict[str, Any]:
    """Describe a model by its configuration."""
    return {
        "family": config.family.name,
        "num_parameters": need.num_parameters,
        "dtype": config.stored_dtype,
        "max_model_len": need.max_model_len,
        **fits.of_a_token(need),
        "kv_bytes_of_a_request": fits.kv_rows(need),
    }


def in_a_sentence(name: HubName) -> str:
    """Describe the download of a model and whether it fits here, for doctor."""
    about = on_hub(name, places())
    row = about["fits"][-1]
    return (
        f"{name} is not here yet: {size_text(about['download_bytes'])} to download; "
        f"fits on {row['place']}: {row['verdict']}"
    )


def _config(repository: hub_http.Repository, folder: Path) -> ModelConfig | TextModelConfig:
    for path in ("config.json", "generation_config.json"):
        if path in repository.files:
            fetched = hub.fetch(repository, repository.files[path], folder, lambda num_bytes: None)
    return read_any_config(fetched.parent)
