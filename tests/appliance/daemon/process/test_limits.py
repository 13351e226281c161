"""The process keeps large buffers out of the C heap, and takes the open files that it may have."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest

from appliance.daemon.process.limits import (
    MAX_TURN_S,
    NUM_APART,
    OWN_PAGES_BYTES,
    SpareDescriptors,
    max_connections,
    share_interpreter,
)

CHURN = """
import ctypes, random, re, sys
from appliance.daemon.process.limits import keep_small
if sys.argv[1] == "kept" and not keep_small():
    sys.exit("this C library has no such sizes")
rng, stays, passing = random.Random(0), [], []
for _ in range(5_000):  # bodies that come and go among small things that stay
    passing.append(bytearray(rng.choice((1_000, 70_000, 200_000))))
    stays.append(bytearray(600))
    if len(passing) > 40:
        passing.pop(rng.randrange(40))
passing.clear()
print(int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


def held_kib(how: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", CHURN, how], capture_output=True, check=False, text=True
    )
    if ended.returncode:
        pytest.skip(ended.stderr)
    return int(ended.stdout)


def test_bodies_that_come_and_go_leave_no_holes():
    assert held_kib("kept") < held_kib("as it is") - 512
    assert OWN_PAGES_BYTES < 70_000


def test_the_soft_limit_is_raised_to_the_hard_one():
    script = (
        "import resource; from appliance.daemon.process.limits import raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "print(raise_limit(1024)); print(raise_limit(100))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    told, *others = said.stdout.splitlines()
    assert re.findall(r"\d+", told) == ["1024", "300", "172"]
    assert others == ["None", "300"]


def test_connections_fit_in_what_is_left():
    assert max_connections(1024, 4096) == 1024
    assert max_connections(1024, 1024) == 1024 - NUM_APART
    assert max_connections(1024, 8) == 1
    assert max_connections(2) == min(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - NUM_APART)


def test_spare_descriptors_are_there_again_after_they_were_given_up():
    spare, num_fds = SpareDescriptors(3), len(os.listdir("/proc/self/fd"))
    with spare.given_up():
        assert len(os.listdir("/proc/self/fd")) == num_fds - 3
    assert len(os.listdir("/proc/self/fd")) == num_fds
    spare.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds - 3


def test_a_signal_while_threads_start_leaves_none_that_would_keep_the_process():
    script = (
        "import os, signal, threading\n"
        "from appliance.daemon.process.limits import standing_threads\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
        "wait = threading.Barrier.wait\n"
        "def interrupted(self, timeout=None):\n"
        "    if threading.current_thread() is threading.main_thread():\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return wait(self, timeout)\n"
        "threading.Barrier.wait = interrupted\n"
        "standing_threads(2, 'x')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert b"KeyboardInterrupt" in ended.stderr


def test_threads_give_way_to_the_loop_within_half_a_millisecond():
    usual_s = sys.getswitchinterval()
    try:
        share_interpreter()
        assert sys.getswitchinterval() == pytest.approx(MAX_TURN_S)
    finally:
        sys.setswitchinterval(usual_s)
