"""Define the verbs on the SSD cache: stats, verify, clear.

Invariant: reading verbs work with and without a running daemon; clear touches nothing of a running
daemon.
Never: prints a hash, or anything that reveals a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from appliance.cli import fact_pages, terminal
from appliance.cli.activity import StateDir
from appliance.cli.tables import Format
from appliance.cli.terminal import Output, ProgressLine
from appliance.configuration import client_settings
from appliance.observe.frame.figures import size, things
from appliance.observe.frame.protocol import iso_time
from engine.errors import AlreadyRunning, FileError, PenstockError
from engine.printable import printable

# engine.scheduler.offload costs 20 ms, so it comes with the verbs.

SsdDir = Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder of the SSD cache.")]

_T = TypeVar("_T")

cache = typer.Typer(
    help="The SSD cache: KV blocks on disk, and packed weights.",
    no_args_is_help=True,
    callback=terminal.of_this_machine,
)


class Damaged(PenstockError):
    """A cached block differs from what was stored."""

    exit_code = 8


@cache.command("stats")
def cache_stats(
    ssd_dir: SsdDir = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> None:
    """Show the size and age of the cache."""
    from appliance.fleet.weights_file import disk_bytes, files_of
    from engine.scheduler.offload.files import WEIGHTS_FOLDER, shares_of, slab_bytes, survey

    folder = _folder(ssd_dir, state_dir)
    found = [contents for _, contents in _guarded(survey(folder), folder)]
    slabs = [contents for contents in found if contents is not None]
    weights = files_of(folder / WEIGHTS_FOLDER)
    filled = [each for each in (contents.summary for contents in slabs) if each.num_blocks]
    content: dict[str, Any] = {
        "folder": str(folder),
        "files": len(found),
        "file_bytes": slab_bytes(folder),
        "blocks": sum(each.num_blocks for each in filled),
        "block_bytes": sum(each.block_bytes for each in filled),
        "models": [
            {"model": printable(each.model), "blocks": each.num_blocks, "bytes": each.num_bytes}
            for each in shares_of(filled)
        ],
        "weights_files": len(weights),
        "weights_bytes": disk_bytes(weights),
        "oldest": iso_time(min(each.oldest_s for each in filled)) if filled else None,
        "newest": iso_time(max(each.age[0] for each in filled)) if filled else None,
        "damaged_files": len(found) - len(slabs),
        # None: only headers are read here, none of which is damaged; verify reads the blocks
        "damaged_blocks": sum(len(contents.damaged) for contents in slabs) or None,
    }
    shares = [
        f"{each['model'] or 'unknown'}: {things(each['blocks'], 'block')}, {size(each['bytes'])}"
        for each in content["models"]
    ]
    facts = content | {"models": "; ".join(shares) or None}
    terminal.show("cache", content, output, lambda: fact_pages.facts(facts))


@cache.command()
def verify(ssd_dir: SsdDir = None, state_dir: StateDir = None) -> None:
    """Read every block on disk; exits with 8 if one is damaged.

    A daemon finds damage before it uses a block. Blocks that it writes meanwhile may look damaged.
    """
    from engine.scheduler.offload.files import check_records, survey

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
        hint = "the daemon drops them when it reads them; check the disk in the kernel log"
        raise Damaged(what, where=str(folder), hint=hint)
    terminal.write(f"{things(num_sound, 'block')} sound\n")


@cache.command()
def clear(ssd_dir: SsdDir = None, state_dir: StateDir = None) -> None:
    """Delete all blocks and packed weights on disk; the daemon must not be running."""
    from appliance.fleet.weights_file import disk_bytes, unused_weights
    from engine.scheduler.offload.files import WEIGHTS_FOLDER, BusyError, delete_slabs

    if ssd_dir is None and state_dir is None:
        hint = "run it there; for this machine's cache use --ssd-dir"
        terminal.needs_this_machine("what it deletes", hint)
    folder = _folder(ssd_dir, state_dir)
    try:
        with unused_weights(folder / WEIGHTS_FOLDER) as weights:
            num_bytes = delete_slabs(folder) + disk_bytes(weights)
            for path in weights:
                path.unlink()
    except BusyError as error:
        hint = "stop it first, or serve with ssd_cache off"
        raise AlreadyRunning("a daemon uses it", where=str(folder), hint=hint) from error
    except OSError as error:
        hint = "run it as the user who serves"
        raise FileError("cannot delete", error, where=str(folder), hint=hint) from error
    terminal.write(f"deleted {size(num_bytes)} in {printable(folder)}\n")


def _folder(ssd_dir: str | None, state_dir: str | None) -> Path:
    """Return the folder of blocks; a named folder must exist, the default need not."""
    for named in filter(None, (ssd_dir, state_dir)):
        terminal.named_folder(named)
    return client_settings.ssd_folder(ssd_dir, state_dir, warn=terminal.passed_over)


def _guarded(found: Iterator[_T], where: Path) -> Iterator[_T]:
    """Yield the items, turning the disk's errors into errors for people."""
    try:
        yield from found
    except OSError as error:
        named, hint = str(error.filename or where), "run it as the user who serves"
        raise FileError("cannot read", error, where=named, hint=hint) from error
