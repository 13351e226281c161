"""Look for keys, prompts and replies in everything that the daemon has written or shown."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.questions import Question
from tests.faults.subject import Subject

SHORTEST_REPLY = 24
"""Characters of a reply that is looked for: a shorter one may be anywhere."""


def find_secrets(subject: Subject, questions: Iterable[Question]) -> list[str]:
    """Name each file that has a key, or a part of a prompt or reply, in it; print what was read."""
    wanted = {key.encode(): "a key" for key in subject.keys}
    for question in questions:
        wanted[question.secret.encode()] = "a prompt"
        replies = [text for text in question.texts.values() if len(text) >= SHORTEST_REPLY]
        wanted |= {text.encode(): "a reply" for text in replies}
    wanted.pop(b"", None)
    found, num_files, num_bytes = [], 0, 0
    for name, content in _contents(subject):
        num_files, num_bytes = num_files + 1, num_bytes + len(content)
        for text, what in wanted.items():
            if text in content:
                found.append(f"{name} has {what}: {text!r}")
    kinds = ", ".join(f"{count} of {what}" for what, count in Counter(wanted.values()).items())
    where = f"{num_files} files, {num_bytes >> 20} MiB"
    print(f"looked for secrets in {where}: {kinds}: {len(found)} found")
    return found


def _contents(subject: Subject) -> Iterator[tuple[str, bytes]]:
    """Yield journals, logs, frames, bundles and core dumps by name."""
    for name, text in subject.stderr_texts().items():
        yield name, text.encode()
    paths: list[Path] = [*subject.state.files(), *subject.ssd.files()]
    paths += [subject.frames_path, *subject.folder.glob("*.db*")]
    paths += Path.cwd().glob("core*")  # where a crashed worker's would be
    for path in paths:
        if path.is_file():
            yield path.name, path.read_bytes()
    for path in subject.folder.glob("bundle*.tar.gz"):
        with tarfile.open(path) as bundle:
            for member in bundle.getmembers():
                if (file := bundle.extractfile(member)) is not None:
                    yield f"{path.name}/{member.name}", file.read()
