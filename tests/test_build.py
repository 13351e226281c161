"""setup.py builds the kernels that are wanted, and nothing twice; here of one small C file."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = """
#include <Python.h>
static PyObject *supported(PyObject *m, PyObject *n)
{ return Py_BuildValue("(sss)", "avx512", "avx2", "portable"); }
static PyMethodDef functions[] = {{"supported", supported, METH_NOARGS, NULL}, {0}};
#define NAME_OF(level) PyInit__##level
#define NAME(level) NAME_OF(level)
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kernels", .m_methods = functions};
PyMODINIT_FUNC NAME(LEVEL)(void) { return PyModuleDef_Init(&definition); }
"""
PROJECT = """
[project]
name = "toy"
version = "1"
[tool.setuptools]
package-dir = { "" = "." }
packages = ["engine", "engine.kernels"]
"""
COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo "$*" >> "$CALLS" ;; esac
case "$REFUSED" in ?*) case "$*" in *"$REFUSED"*) exit 1 ;; esac ;; esac
exec gcc "$@"
"""
ALL = {"portable", "avx2", "avx512", "avx512bf16", "amx"}
NATIVE = {"portable", "avx512"}

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="other levels than x86's"),
]


class Toy:
    """A project with our setup.py, and a compiler that counts what it compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kernels = folder, folder / "engine/kernels"
        self.kernels.mkdir(parents=True)
        for name in ("engine", "engine/kernels"):
            (folder / name / "__init__.py").touch()
        shutil.copy(ROOT / "setup.py", folder)
        (folder / "pyproject.toml").write_text(PROJECT)
        (self.kernels / "module.c").write_text(SOURCE)
        self.compiler, self.calls = folder / "compiler", folder / "calls"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)

    def build(self, kind: str, **environ: str) -> set[str]:
        """Build as pip does; return the levels that were compiled."""
        self.calls.write_text("")
        script = f"import sys; from setuptools import build_meta as b; b.build_{kind}('dist')"
        built = subprocess.run(
            [sys.executable, "-c", script],
            cwd=self.folder,
            env=os.environ | {"CC": str(self.compiler), "CALLS": str(self.calls)} | environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert built.returncode == 0, built.stderr
        words = self.calls.read_text().split()
        return {word.removeprefix("-DLEVEL=") for word in words if word.startswith("-DLEVEL=")}

    def in_place(self) -> set[str]:
        return {path.name.partition(".")[0][1:] for path in self.kernels.glob("*.so")}


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_an_editable_install_compiles_what_this_machine_runs_and_only_once(toy: Toy) -> None:
    assert toy.build("editable") == NATIVE
    assert toy.in_place() == NATIVE
    assert toy.build("editable") == set()
    assert toy.in_place() == NATIVE


def test_the_variable_adds_the_other_levels_to_those_that_are_there(toy: Toy) -> None:
    toy.build("editable")
    assert toy.build("editable", PENSTOCK_BUILD_KERNELS="all") == ALL - NATIVE
    assert toy.in_place() == ALL
    assert toy.build("editable") == set()
    assert toy.in_place() == ALL


def test_after_a_change_no_level_of_older_sources_is_left(toy: Toy) -> None:
    toy.build("editable", PENSTOCK_BUILD_KERNELS="all")
    (toy.kernels / "more.h").write_text("// new\n")
    assert toy.build("editable") == NATIVE
    assert toy.in_place() == NATIVE


def test_a_wheel_has_all_levels_by_the_stable_abi(toy: Toy) -> None:
    assert toy.build("wheel") == ALL
    assert toy.in_place() == set()
    (wheel,) = (toy.folder / "dist").iterdir()
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if name.endswith(".so")}
    assert modules == {f"engine/kernels/_{level}.abi3.so" for level in ALL}


def test_a_module_named_for_one_python_which_it_would_prefer_is_removed(toy: Toy) -> None:
    toy.build("editable")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in (toy.kernels, *toy.folder.glob("build/lib*/engine/kernels")):
        (folder / f"_avx512{suffix}").touch()
    toy.build("wheel")
    assert (toy.kernels / f"_avx512{suffix}").exists()  # a wheel leaves the source folder alone
    (wheel,) = (toy.folder / "dist").glob("toy-1-cp311-abi3-*")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(suffix)]
    toy.build("editable")
    assert not (toy.kernels / f"_avx512{suffix}").exists()
    assert toy.in_place() == NATIVE


def test_where_the_compiler_lacks_a_level_the_next_best_is_built(toy: Toy) -> None:
    assert toy.build("editable", REFUSED="-mavx512f") == {*NATIVE, "avx2"}
    assert toy.in_place() == {"portable", "avx2"}


def test_without_a_compiler_the_install_succeeds_without_kernels(toy: Toy) -> None:
    assert toy.build("editable", CC="/nowhere/cc") == set()
    assert toy.in_place() == set()


def test_a_wheel_for_another_machine_has_its_levels(toy: Toy) -> None:
    assert toy.build("wheel", _PYTHON_HOST_PLATFORM="linux-aarch64") == {"portable"}
    (wheel,) = (toy.folder / "dist").iterdir()
    assert wheel.name.endswith("-linux_aarch64.whl")
