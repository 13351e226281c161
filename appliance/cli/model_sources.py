"""Name the file that each part of a model comes from, and what files say otherwise.

Invariant: it names what the engine reads, by the engine's own readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.chat_files import (
    TEMPLATE_FILES,
    read_chat_template,
    template_in_metadata,
)
from engine.checkpoint.checkpoint import Checkpoint, weight_files
from engine.checkpoint.folder_files import FolderFiles, read_text
from engine.checkpoint.gguf import GgufModel, find_gguf, models_in
from engine.checkpoint.token_files import ADDED_FILE, SPECIAL_FILES, read_token_files
from engine.errors import CheckpointError
from engine.text.read_models import read_tokenizer
from engine.text.tokenizer import Tokenizer

_SAMPLING = "generation_config.json"
_OPTIONAL = tuple(dict.fromkeys((_SAMPLING, *SPECIAL_FILES, ADDED_FILE, *TEMPLATE_FILES)))
_ALL_IN_ONE = ("config", "weights", "tokenizer", "special_tokens", "sampling")


def sources(folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """List the sources of a model's parts, and under `not_used` what another file says.

    Args:
        tokenizer: the one that is used.

    Raises:
        CheckpointError: a file cannot be read.
    """
    gguf = find_gguf(folder)
    if gguf is not None:
        template = template_in_metadata(GgufModel.open(gguf).metadata, gguf)
        named = dict.fromkeys(_ALL_IN_ONE, f"{gguf.name}, metadata")
        named["weights"] = ", ".join(sorted(path.name for path in checkpoint.files))
        others = [] if template is None else list(template.others)
        place = None if template is None else template.place
        return _page(named, place, others + _unknown_ends(checkpoint))
    parts = FolderFiles(folder)
    template, tokens = read_chat_template(parts), read_token_files(parts)
    listing, files = weight_files(folder)
    source = () if tokens.source is None else tokens.source.files
    beside = [name for name, texts in tokens.named.items() if texts] + list(tokens.listed)
    named = {
        "config": "config.json",
        "weights": files[0].name if len(files) == 1 else f"{len(files)} files of {listing.name}",
        "tokenizer": ", ".join(source),
        "special_tokens": ", ".join(dict.fromkeys([*source[:1], *beside])),
        "sampling": _SAMPLING if _has_words(folder / _SAMPLING) else "the usual",
    }
    unread = [path.name for path in models_in(folder)]
    if len(files) == 1 and (index := folder / f"{files[0].name}.index.json").exists():
        unread.append(index.name)
    unread += list(template.others) if template is not None else []
    there = [name for name in _OPTIONAL if (folder / name).exists()]
    unread += [f"{name}, which is empty" for name in there if not _has_words(folder / name)]
    unread += _unknown_ends(checkpoint) + tokens.differing()
    if tokens.source is not None:
        unread += [_compared(folder, name, tokenizer.ids()) for name in tokens.source.others]
    return _page(named, None if template is None else template.place, unread)


def _compared(folder: Path, name: str, used: Mapping[str, int]) -> str:
    """Compare the tokenizer of a file that is not used with the one that is."""
    try:
        ids = read_tokenizer(folder, has_chats=False, source=name).ids()
    except CheckpointError as error:
        return f"{name}, which cannot be read: {error.what}"
    others = [text for text, token_id in ids.items() if used.get(text) != token_id]
    if not others:
        return f"{name}, with the same ids"
    text = min(others, key=lambda each: ids[each])
    return f"{name}, with other ids for {len(others)} of {len(ids)} tokens: {text!r} is {ids[text]}"


def _unknown_ends(checkpoint: Checkpoint) -> list[str]:
    """List the ids of end tokens that no token has."""
    return [
        f"{place}: eos_token_id {', '.join(map(str, ids))}"
        for place, ids in checkpoint.config.unknown_ends.items()
    ]


def _has_words(path: Path) -> bool:
    return path.exists() and read_text(path).strip() != ""


def _page(named: dict[str, str], template: str | None, unused: list[str]) -> dict[str, Any]:
    page = {**named, "chat_template": template or "none"}
    return page | ({"not_used": "; ".join(unused)} if unused else {})
