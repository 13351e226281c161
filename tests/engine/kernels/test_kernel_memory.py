"""Kernels touch nothing but what they are given, and threads nothing of each other's."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import cpu
from tests.kernel_calls import CALLS
from tests.levels import each_level, needs_kernels
from tests.sanitize import build, run

DRIVER = Path(__file__).parents[2] / "kernel_calls.py"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@each_level
def test_memory_behind_arrays_is_never_touched_whatever_the_shape(level):
    module = cpu._module(level).__file__
    arguments = [sys.executable, str(DRIVER), module, "160", "7"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "160 calls\n"), ended.stderr


def test_a_read_behind_an_array_is_fatal_there():
    script = (
        "import ctypes, faulthandler, random\n"
        "faulthandler.enable()\n"  # else the machine's log has a crash that looks like a real one
        "from tests.kernel_calls import Memory\n"
        "memory = Memory(random.Random(0))\n"
        "memory._random.random = lambda: 1.0\n"
        "address = memory.array(b'abc')\n"
        "assert ctypes.string_at(address, 3) == b'abc'\n"
        "print('so far', flush=True)\n"
        "ctypes.string_at(address, 4)\n"
    )
    arguments = [sys.executable, "-c", script]
    ended = subprocess.run(
        arguments, capture_output=True, text=True, check=False, cwd=DRIVER.parents[1]
    )
    assert (ended.returncode, ended.stdout) == (-11, "so far\n")


def test_every_kernel_is_called():
    kernels = {name for name in vars(cpu.Kernels) if not name.startswith("_")}
    source = DRIVER.read_text()
    assert {name for name in kernels if f"kernels.{name}(" in source} == kernels
    assert len(CALLS) == 13


@needs_gcc
@needs_kernels
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_a_sanitizer_finds_nothing_in_a_short_run(kind, tmp_path):
    ended = run(kind, build(kind, "portable", tmp_path), 40, 3)
    assert (ended.returncode, ended.stdout) == (0, "40 calls\n"), ended.stderr[-4000:]
