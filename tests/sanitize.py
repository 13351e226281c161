"""Builds the CPU kernels with a sanitizer and makes random calls of them all.

usage: python -m tests.sanitize KIND [--level avx2] [--calls 500] [--seed 0]
KIND: address, undefined, thread, or address,undefined

The levels that this machine can run are built and tried one after the other, or the one that is
named; what a sanitizer finds is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from engine.kernels.cpu import load_kernels

ROOT = Path(__file__).parents[1]
KINDS = {
    "address": "libasan.so",
    "undefined": "libubsan.so",
    "thread": "libtsan.so",
    "address,undefined": "libasan.so",
}
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
_NO_RANDOM_ADDRESSES = 0x0040000
"""For personality(): a thread sanitizer wants memory where it expects it."""


def flags(level: str) -> list[str]:
    """The compiler's flags for one level, as setup.py has them."""
    names = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    return list(names["levels"]()[level])


def build(kind: str, level: str, folder: Path) -> Path:
    """One level's module with the sanitizer in it."""
    module = folder / f"_{level}.so"
    kernels = ROOT / "engine/kernels"
    sources = sorted(map(str, kernels.glob("*.c")))
    command = [
        "gcc", "-shared", "-fPIC", "-std=gnu11", "-O1", "-g1", "-fno-omit-frame-pointer",
        f"-fsanitize={kind}", "-fno-sanitize-recover=all", "-fno-math-errno",
        "-fno-trapping-math", f"-DLEVEL={level}", f"-I{sysconfig.get_paths()['include']}",
        *flags(level), *sources, "-pthread", "-o", str(module),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return module


def run(kind: str, module: Path, calls: int, seed: int) -> subprocess.CompletedProcess[str]:
    """The calls, in a process that has the sanitizer's library from the beginning."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={KINDS[kind]}"], capture_output=True, text=True, check=True
    )
    personality = ctypes.CDLL(None).personality
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/kernel_calls.py"), str(module), str(calls), str(seed)],
        env=os.environ | _OPTIONS | {"LD_PRELOAD": found.stdout.strip()},
        capture_output=True,
        text=True,
        preexec_fn=lambda: personality(_NO_RANDOM_ADDRESSES),
        check=False,
    )


def main() -> int:
    """Build, run, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--level")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    levels = [options.level] if options.level else load_kernels()[0].supported()
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            ended = run(
                options.kind, build(options.kind, level, Path(folder)), options.calls, options.seed
            )
            print(f"{options.kind}, {level}, {platform.machine()}: {ended.stdout.strip()}")
            if ended.returncode:
                print(ended.stderr[-8000:], f"exit status {ended.returncode}")
                worst = 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
