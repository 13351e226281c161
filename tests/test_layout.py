"""The top level of the repository, and what a wheel built from it carries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.levels import each_level
from tests.release.packages import ABSOLUTE

ROOT = Path(__file__).parents[1]
FILES = {"pyproject.toml", "README.md"}
FOLDERS = {"appliance", "engine", "tui", "migrations", "tests", "systemd"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def test_the_top_level_has_its_eight_entries() -> None:
    assert {name for name in FILES if (ROOT / name).is_file()} == FILES
    # A link would satisfy is_dir(): each is a folder itself.
    real = {name for name in FOLDERS if (ROOT / name).is_dir() and not (ROOT / name).is_symlink()}
    assert real == FOLDERS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The root of a wheel without kernels, built from a copy: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    packages = FOLDERS - {"tests"}
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder)
    for name in packages:
        left_out = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, "dist"],
        cwd=folder,
        env=os.environ | {"PENSTOCK_BUILD_KERNELS": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (file,) = (folder / "dist").glob("*.whl")
    return zipfile.Path(file)


def test_a_wheel_carries_the_files_that_install_service_writes(wheel: zipfile.Path) -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "systemd").iterdir()}
    carried = {path.name: path.read_text() for path in (wheel / "appliance/systemd").iterdir()}
    assert len(sources) >= 4
    assert carried == sources


def test_a_wheel_leaves_the_top_level_to_its_packages(wheel: zipfile.Path) -> None:
    # site-packages/systemd belongs to systemd's own Python library.
    folders = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert folders == FOLDERS - {"tests", "systemd"}


def test_a_wheel_is_for_every_python_from_3_11_on_and_has_the_one_version(
    wheel: zipfile.Path,
) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    name, python, abi, _ = wheel.root.filename.rpartition("/")[2].split("-", 1)[1].split("-")
    assert (name, python, abi) == (version, "cp311", "abi3")
    files = {path.name for path in (wheel / f"penstock-{version}.dist-info/licenses").iterdir()}
    assert files == {"LICENSE"}


def test_a_wheel_has_every_file_of_its_packages(wheel: zipfile.Path) -> None:
    tracked = {
        str(path.relative_to(ROOT))
        for package in FOLDERS - {"tests", "systemd"}
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so", ".c", ".h"}
    }
    carried = {n for n in wheel.root.namelist() if ".dist-info/" not in n and n[-1] != "/"}
    linked = {name for name in tracked | carried if name.startswith("appliance/systemd/")}
    assert carried - linked == tracked - linked


@each_level
def test_kernels_have_the_stable_abi_an_old_glibc_and_no_folder_of_the_builder(level: str) -> None:
    (module,) = (ROOT / "engine/kernels").glob(f"_{level}.*.so")
    assert module.name == f"_{level}.abi3.so"
    data = module.read_bytes()
    assert ABSOLUTE.findall(data) == []
    # a symbol of a newer one would keep the wheel from machines that torch runs on
    assert max(map(int, re.findall(rb"\0GLIBC_2\.(\d+)", data)), default=0) <= 28
