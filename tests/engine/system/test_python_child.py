"""Which folders a Python child imports from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.system.python_child import ROOT, leave_folder_out, python_command

SOURCES = Path(__file__).parents[3]
NAMES_FILES_ONLY = {"appliance/cli/install_service.py"}
SENDS_ONLY = {"engine/worker/links.py"}
"""It reads and writes pipes by this package, and starts nothing with it."""
OLD_NAMES = {"engine/workers/__main__.py", "appliance/models/hub.py"}
"""These run a program in their own process, which was started without the current folder."""
"""It looks at this interpreter's file, and starts nothing with it."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        (":", ""),
        ("/a", "/a"),
        ("/a:", "/a"),
        (":/a:.:b/c:../d:/e", "/a:/e"),
        (f"/a:{ROOT}", f"/a:{ROOT}"),
    ],
)
def test_of_python_path_the_absolute_folders_stay(before, after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ, path = {"PYTHONPATH": before}, ["/bin", "/a", str(Path.cwd() / "b/c"), "/lib"]
    leave_folder_out(environ, path)
    assert environ == {"PYTHONSAFEPATH": "1", "PYTHONPATH": after}
    assert path == ["/bin", "/a", *([] if "b/c" in before else [str(Path.cwd() / "b/c")]), "/lib"]


def test_where_penstock_itself_lies_here_it_stays(monkeypatch):
    monkeypatch.chdir(ROOT)
    environ, path = {"PYTHONPATH": ".:x"}, [ROOT]
    leave_folder_out(environ, path)
    assert (environ["PYTHONPATH"], path) == (ROOT, [ROOT])


def test_no_other_file_starts_python():
    starts = re.compile(r"sys\.(_base_)?executable|from sys import|\b(multiprocessing|runpy)\b")
    found = {
        str(path.relative_to(SOURCES))
        for package in ("appliance", "engine", "tui", "migrations")
        for path in (SOURCES / package).rglob("*.py")
        if starts.search(path.read_text())
    }
    assert found == {"engine/system/python_child.py"} | NAMES_FILES_ONLY | SENDS_ONLY | OLD_NAMES


def test_the_command_is_safe_whatever_the_environment():
    assert python_command("-c", "pass")[1:] == ("-P", "-c", "pass")
