"""The verbs on the SSD cache: stats, verify, clear.

Owns: what is said of its files.
Invariant: stats and verify only read, with and without a running daemon; clear touches nothing that
a daemon has.
Never: prints a hash, or anything from which a prompt could be guessed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from appliance.cli import listings, terminal
from appliance.cli.history import StateDir
from appliance.cli.tables import Format, printable
from appliance.cli.terminal import Output, ProgressLine
from appliance.configuration import config
from appliance.frame.figures import size, things
from appliance.frame.protocol import iso_time
from engine.errors import AlreadyRunning, PenstockError

# engine.tiers costs 20 ms, so it comes with the verbs.

SsdDir = Annotated[str | None, typer.Option(help="The folder of the SSD cache.")]

_T = TypeVar("_T")

cache = typer.Typer(help="KV blocks on disk: the SSD cache.", no_args_is_help=True)


class Damaged(PenstockError):
    """Something in the cache is not what was stored."""

    exit_code = 8


@cache.command()
def stats(
    ssd_dir: SsdDir = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> None:
    """Show how much is on disk, and since when."""
    from engine.tiers.files import slab_bytes, survey

    folder = _folder(ssd_dir, state_dir)
    found = [contents for _, contents in _guarded(survey(folder), folder)]
    slabs = [contents for contents in found if contents is not None]
    records = [record for contents in slabs for _, record in contents.records]
    times = [record.stored_at_s for record in records]
    content: dict[str, Any] = {
        "folder": str(folder),
        "files": len(found),
        "file_bytes": slab_bytes(folder),
        "blocks": len(records),
        "block_bytes": sum(record.num_bytes for record in records),
        "models": len({contents.head.fingerprint for contents in slabs}),
        "oldest": iso_time(min(times)) if times else None,
        "newest": iso_time(max(times)) if times else None,
        "damaged_files": len(found) - len(slabs),
        # None: only headers are read here, none of which is damaged; verify reads the blocks
        "damaged_blocks": sum(len(contents.damaged) for contents in slabs) or None,
    }
    terminal.show("cache", content, output, lambda: listings.facts(content))


@cache.command()
def verify(ssd_dir: SsdDir = None, state_dir: StateDir = None) -> None:
    """Read every block on disk; exits 8 if one is damaged.

    A daemon finds the same out before it uses a block. What it writes meanwhile may look damaged.
    """
    from engine.tiers.files import check_records, survey

    folder, num_sound, num_damaged = _folder(ssd_dir, state_dir), 0, 0
    line = ProgressLine("read")
    found = list(_guarded(survey(folder), folder))
    total = sum(contents.head.num_bytes for _, contents in found if contents is not None)
    num_bytes, began_s = 0, time.monotonic()
    for path, contents in found:
        if contents is None:
            num_damaged += 1
            continue
        num_damaged += len(contents.damaged)
        for is_sound in _guarded(check_records(path, contents), path):
            num_sound += is_sound
            num_damaged += not is_sound
        num_bytes += contents.head.num_bytes
        line.show(num_bytes, total, num_bytes / (time.monotonic() - began_s))
    line.end()
    if num_damaged:
        what = f"{num_damaged} damaged, {things(num_sound, 'block')} sound"
        hint = "the daemon drops them when it meets them; see the kernel log for the disk"
        raise Damaged(what, where=str(folder), hint=hint)
    terminal.write(f"{things(num_sound, 'block')} sound\n")


@cache.command()
def clear(ssd_dir: SsdDir = None, state_dir: StateDir = None) -> None:
    """Delete all blocks on disk; the daemon must not be running."""
    from engine.tiers.files import BusyError, delete_slabs

    folder = _folder(ssd_dir, state_dir)
    try:
        num_bytes = delete_slabs(folder)
    except BusyError as error:
        hint = "stop it first, or serve with --ssd-cache off"
        raise AlreadyRunning("a daemon uses it", where=str(folder), hint=hint) from error
    except OSError as error:
        raise PenstockError(f"cannot delete: {error.strerror}", where=str(folder)) from error
    terminal.write(f"deleted {size(num_bytes)} in {printable(folder)}\n")


def _folder(ssd_dir: str | None, state_dir: str | None) -> Path:
    return config.ssd_folder(ssd_dir, state_dir, warn=terminal.passed_over)


def _guarded(found: Iterator[_T], where: Path) -> Iterator[_T]:
    """The same, with what the disk refuses as an error for people."""
    try:
        yield from found
    except OSError as error:
        what = f"cannot read: {error.strerror}"
        hint = "run it as the user who serves"
        raise PenstockError(what, where=str(error.filename or where), hint=hint) from error
