"""Limits of control groups are seen in version 2, in version 1, and where a machine has both."""

import pytest

from appliance.fleet.cgroup_limits import cpu_quota, free_memory_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A /proc/self of a process in groups `a/b`, and the files of these groups."""
    proc = tmp_path / "proc"
    proc.mkdir()

    class Machine:
        def __init__(self):
            self.proc, self.mounts, self.groups = proc, [], []

        def mount(self, kind, name, options, root="/"):
            place = tmp_path / name
            number = len(self.mounts) + 30
            self.mounts.append(f"{number} 1 0:{number} {root} {place} rw - {kind} cgroup {options}")
            self.groups.append(f"{0 if kind == 'cgroup2' else number}:{options}:/a/b")
            if kind == "cgroup2":
                self.groups[-1] = "0::/a/b"
            (proc / "mountinfo").write_text("\n".join(self.mounts))
            (proc / "cgroup").write_text("\n".join(self.groups))
            return place

        def write(self, folder, **files):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name.replace("__", ".")).write_text(f"{text}\n")

    return Machine()


def test_no_groups_limit_nothing(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert free_memory_bytes(tmp_path) is None


def test_version_2_counts_our_group_and_those_above_it(machine):
    root = machine.mount("cgroup2", "two", "rw")
    machine.write(root / "a/b", memory__max="max", memory__current=5, cpu__max="max 100000")
    machine.write(root / "a", memory__max=2 * GIB, memory__current=GIB, cpu__max="150000 100000")
    assert free_memory_bytes(machine.proc) == GIB
    assert cpu_quota(machine.proc) == 1.5


def test_version_1_says_no_limit_with_a_number(machine):
    memory = machine.mount("cgroup", "memory", "memory")
    cpu = machine.mount("cgroup", "cpu", "cpu,cpuacct")
    machine.write(memory / "a/b", memory__limit_in_bytes=450 << 20, memory__usage_in_bytes=0)
    machine.write(memory, memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=GIB)
    machine.write(cpu / "a/b", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    machine.write(cpu / "a", cpu__cfs_quota_us=50_000, cpu__cfs_period_us=100_000)
    assert free_memory_bytes(machine.proc) == 450 << 20
    assert cpu_quota(machine.proc) == 0.5


def test_on_a_hybrid_machine_the_tightest_limit_holds(machine):
    two = machine.mount("cgroup2", "unified", "rw")
    one = machine.mount("cgroup", "memory", "memory")
    machine.write(two / "a/b", memory__max=GIB, memory__current=0)
    machine.write(one / "a/b", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=0)
    assert free_memory_bytes(machine.proc) == GIB


def test_pages_of_files_that_were_read_once_are_free(machine):
    root = machine.mount("cgroup2", "two", "rw")
    machine.write(root / "a/b", memory__max=GIB, memory__current=GIB)
    machine.write(root / "a/b", memory__stat=f"anon 7\ninactive_file {GIB // 2}")
    assert free_memory_bytes(machine.proc) == GIB // 2


def test_a_mount_that_begins_at_our_group_is_read_from_there(machine):
    root = machine.mount("cgroup2", "two", "rw", root="/a/b")
    machine.write(root, memory__max=GIB, memory__current=0)
    assert free_memory_bytes(machine.proc) == GIB
