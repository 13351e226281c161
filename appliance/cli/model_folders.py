"""Find models on this machine, and check and describe their files.

Invariant: an unsupported folder is described with the reason, not left out.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from appliance.api.formats.format_choice import output_format_of
from appliance.cli import text_model_folders
from appliance.cli.model_sources import sources
from appliance.cli.text_model_folders import MODULES, read_any_model
from appliance.fleet.placer import this_inventory
from appliance.fleet.proposals import propose
from appliance.hub import cache, fits
from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype
from engine.checkpoint.gguf import models_in
from engine.checkpoint.model_config import DTYPE_BYTES, ModelConfig
from engine.checkpoint.model_file import open_model_file, read_model_text
from engine.checkpoint.text_model import TextModelConfig
from engine.checkpoint.weights_layout import panels_layout
from engine.errors import CheckpointError
from engine.kernels.cpu import has_kernels
from engine.text.read_models import read_tokenizer
from engine.text.tokenizer_fit import misfits

SUMS_FILE = "SHA256SUMS"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 4 << 20


class FoundModel(NamedTuple):
    """A folder with a config.json, or a GGUF file, and its name for users."""

    name: str
    folder: Path


def in_hub_cache(root: Path) -> Iterator[FoundModel]:
    """List the models' snapshots, as owner/name@revision."""
    for snapshot in cache.snapshots(root):
        if (snapshot.folder / "config.json").exists():
            yield FoundModel(snapshot.name, snapshot.folder)
            continue
        for path in models_in(snapshot.folder):
            yield FoundModel(f"{snapshot.name}:{path.name}", path)


def under(root: Path) -> Iterator[FoundModel]:
    """Yield the models in the folder and in two levels below."""
    for pattern in ("config.json", "*/config.json", "*/*/config.json"):
        for path in sorted(root.glob(pattern)):
            if (path.parent.parent / MODULES).exists():  # it is a part of that model
                continue
            name = root.name if path.parent == root else str(path.parent.relative_to(root))
            yield FoundModel(name, path.parent)
    for folder in (root, *sorted(path for path in root.glob("*") if path.is_dir())):
        for path in models_in(folder):
            yield FoundModel(str(path.relative_to(root)), path)


def describe(found: FoundModel) -> dict[str, Any]:
    """Describe a folder for `models list`."""
    unknown = dict.fromkeys(("family", "num_parameters", "dtype", "max_model_len"))
    try:
        model = read_any_model(found.folder)
    except CheckpointError as error:
        return {**_place(found), **unknown, "size_bytes": None, "problem": error.what}
    if isinstance(model, TextModelConfig):
        about = text_model_folders.basics(model)
    else:
        about = _basics(model)
    return {**_place(found), **about, "problem": None}


def detail(found: FoundModel) -> tuple[dict[str, Any], fits.MemoryNeed, list[str]]:
    """Describe a folder for `models show`; estimate the memory to serve it; say what does not fit.

    Raises:
        CheckpointError: it cannot be served.
    """
    checkpoint = read_any_model(found.folder)
    if isinstance(checkpoint, TextModelConfig):
        about, need, unfit = text_model_folders.detail(checkpoint)
        return {**_place(found), **about}, need, unfit
    config = checkpoint.config
    tokenizer = read_tokenizer(found.folder)
    about = {
        **_place(found),
        **_basics(checkpoint),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "tokenizer_vocabulary": tokenizer.vocab_size,
        **fits.of_a_token(fits.need_of(_as_stored(checkpoint))),
        "chat_template": tokenizer.chat_template is not None,
        "read_from": sources(found.folder, checkpoint, tokenizer),
        "end_tokens": {
            place: " ".join(f"{one} {tokenizer.token(one) or ''}".strip() for one in ids)
            for place, ids in config.end_sources.items()
        },
        "tools": not output_format_of(tokenizer).has_preamble,
    }
    about["proposed"] = propose(checkpoint, this_inventory())
    return about, _need_of(checkpoint), misfits(tokenizer, config.vocab_size, config.unknown_ends)


def _need_of(checkpoint: Checkpoint) -> fits.MemoryNeed:
    """Estimate the memory to serve it from its tensors rather than its config.json."""
    packed = (
        panels_layout(checkpoint, choose_dtype("auto", checkpoint.stored_dtype))
        if has_kernels()
        else None
    )
    num_bytes = None if packed is None else packed.num_bytes
    return fits.need_of(_as_stored(checkpoint), num_bytes)


def _as_stored(checkpoint: Checkpoint) -> ModelConfig:
    # the starter is served in float32 everywhere
    dtype = "float32" if checkpoint.folder == STARTER_FOLDER else checkpoint.stored_dtype
    return replace(checkpoint.config, stored_dtype=dtype if dtype in DTYPE_BYTES else None)


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a supported checkpoint, in order.

    Raises:
        CheckpointError: it cannot be served.
    """
    model = read_any_model(folder)
    if isinstance(model, TextModelConfig):
        return sorted({tensor.file for tensor in model.tensors.values()})
    return sorted(model.files)


def sha256(path: Path, on_read: Callable[[int], None]) -> str:
    """Compute the checksum of a whole file.

    Args:
        on_read: takes the number of bytes of each piece.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open_model_file(path) as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                on_read(len(piece))
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror}", where=str(path)) from error
    return digest.hexdigest()


def expected_sums(folder: Path, files: Iterable[Path]) -> dict[Path, str]:
    """Find the expected checksums: in SHA256SUMS, in FILE.sha256, or in the hub's blob names.

    Raises:
        CheckpointError: a file of checksums cannot be read.
    """
    listed = _read_sums((folder if folder.is_dir() else folder.parent) / SUMS_FILE)
    sums: dict[Path, str] = {}
    for path in files:
        beside = _read_sums(path.with_name(path.name + ".sha256"))
        blob = os.path.basename(os.path.realpath(path))
        if path.is_symlink() and _SHA256.fullmatch(blob):
            sums[path] = blob
        elif noted := listed.get(path.name) or beside.get(path.name) or beside.get(""):
            sums[path] = noted
    return sums


def _place(found: FoundModel) -> dict[str, Any]:
    return {"name": found.name, "folder": str(found.folder)}


def _basics(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "family": checkpoint.config.family.name,
        "num_parameters": checkpoint.num_parameters,
        "dtype": checkpoint.stored_dtype,
        "size_bytes": checkpoint.num_bytes,
        "max_model_len": checkpoint.config.max_position_embeddings,
    }


def _read_sums(path: Path) -> dict[str, str]:
    """Read checksums by file name, in sha256sum's form; one without a name under ""."""
    try:
        lines = read_model_text(path).splitlines()
    except FileNotFoundError:
        return {}
    sums = {}
    for line in lines:
        digest, _, name = line.strip().partition(" ")
        if _SHA256.fullmatch(digest.lower()):
            sums[name.strip().removeprefix("*").removeprefix("./")] = digest.lower()
    return sums
