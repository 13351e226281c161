"""Read the hub's cache on this machine.

models--OWNER--NAME/refs/main the commit that the branch was at models--OWNER--
NAME/snapshots/COMMIT/... links, by the files' own names models--OWNER--NAME/blobs/SUM the bytes;
SUM.incomplete while they come

Invariant: a folder that resolve() returns has every file that serving it needs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.hub.names import HubName, is_quantised_as
from engine.checkpoint.gguf import parts_of
from engine.checkpoint.model_file import read_model_text
from engine.checkpoint.tokenizer_source import WHOLE, tokenizer_source
from engine.errors import CheckpointError, ConfigError
from engine.units import size_text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INCOMPLETE = ".incomplete"
HUB = "https://huggingface.co"
"""The default hub, without HF_ENDPOINT."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_PLAIN_NAME = re.compile(r"\w[\w.-]{0,199}")
_MAX_REF_BYTES = 4096
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One revision of a model in the cache."""

    repository: str
    commit: str
    folder: Path

    @property
    def name(self) -> str:
        """The name that a user may type."""
        return f"{self.repository}@{self.commit[:7]}"


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of Hugging Face's own tools."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := environ.get(variable):
            return Path(given).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "huggingface" / "hub"


def download_text(name: HubName, num_bytes: int, cache: Path, environ: Mapping[str, str]) -> str:
    """Describe a download: its model, size, source and target."""
    endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    return f"downloading {name}, {size_text(num_bytes)}, from {endpoint} to {cache}"


def repository_folder(cache: Path, repository: str) -> Path:
    """Return the folder of a repository's refs, snapshots and blobs."""
    return cache / f"models--{repository.replace('/', '--')}"


def snapshots(cache: Path) -> Iterator[Snapshot]:
    """Yield every revision of a model that has a config.json or a GGUF file."""
    for folder in sorted(cache.glob("models--*/snapshots/*")):
        if (folder / "config.json").exists() or any(folder.glob("*.gguf")):
            repository = folder.parents[1].name.removeprefix("models--").replace("--", "/", 1)
            yield Snapshot(repository, folder.name, folder)


def resolve(cache: Path, name: HubName) -> Path | None:
    """Return the folder of a complete model; None: it must be pulled first.

    Raises:
        ConfigError: the beginning of a commit fits several revisions.
    """
    folder = repository_folder(cache, name.repository)
    snapshot = None
    ref = folder / "refs" / name.revision
    if (commit := _commit_at(ref)) is not None:
        snapshot = folder / "snapshots" / commit
    elif _COMMIT.fullmatch(name.revision):
        fitting = sorted((folder / "snapshots").glob(f"{name.revision}*"))
        if len(fitting) > 1:
            what = f"{len(fitting)} revisions in the cache begin with {name.revision!r}"
            raise ConfigError(what, where=str(name), hint="give more of the commit")
        snapshot = fitting[0] if fitting else None
    return None if snapshot is None or missing_files(snapshot, name.file) else snapshot


def _commit_at(ref: Path) -> str | None:
    """Read the commit that a branch was at; None: there is no such file, or no commit in it."""
    try:
        commit = read_model_text(ref, _MAX_REF_BYTES).strip()
    except (OSError, CheckpointError):
        return None
    return commit if _PLAIN_NAME.fullmatch(commit) else None


def missing_files(snapshot: Path, file: str | None = None) -> list[str]:
    """List the files that serving the model in this folder lacks."""
    if file is not None:
        found = _gguf_files(snapshot, file)
        parts = parts_of(found[0]) if found else []
        missing = [part.name for part in parts if not part.exists()]
        return missing if found else [file]
    source = tokenizer_source(os.listdir(snapshot) if snapshot.is_dir() else ())
    tokenizer = (WHOLE,) if source is None else source.files
    needed = ["config.json", *tokenizer, *weight_names(snapshot)]
    return [each for each in needed if not (snapshot / each).exists()]


def gguf_file(snapshot: Path, file: str) -> Path:
    """Return the GGUF file that a name asks for; the first part, if it has parts.

    Args:
        snapshot: a folder that resolve() returned for it.
        file: a file's path in it, or a quantisation such as Q4_K_M.
    """
    return _gguf_files(snapshot, file)[0]


def _gguf_files(snapshot: Path, file: str) -> list[Path]:
    """List the files that a name could mean, parts in order."""
    return [
        path
        for path in sorted(snapshot.rglob("*.gguf"))
        if file in (path.name, str(path.relative_to(snapshot))) or is_quantised_as(path.name, file)
    ]


def weight_names(folder: Path) -> list[str]:
    """List the safetensors files that a folder's index names, or the single one."""
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return [SINGLE]
    from engine.text.read_models import read_weight_names  # few commands need it, for 50 ms

    try:
        return read_weight_names(folder)
    except CheckpointError:
        return [INDEX]


def in_words(cache: Path) -> str:
    """List the models servable without a network, for a hint."""
    names = sorted(
        {
            one.repository if is_current(cache, one) else one.name
            for one in snapshots(cache)
            if not missing_files(one.folder)
        }
    )
    if not names:
        return f"no complete model in {cache}; copy a folder here, or name a mirror by HF_ENDPOINT"
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"in {cache} there is {', '.join(names[:_MAX_SHOWN])}{more}"


def is_current(cache: Path, one: Snapshot) -> bool:
    """Say whether the repository's main branch is known to be at this revision."""
    ref = repository_folder(cache, one.repository) / "refs" / "main"
    return _commit_at(ref) == one.commit


def remove(cache: Path, repository: str, commit: str | None = None) -> int:
    """Remove a model's revision, or all of it; return the freed bytes.

    A blob that another revision links to stays.
    """
    folder = repository_folder(cache, repository)
    before = _disk_bytes(folder)
    others = [] if commit is None else [
        each for each in (folder / "snapshots").glob("*") if each.name != commit
    ]  # fmt: skip
    if not others:
        shutil.rmtree(folder)
        return before
    shutil.rmtree(folder / "snapshots" / str(commit))
    for ref in list((folder / "refs").rglob("*")):
        if _commit_at(ref) == commit:
            ref.unlink()
    linked = {os.path.realpath(path) for other in others for path in other.rglob("*")}
    for blob in (folder / "blobs").glob("*"):
        if os.path.realpath(blob) not in linked:
            blob.unlink()
    return before - _disk_bytes(folder)


def size_bytes(snapshot: Path) -> int:
    return sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())


def _disk_bytes(folder: Path) -> int:
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in files)
