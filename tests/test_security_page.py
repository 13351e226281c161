"""Each sentence group of docs/security.md names a test that exists, or says that it has none."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
MARK = re.compile(r"\[([^\]]+)\]")


def test_each_line_names_its_tests_or_says_that_there_is_none():
    claims = [line for line in PAGE.splitlines() if line.startswith("- ")]
    assert len(claims) > 15
    assert not [line for line in claims if not MARK.search(line)]


def test_the_tests_that_are_named_are_there():
    names = {each for mark in MARK.findall(PAGE) for each in mark.split(", ")} - {"not tested"}
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert names
    assert names <= there


def test_it_is_one_page():
    assert len(PAGE.splitlines()) <= 80
