"""Parse a model's name: a folder, a GGUF file, or `owner/name`.

Invariant: an existing folder or GGUF file comes first; so does text that begins like a path.
"""

from __future__ import annotations

# nothing slow: each `penstock status` pays for these imports
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import engine
from appliance.hub.short_names import SHORT_NAMES
from engine.checkpoint.gguf import is_gguf
from engine.errors import PenstockError

DEFAULT_REVISION = "main"
STARTER_FOLDER = Path(engine.__file__ or "").parent / "starter" / "penstock-starter-1"
"""The built-in starter model; its name means this folder unless the path exists."""

_NAME = re.compile(
    r"(?:https://huggingface\.co/|hf\.co/)?"
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>(?=[^:]{1,200}(?::|$))[A-Za-z0-9][\w.-]*(?:/\w[\w.-]*)*))?"
    r"(?::(?P<file>(?=.{1,200}$)[A-Za-z0-9][\w.-]*(?:/\w[\w.-]*)*))?"
)


class NoSuchModel(PenstockError):
    """No model has this name, here or at the daemon."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub."""

    repository: str
    """The repository, `owner/name`."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag, or a commit (a unique beginning suffices in the cache)."""
    file: str | None = None
    """A file of a GGUF repository, or a quantisation such as Q4_K_M."""

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repository}{revision}{'' if self.file is None else f':{self.file}'}"


def a_model(value: object, own_names: Mapping[str, str] = {}) -> Path | HubName:
    """Read the setting `model`: a path, or a model on a hub.

    Args:
        own_names: the user's short names, which come before the built-in ones.

    Raises:
        ValueError: it is neither; names the allowed forms.
    """
    if isinstance(value, HubName):
        return value
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError("a path, or a name on the hub such as Qwen/Qwen3-0.6B")
    path = Path(value).expanduser()
    if str(value) == STARTER_FOLDER.name and not path.exists():
        return STARTER_FOLDER
    short = str(value).lower().removesuffix(":latest")
    if not path.exists() and (meant := own_names.get(str(value)) or SHORT_NAMES.get(short)):
        return a_model(meant)
    name = _NAME.fullmatch(str(value))
    if name is None or path.is_dir() or (path.is_file() and is_gguf(path)):
        return path.absolute()
    return HubName(name["repository"], name["revision"] or DEFAULT_REVISION, name["file"])


def model_name(model: Path | HubName) -> str:
    """Return the name of a model for clients."""
    if isinstance(model, HubName):
        return model.repository
    return model.stem if model.suffix == ".gguf" else os.path.basename(os.path.realpath(model))


def is_model_file(path: Path | HubName) -> bool:
    """Say whether a path leads to a folder or file that could be a model."""
    if not isinstance(path, Path):
        return False
    if path.is_dir():
        return (path / "config.json").is_file() or any(path.glob("*.gguf"))
    return path.is_file() and is_gguf(path)


def is_quantised_as(file_name: str, quantisation: str) -> bool:
    """Say whether `Qwen3-8B-Q4_K_M.gguf`, or one part of it, has the quantisation `q4_k_m`."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file_name.removesuffix(".gguf"))
    words = re.split(r"[-.]", stem.rpartition("/")[2])
    return words[-1].lower() == quantisation.lower()
