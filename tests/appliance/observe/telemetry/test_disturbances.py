"""What held up the steps of the last second: the hypervisor, a quota, or a disk."""

import os

import pytest

from appliance.observe.telemetry.disturbances import MAX_FAULTS, Disturbances

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Two processors, one worker and a control group, as the kernel reports them."""

    def __init__(self, folder):
        self.proc = folder / "proc"
        self.group = folder / "cgroup"
        for each in (self.proc / "self", self.proc / "42", self.group):
            each.mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/\n")
        mount = f"30 20 0:26 / {self.group} rw - cgroup2 cgroup2 rw\n"
        (self.proc / "self" / "mountinfo").write_text(mount)
        self.report()

    def report(self, steal_s=0.0, throttled=0, faults=0, others_s=0.0, own_s=0.0):
        ticks, own = int(steal_s * TICKS), int(own_s * TICKS)
        used = own + int(others_s * TICKS)
        cpu = f"{1 + used} 2 3 4 5 6 7 {ticks} 0 0"
        (self.proc / "stat").write_text(f"cpu  {cpu}\ncpu0 {cpu}\ncpu1 1 2 3 4 5 6 7 0 0 0\n")
        (self.proc / "42" / "stat").write_text(
            f"42 (a b) S 1 1 1 0 0 0 10 0 {faults} 0 {5 + own} 6\n"
        )
        (self.group / "cpu.stat").write_text(f"usage_usec 1\nnr_throttled {throttled}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("reported", "is_disturbed"),
    [
        ({}, False),
        ({"steal_s": 0.02}, False),
        ({"steal_s": 0.2}, True),
        ({"throttled": 1}, True),
        ({"faults": MAX_FAULTS}, False),
        ({"faults": MAX_FAULTS + 1}, True),
    ],
)
def test_what_has_grown_since_the_last_look_is_told(machine, reported, is_disturbed):
    seen = Disturbances(machine.proc)
    assert not seen.look([42], 100.0)
    machine.report(**reported)
    assert seen.look([42], 101.0) == is_disturbed
    assert not seen.look([42], 102.0), "and once"


@pytest.mark.parametrize(
    ("reported", "cpus", "is_disturbed"),
    [
        ({"own_s": 0.9}, {0}, False),
        ({"own_s": 0.5, "others_s": 0.05}, {0}, False),
        ({"own_s": 0.5, "others_s": 0.3}, {0}, True),
        ({"others_s": 0.3}, {1}, False),
        ({"others_s": 0.3}, (), False),
    ],
)
def test_other_programs_count_on_the_watched_cores(machine, reported, cpus, is_disturbed):
    seen = Disturbances(machine.proc, cpus)
    assert not seen.look([42], 100.0)
    machine.report(**reported)
    assert seen.look([42], 101.0) == is_disturbed


def test_what_the_kernel_does_not_report_held_nothing_up(tmp_path):
    seen = Disturbances(tmp_path)
    assert not seen.look([None, 7], 1.0)
    assert not seen.look([7], 2.0)
