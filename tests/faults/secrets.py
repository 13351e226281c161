"""Look for keys and prompts in everything that the daemon has written or shown."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.subject import Subject


def find_secrets(subject: Subject, prompts: Iterable[str]) -> list[str]:
    """Name each file that has a key or a part of a prompt in it."""
    wanted = {key.encode(): "a key" for key in subject.keys}
    wanted |= {text.encode(): "a prompt" for text in prompts}
    found = []
    for name, content in _contents(subject):
        for text, what in wanted.items():
            if text in content:
                found.append(f"{name} has {what}: {text!r}")
    return found


def _contents(subject: Subject) -> Iterator[tuple[str, bytes]]:
    """Yield journals, logs, frames and bundles by name."""
    for name, text in subject.stderr_texts().items():
        yield name, text.encode()
    paths: list[Path] = [*subject.state.files(), *subject.ssd.files()]
    paths += [subject.frames_path, *subject.folder.glob("*.db*")]
    for path in paths:
        if path.exists():
            yield path.name, path.read_bytes()
    for path in subject.folder.glob("bundle*.tar.gz"):
        with tarfile.open(path) as bundle:
            for member in bundle.getmembers():
                if (file := bundle.extractfile(member)) is not None:
                    yield f"{path.name}/{member.name}", file.read()
