"""A hundred killed processes leave a GPU's memory as it was."""

import os
import signal
import subprocess
import sys
import time

NUM_DEATHS, AT_ONCE = 100, 4
HELD_BYTES = 256 << 20
MOST_LOST_BYTES = 64 << 20
SETTLED_S = 20.0


def hold_memory(uuid, ready_fd):
    """Compute without end in a GPU's memory, in a process of its own; say when it has begun."""
    import torch

    from engine.worker.device import CudaDevice

    device = CudaDevice(uuid)
    memory = torch.zeros(HELD_BYTES // 4, device=device.torch_device)
    replay = device.capture(lambda: memory.add_(1.0))
    device.export(memory)
    replay()
    device.finish()
    os.write(ready_fd, b"1")
    while True:
        replay()


def forked(work, *args):
    """Start work in a child that shares what is imported; no CUDA context may exist here."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work(*args, theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    return pid, ours


def free_bytes(ready_fd):
    import torch

    os.write(ready_fd, str(torch.cuda.mem_get_info()[0]).encode())


def free_now():
    pid, fd = forked(free_bytes)
    with os.fdopen(fd, "rb") as said:
        number = int(said.read())
    os.waitpid(pid, 0)
    return number


def die_often(work, num_deaths):
    """Kill processes as soon as each has begun, some at a time."""
    for first in range(0, num_deaths, AT_ONCE):
        count = min(AT_ONCE, num_deaths - first)
        children = [forked(*work) for _ in range(count)]
        for _, fd in children:
            with os.fdopen(fd, "rb") as said:
                assert said.read(1) == b"1", "a process ended before it was killed"
        for pid, _ in children:
            os.kill(pid, signal.SIGKILL)
        for pid, _ in children:
            os.waitpid(pid, 0)


def settled(read, at_least):
    """What is read once it has reached a value, or after a while."""
    patient_until_s = time.monotonic() + SETTLED_S
    while (found := read()) < at_least and time.monotonic() < patient_until_s:
        time.sleep(0.5)
    return found


def main(uuid):
    """In a process without a CUDA context: print the bytes that a hundred deaths have taken."""
    import torch  # noqa: F401  # once, for all children

    work = hold_memory, uuid
    die_often(work, AT_ONCE)  # what the driver keeps after its first clients
    before = free_now()
    die_often(work, NUM_DEATHS)
    print(before - settled(free_now, before - MOST_LOST_BYTES))


def test_a_hundred_deaths_leave_no_memory_taken(uuid):
    command = [sys.executable, "-m", "tests.gpu.test_deaths", uuid]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert ran.returncode == 0, ran.stderr
    print(f"{NUM_DEATHS} deaths took {int(ran.stdout) / 2**20:.1f} MiB")
    assert int(ran.stdout) <= MOST_LOST_BYTES


if __name__ == "__main__":
    main(sys.argv[1])
