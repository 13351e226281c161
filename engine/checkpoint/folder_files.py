"""Read the files of JSON and text in a model's folder, each file of JSON once.

Invariant: whatever asks a FolderFiles for a file gets what was read first, though the file may be
another one by now.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine.checkpoint.json_keys import JsonKeys
from engine.checkpoint.model_file import read_model_text
from engine.errors import CheckpointError


class FolderFiles:
    """Keep what was read of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, JsonKeys] = {}

    def object(self, name: str) -> dict[str, Any]:
        """Return what read_object() does of a file. Do not modify."""
        if name not in self._objects:
            self._objects[name] = read_object(self.path / name)
        return self._objects[name]

    def keys(self, name: str) -> JsonKeys:
        """Return what JsonKeys.from_file() does of a file, which must be there."""
        if name not in self._keys:
            self._keys[name] = JsonKeys.from_file(self.path / name)
        return self._keys[name]


def read_text(path: Path) -> str:
    """Read a text file, which may begin with a byte-order mark.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read_model_text(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty: there is no such file, or nothing in it.

    Raises:
        CheckpointError: it cannot be read, or is no object.
    """
    if not os.path.lexists(path):
        return {}
    text = read_text(path)
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise CheckpointError("it is not a JSON object", where=str(path))
    return values
