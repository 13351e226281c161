"""Large buffers stay out of the C heap, so that what is freed goes back to the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from appliance.process_limits import OWN_PAGES_BYTES

CHURN = """
import ctypes, random, re, sys
from appliance.process_limits import keep_small
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
