"""Tries a package on a booted machine of its suite: `python -m tests.deb.proof SUITE FOLDER`.

The machine is FOLDER/SUITE/base with systemd booted in namespaces, so that units, users and socket
are real. The package is installed and asked for a token, then upgraded while four streams at a time
run, removed and purged. The newer package is the same one under the version 0.99.0, so what changes
between versions is not tried. Prints seconds and bytes; what is not as it has to be is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from tests.booted_machine import Machine

STREAM = (
    "penstock",
    "run",
    "--raw",
    "Once upon a time",
    "--temperature",
    "0",
    "--max-tokens",
    "1500",
)
NUM_STREAMS = 4
"""At a time. A restart is one moment of an upgrade, and only what runs then sees two daemons."""
NEWER = "0.99.0"
CHANGING = re.compile(
    r"(proc|sys|dev|run|tmp|old|var/(tmp|log|cache)|var/lib/(dpkg|systemd))(/|$)"
    r"|etc/(passwd|group|shadow|gshadow)-$"
)
"""What a machine or dpkg itself changes while it runs; the backups are those of userdel."""


def newer_package(deb: Path, folder: Path) -> Path:
    """Make the next version of a package, of other metadata alone."""
    tree = folder / "newer"
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-R", str(deb), str(tree)], check=True)
    (facts,) = tree.glob(
        "usr/lib/penstock/lib/python3*/site-packages/penstock-*.dist-info/METADATA"
    )
    for path in (facts, tree / "DEBIAN/control"):
        path.write_text(re.sub(r"(?m)^Version: [\d.]+", f"Version: {NEWER}", path.read_text()))
    sums, inside = tree / "DEBIAN/md5sums", re.escape(str(facts.relative_to(tree)))
    new_sum = hashlib.md5(facts.read_bytes()).hexdigest()
    sums.write_text(re.sub(rf"(?m)^\w+(?=  {inside}$)", new_sum, sums.read_text()))
    made = folder / "newer.deb"
    subprocess.run(["dpkg-deb", "-Zzstd", "-z1", "-b", str(tree), str(made)], check=True)
    shutil.rmtree(tree)
    return made


def listing(machine: Machine) -> dict[str, object]:
    """List what lies on the machine: the mode of each path, and the bytes of those in /etc."""
    found: dict[str, object] = {}
    top = machine.path("/")
    for folder, names, files in os.walk(top):
        inside = Path(folder).relative_to(top)
        names[:] = [each for each in names if not CHANGING.match(str(inside / each))]
        for name in (*names, *files):
            path, at = top / inside / name, str(inside / name)
            if not CHANGING.match(at):
                is_read = at.startswith("etc/") and path.is_file() and not path.is_symlink()
                found[at] = (path.lstat().st_mode, path.read_bytes() if is_read else b"")
    return found


def installed_bytes(machine: Machine) -> int:
    """Count the bytes that the package's files take on the disk."""
    total = machine.run("du", "-scB1", "/usr/lib/penstock").stdout
    return int(total.split()[0])


def first_token_s(machine: Machine, since_s: float) -> float:
    """Ask for a reply; return the seconds until its first byte."""
    process = machine.start("penstock", "run", "Who are you?")
    assert process.stdout is not None
    assert process.stdout.read(1)
    took_s = time.monotonic() - since_s
    process.communicate()
    return took_s


