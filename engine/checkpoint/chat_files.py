"""Read what a model folder says of chats: its template and its special tokens.

Repositories of different years keep them in different files. The order is docs/models.md's: the
first place with a template wins.

Never: compiles a template, reads a vocabulary of ordinary tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

_JINJA, _CONFIG, _PROCESSOR = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_MORE = "additional_chat_templates"
_TOOLS = "tool_use"
TEMPLATE_FILES = (_JINJA, _CONFIG, _PROCESSOR)
SPECIAL_FILES = (_CONFIG, "special_tokens_map.json")
_ADDED = '"added_tokens"'


@dataclass(frozen=True, slots=True)
class ChatTemplateText:
    """A model's chat template as its files have it."""

    text: str
    tool_text: str | None
    """The template for conversations with tools, if it differs."""
    place: str
    """The file that has it."""
    others: tuple[str, ...]
    """Files that have another one, which is not used."""


def read_text(path: Path) -> str:
    """Read a text file, which may begin with a byte-order mark.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty: there is no such file.

    Raises:
        CheckpointError: it cannot be read, or is no object.
    """
    if not path.is_file():
        return {}
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise CheckpointError("it is not a JSON object", where=str(path))
    return values


def read_chat_template(folder: Path) -> ChatTemplateText | None:
    """Find the chat template; None: no file has one.

    Raises:
        CheckpointError: a file cannot be read, or what it has is no template.
    """
    found = [(name, *texts) for name in TEMPLATE_FILES if (texts := _templates_in(folder, name))[0]]
    if not found:
        return None
    place, text, tool_text = found[0]
    more = folder / _MORE / f"{_TOOLS}.jinja"
    if more.is_file():
        tool_text = read_text(more)
    others = tuple(name for name, other, _ in found[1:] if other != text)
    return ChatTemplateText(str(text), tool_text, place, others)


def _templates_in(folder: Path, name: str) -> tuple[str | None, str | None]:
    """Read a file's template, and its template for tools."""
    if name == _JINJA:
        path = folder / name
        default = folder / _MORE / "default.jinja"
        path = path if path.is_file() or not default.is_file() else default
        return (read_text(path) if path.is_file() else None), None
    template = read_object(folder / name).get("chat_template")
    named: dict[str, Any] = {"default": template}
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
    elif isinstance(template, dict):
        named = template
    text, tool_text = named.get("default"), named.get(_TOOLS)
    if not isinstance(text, str | None) or not isinstance(tool_text, str | None):
        what = "chat_template is neither a string nor a list"
        raise CheckpointError(what, where=str(folder / name))
    return text, tool_text


def token_text(value: object) -> str | None:
    """Return the text of a special token, which may be an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Read the ids of tokens beside the ordinary vocabulary, by text."""
    listed = _entries(folder)
    found = {text: token_id for text, token_id in listed if text and type(token_id) is int}
    return {text: token_id for text, token_id in found.items() if token_id >= 0}


def _entries(folder: Path) -> Iterator[tuple[str | None, Any]]:
    """List added tokens; of two ids for one text, tokenizer.json's is the one that is used."""
    added = read_object(folder / "added_tokens.json")
    yield from added.items()
    decoder = read_object(folder / _CONFIG).get("added_tokens_decoder")
    for token_id, token in decoder.items() if isinstance(decoder, Mapping) else ():
        yield token_text(token), int(token_id) if token_id.isdecimal() else None
    path = folder / "tokenizer.json"
    text = read_text(path) if path.is_file() else ""
    at = text.find(_ADDED)
    start = text.find("[", at)
    if at < 0 or start < 0:
        return
    try:  # the rest of the file, a vocabulary, takes a quarter of a second
        tokens, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    for token in tokens:
        if isinstance(token, dict):
            yield token_text(token), token.get("id")
