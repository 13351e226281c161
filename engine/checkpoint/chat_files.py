"""Read what a model folder says of chats: its template.

Repositories of different years keep it in different files. The order is docs/models.md's: the
first place with a template wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.folder_files import FolderFiles, read_text
from engine.errors import CheckpointError

_JINJA, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_MORE = "additional_chat_templates"
_DEFAULT, _TOOLS = "default", "tool_use"
TEMPLATE_FILES = (_JINJA, _CONFIG, "chat_template.json", "processor_config.json")
_IN_METADATA = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class ChatTemplateText:
    """A model's chat template as its files have it."""

    text: str
    tool_text: str | None
    """The template for conversations with tools, if it differs."""
    place: str
    """The file that has it, with the template's name unless that is the usual one."""
    others: tuple[str, ...] = ()
    """Other templates, by file or name, that are not used."""


def read_chat_template(files: FolderFiles) -> ChatTemplateText | None:
    """Find the chat template; None: no file has one.

    Raises:
        CheckpointError: a file cannot be read, or what it has is no template.
    """
    named = {name: _texts(_templates_in(files, name), files.path / name) for name in TEMPLATE_FILES}
    has_usual = any(texts.keys() - {_TOOLS} for texts in named.values())
    found = [
        chosen
        for name, texts in named.items()
        if (texts.keys() - {_TOOLS} or not has_usual) and (chosen := _choose(texts, name))
    ]
    if not found:
        return None
    first, *later = found
    unused = tuple(each.place for each in later if each.text != first.text)
    tool_text = named[_JINJA].get(_TOOLS, first.tool_text) if has_usual else None
    return replace(first, tool_text=tool_text, others=first.others + unused)


def template_in_metadata(metadata: Mapping[str, Any], path: Path) -> ChatTemplateText | None:
    """Find the chat template among a GGUF file's keys; None: it has none."""
    named = {
        key.removeprefix(_IN_METADATA).removeprefix(".") or _DEFAULT: text
        for key, text in sorted(metadata.items(), reverse=True)  # the key without a name is last
        if key == _IN_METADATA or key.startswith(f"{_IN_METADATA}.")
    }
    return _choose(_texts(named, path), "metadata")


def _texts(named: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Leave out empty templates.

    Raises:
        CheckpointError: one is no text.
    """
    for name, text in named.items():
        if not isinstance(text, str):
            what = f"the chat template {name!r} is {type(text).__name__}, not text"
            raise CheckpointError(what, where=str(path))
    return {name: text for name, text in sorted(named.items()) if text.strip()}


def _choose(texts: Mapping[str, str], place: str) -> ChatTemplateText | None:
    """Choose the usual template out of named ones, and the one for tools."""
    if not texts:
        return None
    name = min(texts, key=lambda each: (each != _DEFAULT, each == _TOOLS, each))
    others = tuple(f"{place}, {each!r}" for each in texts if each not in (name, _TOOLS))
    tool_text = texts.get(_TOOLS) if name != _TOOLS else None
    shown = place if name == _DEFAULT else f"{place}, {name!r}"
    return ChatTemplateText(texts[name], tool_text, shown, others)


def _templates_in(files: FolderFiles, file: str) -> dict[str, Any]:
    """Read a file's templates by name."""
    if file == _JINJA:
        paths = [*sorted((files.path / _MORE).glob("*.jinja")), files.path / file]
        return {
            _DEFAULT if path.name == file else path.stem: read_text(path)
            for path in paths
            if os.path.lexists(path)
        }
    template = files.object(file).get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = {str(entry.get("name")): entry.get("template") for entry in entries}
    if isinstance(template, dict):
        return {name: text for name, text in template.items() if text is not None}
    return {} if template is None else {_DEFAULT: template}
