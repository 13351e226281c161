"""Find a served model's files on this machine, and read its facts from them.

Invariant: a model that must be downloaded first is told from one that cannot be served.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from appliance.configuration.settings import ServeConfig
from appliance.hub import cache
from appliance.hub.facts import ModelFacts, facts_of
from appliance.hub.names import STARTER_FOLDER, HubName
from engine.errors import ConfigError, PenstockError
from engine.text.read_models import read_checkpoint


class NotPulled(ConfigError):
    """The model's name is valid, but its files are not downloaded yet."""

    exit_code = 3  # as without a hub: it can be mended elsewhere than in the configuration


def model_folder(model: Path | HubName | None) -> Path:
    """Return the model's folder or GGUF file on this machine.

    Raises:
        NotPulled: it must be downloaded first.
        ConfigError: this kind of model is not supported, or its path is not UTF-8.
    """
    if model is None:
        return STARTER_FOLDER
    if isinstance(model, Path):
        _check_is_text(model)
        return model
    root = cache.hub_cache(os.environ)
    folder = cache.resolve(root, model)
    if folder is None:
        what, hint = "not on this machine", f"penstock pull {model}; {cache.in_words(root)}"
        raise NotPulled(what, where=str(model), hint=hint)
    return folder if model.file is None else cache.gguf_file(folder, model.file)


def to_be_fetched(config: ServeConfig) -> list[HubName]:
    """List the hub names that a start needs and whose files are not all on this machine."""
    wanted = (config.model, config.embedding_model, config.rerank_model)
    missing = (each for each in wanted if isinstance(each, HubName) and is_to_be_fetched(each))
    return list(dict.fromkeys(missing))


def is_to_be_fetched(model: Path | HubName | None) -> bool:
    """Say whether the model is a hub name whose files are not all on this machine."""
    if not isinstance(model, HubName):
        return False
    return cache.resolve(cache.hub_cache(os.environ), model) is None


FilesStamp = list[tuple[str, int, int, int]]
"""Name, inode, size and time of modification of each file."""


def files_stamp(model: Path | HubName | None) -> FilesStamp:
    """Return what differs once a model's files are exchanged, written or touched.

    Returns:
        empty if a file is missing or unreadable.
    """
    try:
        place = model_folder(model)
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        stats = [(file.name, file.stat()) for file in files]
    except (PenstockError, OSError):
        return []
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def facts_by_name(configs: Mapping[str, ServeConfig]) -> dict[str, ModelFacts | None]:
    """Read each model's facts from its files; None: not here, or unreadable."""
    return {name: _facts_of(each.model) for name, each in configs.items()}


def _check_is_text(path: Path) -> None:
    try:
        f"{path} {os.path.realpath(path)}".encode()
    except UnicodeEncodeError:
        what, hint = "the model's path is not UTF-8, as replies and the log need it", "rename it"
        raise ConfigError(what, where=str(path), hint=hint) from None


@functools.lru_cache(maxsize=256)
def _facts_in(folder: Path) -> ModelFacts:
    return facts_of(read_checkpoint(folder))


def _facts_of(model: Path | HubName | None) -> ModelFacts | None:
    try:
        return _facts_in(model_folder(model))
    except (PenstockError, OSError):
        return None
