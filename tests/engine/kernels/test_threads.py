"""A kernel's call waits for no helper thread that other programs keep from its core."""

import ctypes
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import cpu
from tests.levels import each_level

ROOT = Path(__file__).parents[3]
LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_FOR_THREADS = 0x4206, 0x4207, 0x40000000
LONGEST_S = 60
SCRIPT = """
import os, sys
from random import Random
from engine.kernels import cpu
from tests.kernel_calls import Memory, linear

def call():
    linear(cpu._module(sys.argv[1]), Random(1), Memory(Random(2)), 2)

before = set(os.listdir("/proc/self/task"))
call()
print(*set(os.listdir("/proc/self/task")) - before, flush=True)
input()
for _ in range(3):
    call()
print("done", flush=True)
os._exit(0)
"""


def hold(thread):
    """Keep one thread of a child from its core, from now on."""
    if LIBC.ptrace(PTRACE_SEIZE, thread, 0, 0):
        pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
    assert LIBC.ptrace(PTRACE_INTERRUPT, thread, 0, 0) == 0
    os.waitpid(thread, WAIT_FOR_THREADS)


@each_level
def test_a_call_goes_on_without_a_helper_that_has_no_core(level):
    assert cpu._module(level) is not None
    command = [sys.executable, "-c", SCRIPT, level]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            (helper,) = map(int, process.stdout.readline().split())
            hold(helper)
            process.stdin.write("\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], LONGEST_S)
            assert ready, "it waits for the helper"
            assert process.stdout.readline() == "done\n"
        finally:
            process.kill()
            os.waitpid(helper, WAIT_FOR_THREADS)  # a traced thread is its tracer's to bury
