"""A process gets the usual priority back, and keeps a lower one."""

import os
import subprocess

import pytest

from engine.system.priority import lower_priority


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(("nice", "left"), [(-10, 0), (0, 0), (7, 7)])
def test_only_a_raised_priority_is_left(process, nice, left):
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, nice)
    except PermissionError:
        pytest.skip("this user may not raise a priority")
    lower_priority(0, process.pid)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == left


def test_a_process_that_has_ended_is_left_alone(process):
    process.kill()
    process.wait()
    lower_priority(0, process.pid)
