"""Keep what self-tests of kernels have found, in a file of the state folder.

Invariant: a file that is damaged or not ours is as good as none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.system.own_files import open_file, open_own
from engine.wire.messages import Proof

log = logging.getLogger("penstock")

FILE_NAME = "self_test.json"
_MOST = 64


def load_proofs(state_dir: Path) -> list[Proof]:
    """Read the proofs of earlier starts, the oldest first."""
    try:
        with open(open_file(state_dir / FILE_NAME, os.O_RDONLY), "rb") as file:
            return msgspec.json.decode(file.read(), type=list[Proof])
    except (OSError, msgspec.MsgspecError):
        return []


def keep_proofs(state_dir: Path, proofs: Iterable[Proof]) -> None:
    """Add proofs to the file; one of the same key is replaced."""
    new = {proof.key: proof for proof in proofs}
    kept = [proof for proof in load_proofs(state_dir) if proof.key not in new]
    data = msgspec.json.encode([*kept, *new.values()][-_MOST:])
    beside = state_dir / f"{FILE_NAME}.new"
    try:
        fd = open_own(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        beside.replace(state_dir / FILE_NAME)
    except OSError as error:
        log.warning("Self-test not kept, the next start repeats it: %s", error.strerror)