class Reply(NamedTuple):
    """What one stream has left."""

    text: str
    notes: tuple[str, ...]
    """Lines of stderr. They may differ: a slow restart, or a load, is told of there."""
    status: int

    def difference(self, other: Reply) -> str:
        """Say in what another reply differs, but for its notes; empty: in nothing."""
        if (self.text, self.status) == (other.text, other.status):
            return ""
        pairs = zip(self.text, other.text, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends = [f"{len(each.text)}, then {each.text[alike:][:80]!r}" for each in (self, other)]
        said = f"exit {self.status} and {other.status}, stderr {other.notes}"
        return f"{alike} characters alike of {ends[0]} and of {ends[1]}; {said}"


def reply_of(stream: subprocess.Popen[str]) -> Reply:
    """Wait for a stream's end."""
    text, notes = stream.communicate(timeout=300)
    return Reply(text, tuple(notes.splitlines()), stream.returncode)


def upgrade_under_load(machine: Machine, deb: Path) -> str:
    """Install a newer version while streams run, whose text and status must be as ever."""
    whole = reply_of(machine.start(*STREAM))
    assert whole.status == 0, whole
    old_pid, start_s = machine.property("MainPID"), time.monotonic()
    upgrade = machine.start("dpkg", "-i", str(deb))
    replies: list[Reply] = []
    streams = [machine.start(*STREAM) for _ in range(NUM_STREAMS)]
    while upgrade.poll() is None:  # each is followed by another, so that the restart meets some
        time.sleep(0.1)
        for place, stream in enumerate(streams):
            if stream.poll() is not None:
                replies.append(reply_of(stream))
                streams[place] = machine.start(*STREAM)
    replies += map(reply_of, streams)
    took_s, said = time.monotonic() - start_s, upgrade.communicate()
    different = [found for each in replies if (found := whole.difference(each))]
    assert not different, "\n".join(different)
    assert upgrade.returncode == 0, said
    assert machine.property("MainPID") != old_pid
    told = json.loads(machine.run("penstock", "version", "-o", "json").stdout)
    assert (told["version"], told["daemon_version"]) == (NEWER, NEWER)
    rows = json.loads(machine.run("penstock", "log", "-n", "99", "-o", "json").stdout)["data"]
    num_carried = sum(row["recoveries"] > 0 for row in rows)
    assert num_carried, "no stream ran during the restart"
    notes = {each for reply in replies for each in reply.notes} - set(whole.notes)
    about = f"{took_s:.1f} s, {len(replies)} equal streams, {num_carried} through two daemons"
    return "\n  ".join([about, *sorted(notes)])


def main() -> None:
    """Try the package that is in FOLDER/SUITE/dist."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder = Path(sys.argv[2]).absolute() / sys.argv[1]
    (deb,) = (folder / "dist").glob("penstock_*.deb")
    prove(folder, deb, newer_package(deb, folder / "dist"))


def prove(folder: Path, deb: Path, newer: Path) -> None:
    """Install, upgrade, remove and purge on a machine that is a copy of FOLDER/base."""
    tree = folder / "proof"
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["cp", "-a", str(folder / "base"), str(tree)], check=True)
    machine = Machine([deb.parent], tree)
    try:
        try_package(machine, deb, newer)
    finally:
        machine.close()
        shutil.rmtree(tree)
        newer.unlink()


def try_package(machine: Machine, deb: Path, newer: Path) -> None:
    """Do all steps on a machine that has nothing of ours."""
    before, start_s = listing(machine), time.monotonic()
    machine.run("dpkg", "-i", str(deb), timeout_s=600)
    unpacked_s, token_s = time.monotonic() - start_s, first_token_s(machine, start_s)
    print(f"{deb.name}: {deb.stat().st_size:,} bytes, installed {installed_bytes(machine):,}")
    print(f"install: {unpacked_s:.1f} s, first token after {token_s:.1f} s", flush=True)
    print(machine.run("systemctl", "--no-pager", "--version").stdout.splitlines()[0])
    print(f"upgrade: {upgrade_under_load(machine, newer)}", flush=True)
    machine.run("dpkg", "-r", "penstock", timeout_s=600)
    assert machine.property("ActiveState") == "inactive"
    assert not Path(machine.socket).exists()
    assert machine.path("/var/lib/penstock/requests.db").exists()
    assert machine.path("/etc/penstock/penstock.toml").exists()
    machine.run("dpkg", "-P", "penstock", timeout_s=600)
    after = listing(machine)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    assert not changed, changed
    print(f"remove, purge: nothing is left, of {len(before):,} paths none changed")


if __name__ == "__main__":
    main()
