"""What lies in the hub's cache, where other programs write: nothing in it holds up a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.hub import cache
from appliance.hub.names import HubName, model_name
from tests.appliance.model_folder import make_model
from tests.hostile_models import ODD_FILES

NAME = HubName("owner/name")
COMMIT = "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in a cache, whose branch is not known."""
    folder = cache.repository_folder(tmp_path, NAME.repository)
    make_model(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    return folder


def test_a_branch_leads_to_its_commit(tmp_path: Path, folder: Path) -> None:
    assert cache.resolve(tmp_path, NAME) is None
    (folder / "refs" / "main").write_text(f"{COMMIT}\n")
    assert cache.resolve(tmp_path, NAME) == folder / "snapshots" / COMMIT
    (one,) = cache.snapshots(tmp_path)
    assert cache.is_current(tmp_path, one)


@pytest.mark.parametrize("place", ["refs/main", "refs"])
@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_what_is_no_file_in_the_place_of_a_branch_is_none(
    tmp_path: Path, folder: Path, make, place: str
) -> None:
    if place == "refs":
        (folder / "refs").rmdir()
    make(folder / place)
    assert cache.resolve(tmp_path, NAME) is None
    (one,) = cache.snapshots(tmp_path)
    assert not cache.is_current(tmp_path, one)
    assert cache.in_words(tmp_path)
    make_model(folder / "snapshots" / "other")
    assert cache.remove(tmp_path, NAME.repository, COMMIT) > 0


@pytest.mark.parametrize(
    "text", [b"../../../elsewhere", b"/etc", b"..", b"", b"a/b", b"x" * 300, b"\xff", b"a\0b"]
)
def test_a_branch_names_a_folder_of_the_snapshots_or_none(
    tmp_path: Path, folder: Path, text: bytes
) -> None:
    make_model(tmp_path / "elsewhere")
    (folder / "refs" / "main").write_bytes(text)
    assert cache.resolve(tmp_path, NAME) is None


def test_a_branch_of_a_terabyte_is_not_read(tmp_path: Path, folder: Path) -> None:
    (folder / "refs" / "main").touch()
    os.truncate(folder / "refs" / "main", 1 << 40)
    assert cache.resolve(tmp_path, NAME) is None


@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_a_revision_is_removed_whatever_stands_beside_it(
    tmp_path: Path, folder: Path, make
) -> None:
    other = folder / "snapshots" / "fedcba9876543210"
    make_model(other)
    for place in (other / "odd", folder / "blobs" / "odd"):
        place.parent.mkdir(exist_ok=True)
        if make is not os.mkdir:  # no blob is a folder
            make(place)
    assert cache.remove(tmp_path, NAME.repository, COMMIT) > 0
    assert [one.commit for one in cache.snapshots(tmp_path)] == [other.name]


def test_a_link_to_itself_has_a_name(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert model_name(loop) == "loop"
