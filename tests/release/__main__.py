"""Makes a version's packages: tests the commit in a clone, builds twice, compares, sums.

usage: python -m tests.release FOLDER

FOLDER is made, outside of /tmp, which a booted machine of the tests does not see; FOLDER/dist gets
the packages and SHA256SUMS. A tree with changes, a failed test, or a skipped one that a release
needs is refused: each reason is a line, and the exit status is 1. Nothing is tagged or sent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.release.fitness import commit_of, faults_of_suite, faults_of_tree, git, version_of
from tests.release.packages import Builder, Unfit

ROOT = Path(__file__).parents[2]


def refuse(faults: Iterable[str]) -> None:
    """End with the faults, if there are any."""
    if lines := list(faults):
        sys.exit("no release:\n" + "\n".join(lines))


def try_commit(clone: Path, results: Path) -> None:
    """Do what a newcomer does, in a clone: `.ci/run` with all tests."""
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junit-xml={results}"
    ended = subprocess.run(
        ["bash", ".ci/run"], cwd=clone, env=os.environ | {"PYTEST_ADDOPTS": options}, check=False
    )
    refuse(faults_of_suite(results))
    if ended.returncode:
        refuse([f".ci/run ended with {ended.returncode}"])
    refuse(faults_of_tree(clone))


def make_packages(clone: Path, folder: Path) -> dict[str, str]:
    """Build twice, in two folders; keep the first if both are equal."""
    builder = Builder.installed(clone, folder / "tools")
    try:
        first, second = (builder.build(folder / name) for name in ("first", "the-second"))
    except Unfit as error:
        refuse([str(error)])
    refuse(f"two builds of {name} differ" for name in first if first[name] != second.get(name))
    (folder / "first/dist").rename(folder / "dist")
    for name in ("first", "the-second", "tools"):
        shutil.rmtree(folder / name)
    return first


def main() -> None:
    """Make a release, or say why not."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).absolute()
    refuse(faults_of_tree(ROOT))
    folder.mkdir(parents=True)
    clone = folder / "clone"
    git(ROOT, "clone", "-q", "--no-hardlinks", str(ROOT), str(clone))
    git(clone, "checkout", "-q", commit_of(ROOT))
    try_commit(clone, folder / "results.xml")
    for name, found in make_packages(clone, folder).items():
        print(f"{found}  {name}")
    print(f"{folder / 'dist'}: v{version_of(clone)} of {commit_of(clone)}, not tagged")


if __name__ == "__main__":
    main()
