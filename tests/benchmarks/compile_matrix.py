"""Every attention kernel on every device that it may meet, compiled by Triton's own compiler.

    python -m tests.benchmarks.compile_matrix > table.md
    python -m tests.benchmarks.compile_matrix --pinned FOLDER > tables.md

The second takes each Triton that a torch for CUDA pins, from FOLDER, where pip puts the missing
ones.

No device is needed. Around heads of 128 in bfloat16, groups of 4 and blocks of 64, one thing varies
at a time: head size, dtype, group, block size, extras (a window and a softcap). It takes some
minutes of one core; `TRITON_CACHE_DIR` says where what was compiled stays. It exits with 1 if a
kernel spills, does not fit, or leaves processors without a program, and names each on stderr.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import triton

from tests.engine.compile_kernels import OPERATIONS, Variant, compile_variant

PINNED = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.12.1": "3.7.1", "2.13.0": "3.7.1"}
"""The Triton of each torch that pyproject.toml takes.

Wheels of PyPI, which are built for CUDA, name it in their metadata; wheels for CPUs name none."""
CAPABILITIES = (80, 86, 89, 90, 100, 120)
CHANGES = (
    {},
    *({"head_dim": size} for size in (64, 80, 96, 192, 256)),
    {"head_dim": 256, "has_extras": True},
    *({"dtype": name} for name in ("float16", "float32")),
    {"dtype": "float32", "head_dim": 256},
    *({"group_size": size} for size in (1, 8, 16)),
    *({"block_size": size} for size in (16, 256)),
)


OF_PARTS = ({}, {"head_dim": 64}, {"head_dim": 256}, {"dtype": "float32"}, {"block_size": 16})
"""Single queries in parts, which are as small in all else, and chunks in parts."""
JOINS = ("join", "join chunk")


def variants():
    changes = {"several": CHANGES, "chunk": OF_PARTS, "single": ({},), "parts": OF_PARTS}
    for kernel, change in ((k, change) for k, every in changes.items() for change in every):
        yield from (Variant(capability, kernel, **change) for capability in CAPABILITIES)
    for kernel in (*JOINS, *OPERATIONS):
        yield from (Variant(capability, kernel) for capability in CAPABILITIES)


def name_of(variant):
    if variant.kernel in (*JOINS, *OPERATIONS):
        return variant.kernel
    dtype = variant.dtype.replace("bfloat", "bf").replace("float", "f")
    extras = ", window and softcap" if variant.has_extras else ""
    shape = f"{dtype} d{variant.head_dim} g{variant.group_size} b{variant.block_size}"
    return f"{variant.kernel} {shape}{extras}"


def cell(found):
    overlap = f" w{max(found.waits)}" if found.waits else ""
    spills = f" **spills {found.spilled_bytes}**" if found.spilled_bytes else ""
    too_much = " **too much**" if found.shared_bytes > found.shared_limit_bytes else ""
    used = f"{found.shared_bytes / 1024:.0f}K{too_much}{overlap} r{found.registers}{spills}"
    return f"{used} t{found.tensor_instructions} c{found.copy_instructions}"


def each_pinned(folder):
    """Run this once with each pinned Triton."""
    codes = []
    for version in sorted(set(PINNED.values())):
        there = folder / version
        if not there.exists():
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", there]
            subprocess.run([*install, f"triton=={version}"], check=True)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(there), os.getcwd()])}
        command = [sys.executable, "-m", "tests.benchmarks.compile_matrix"]
        codes.append(subprocess.run(command, env=environ, check=False).returncode)
    return max(codes)


def main():
    table, faults = {}, []
    for variant in variants():
        try:
            found = compile_variant(variant)
            said, wrong = cell(found), list(found.faults(variant))
        except triton.runtime.errors.OutOfResources as error:
            said = f"**needs {error.required}, has {error.limit}**"
            wrong = [said.strip("*")]
        faults += [f"{name_of(variant)} on sm_{variant.capability}: {each}" for each in wrong]
        table.setdefault(name_of(variant), {})[variant.capability] = said
        print(name_of(variant), variant.capability, said, file=sys.stderr, flush=True)
    print(f"triton {triton.__version__}\n")
    print("| kernel | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |")
    print("|---" * (len(CAPABILITIES) + 1) + "|")
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(row[c] for c in CAPABILITIES) + " |")
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(each_pinned(Path(sys.argv[2])) if sys.argv[1:2] == ["--pinned"] else main())
