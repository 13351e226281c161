"""Makes a version's packages of a commit, part by part.

usage: python -m tests.release FOLDER [PART ...]

  tree     refuses a tree with changes, and a machine that lacks a tool; clones the commit
  build    builds every package, twice, in two folders
  compare  refuses packages whose two builds have different bytes
  suite    runs `.ci/run` in the clone; refuses a failed test, or a skipped one that a release needs
  sums     puts the packages and their SHA256SUMS into FOLDER/dist, once all others are done

Without a PART, those that are not done yet, in this order. FOLDER is made, outside of /tmp, which
a booted machine of the tests does not see. What refuses says each reason in a line, and the exit
status is 1. Nothing is tagged or sent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.release.fitness import (
    commit_of,
    counts,
    faults_of_suite,
    faults_of_tree,
    git,
    levels_tested,
    version_of,
)
from tests.release.machine import faults_of_machine
from tests.release.packages import Builder, Unfit, levels, sha256

ROOT = Path(__file__).parents[2]
BUILDS = ("first", "the-second")
"""Folders, with names of different lengths: none may show in a package."""


def refuse(faults: Iterable[str]) -> None:
    """End with the faults, if there are any."""
    if lines := list(faults):
        sys.exit("no release:\n" + "\n".join(lines))


def clone_commit(folder: Path) -> str:
    """Clone the commit that is checked out here."""
    refuse(faults_of_tree(ROOT))
    refuse(faults_of_machine(folder))
    if folder.exists() and any(folder.iterdir()):
        refuse([f"{folder} is not empty"])
    clone = folder / "clone"
    git(ROOT, "clone", "-q", "--no-hardlinks", str(ROOT), str(clone))
    git(clone, "checkout", "-q", commit_of(ROOT))
    return f"v{version_of(clone)} of {commit_of(clone)}"


def build_twice(folder: Path) -> str:
    """Build every package in two folders."""
    for name in ("tools", *BUILDS):
        shutil.rmtree(folder / name, ignore_errors=True)
    builder = Builder.installed(folder / "clone", folder / "tools")
    try:
        for name in BUILDS:
            builder.build(folder / name)
    except Unfit as error:
        refuse([str(error)])
    return ", ".join(sums_of(folder / BUILDS[0]))


def sums_of(build: Path) -> dict[str, str]:
    """The hashes of a build's packages."""
    return {each.name: sha256(each) for each in sorted((build / "dist").iterdir())}


def compare_builds(folder: Path) -> str:
    """Refuse what differs."""
    first, second = (sums_of(folder / name) for name in BUILDS)
    names = sorted(first.keys() | second.keys())
    refuse(f"two builds of {n} differ" for n in names if first.get(n) != second.get(n))
    return f"{len(names)} files have equal bytes"


def try_commit(clone: Path, results: Path) -> None:
    """Do what a newcomer does, in a clone: `.ci/run` with all tests."""
    results.unlink(missing_ok=True)
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junit-xml={results}"
    ended = subprocess.run(
        ["bash", ".ci/run"], cwd=clone, env=os.environ | {"PYTEST_ADDOPTS": options}, check=False
    )
    refuse(faults_of_suite(results))
    if ended.returncode:
        refuse([f".ci/run ended with {ended.returncode}"])
    refuse(faults_of_tree(clone))


def run_suite(folder: Path) -> str:
    """Test the clone; say how much was tested, and which kernels this processor cannot run."""
    clone, results = folder / "clone", folder / "results.xml"
    try_commit(clone, results)
    tested = levels_tested(clone)
    untested = [level for level in levels("x86_64") if level not in tested]
    text = f"{counts(results)}; kernels {', '.join(tested)}"
    return f"{text}; NOT TESTED, lacking here: {', '.join(untested)}" if untested else text


def put_packages(folder: Path) -> str:
    """Put the packages into `dist`, with their sums, if every other part is done."""
    refuse(f"{part} is not done" for part in PARTS if part != "sums" and not is_done(folder, part))
    compare_builds(folder)  # who names parts may have built again
    dist, clone = folder / "dist", folder / "clone"
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(folder / BUILDS[0] / "dist", dist)
    sums = sums_of(folder / BUILDS[0])
    (dist / "SHA256SUMS").write_text("".join(f"{h}  {name}\n" for name, h in sums.items()))
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    subprocess.run(check, cwd=dist, check=True)
    return f"{dist}: v{version_of(clone)} of {commit_of(clone)}, not tagged"


PARTS: dict[str, Callable[[Path], str]] = {
    "tree": clone_commit,
    "build": build_twice,
    "compare": compare_builds,
    "suite": run_suite,
    "sums": put_packages,
}


def is_done(folder: Path, part: str) -> bool:
    """Say whether a part has ended well for the clone's commit."""
    mark = folder / "done" / part
    return mark.exists() and mark.read_text() == commit_of(folder / "clone")


def main() -> None:
    """Make a release, or say why not."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-") or not set(arguments[1:]) <= PARTS.keys():
        sys.exit(__doc__)
    folder = Path(arguments[0]).absolute()
    if (folder / "clone").exists() and commit_of(folder / "clone") != commit_of(ROOT):
        refuse([f"{folder} has another commit than {ROOT}: take a new folder"])
    for part in arguments[1:] or [each for each in PARTS if not is_done(folder, each)]:
        if part != "tree" and not is_done(folder, "tree"):
            refuse([f"{part} needs the tree of {folder}, which is not done"])
        (folder / "done" / part).unlink(missing_ok=True)
        print(f"{part}: {PARTS[part](folder)}", flush=True)
        (folder / "done").mkdir(exist_ok=True)
        (folder / "done" / part).write_text(commit_of(folder / "clone"))


if __name__ == "__main__":
    main()
