"""A worker process on a GPU that is made up: the tests' accelerator in place of CUDA.

Its memory can be mapped by other processes, as with CUDA IPC, and is free again when the last
process that has it mapped lets go; it holds one pool and a half, whose size is in the environment.
What is written into another's memory goes over a link that tests can break, by files in a folder
that is named in the environment:

    hold     a number: so many blocks more are written, then `held` is there and nothing goes on
             until the file is gone
    broken   writing a block fails
    lossy    of each block that is written one value is wrong
"""

import contextlib
import fcntl
import mmap
import os
import sys
import time
import weakref
from pathlib import Path

import msgspec
import torch

from engine.worker import __main__ as program
from engine.worker import copying, device, gpu_sizes
from tests.worlds.accelerator import DEVICE, Accelerator, FakeDevice

FAULTS, POOL_BYTES = "ACCELERATED_FAULTS", "ACCELERATED_POOL_BYTES"
REPORTED_PAIRS = 2
"""Blocks in a report of copies: the tests' prompts have few, and some of a chunk's are to be there
before others."""


class Link(Accelerator):
    """The stream of copies, some of which go into other processes' memory."""

    def __init__(self, faults):
        super().__init__()
        self.faults = faults
        self.mapped = []
        """Begin and end of each memory that is another process's."""
        self.num_pushed = 0
        """Blocks since it is to be held up."""

    def _launch(self, func, args, kwargs, ours):
        is_push = func is torch.ops.aten.copy_.default and self._is_far(args[0])
        if is_push:
            self._pushing()
        made = super()._launch(func, args, kwargs, ours)
        if is_push and (self.faults / "lossy").exists():
            self._queue.append(lambda: args[0].value.view(-1)[:1].add_(1))
            self.num_launched += 1
        return made

    def _is_far(self, target):
        address = target.data_ptr()
        return any(begin <= address < end for begin, end in self.mapped)

    def _pushing(self):
        if (self.faults / "broken").exists():
            raise RuntimeError("the link is broken")
        hold = self.faults / "hold"
        if not hold.exists():
            self.num_pushed = 0
            return
        if self.num_pushed == int(hold.read_text()):
            (self.faults / "held").touch()
            while hold.exists():
                time.sleep(0.01)
        self.num_pushed += 1


class SharedDevice(FakeDevice):
    """Exports by file descriptor, which lives as long as its process, or whoever has mapped it.

    Each exported memory has a file beside the folder of faults that names its GPU and its size. The
    exporter and whoever maps it hold a lock on that file, which the kernel drops when they die.
    """

    def __init__(self, uuid):
        super().__init__()
        self.uuid = uuid
        faults = Path(os.environ[FAULTS])
        self.exports = faults.with_name("exports")
        self.exports.mkdir(exist_ok=True)
        self.side = Link(faults)
        self.entered = contextlib.ExitStack()
        self.entered.enter_context(self.accelerator.on())  # for all of the process's life

    def memory(self):
        """Free: one pool and a half, less what is exported of this GPU and still held."""
        held = [path for path in self.exports.glob(f"{self.uuid}.*") if is_locked(path)]
        taken = sum(int(path.suffix[1:]) for path in held)
        made = super().memory()
        step_bytes = made.peak_bytes - made.allocated_bytes
        room_bytes = 3 * int(os.environ[POOL_BYTES]) // 2 - taken
        return made._replace(free_bytes=gpu_sizes.MARGIN_BYTES + step_bytes + room_bytes)

    def export(self, memory):
        storage = memory.held.untyped_storage()
        fd, num_bytes = storage._share_fd_cpu_()
        path = self.exports / f"{self.uuid}.{os.getpid()}.{num_bytes}"
        path.touch()
        locked(path)
        return msgspec.msgpack.encode((os.getpid(), os.dup(fd), num_bytes, str(path)))

    def map(self, exported):
        pid, number, num_bytes, path = msgspec.msgpack.decode(exported)
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        mapping = mmap.mmap(fd, num_bytes)
        os.close(fd)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        mapped = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        mapped.accelerator.finish()
        mapped.value = memory
        where = memory.data_ptr(), memory.data_ptr() + num_bytes
        self.side.mapped.append(where)
        weakref.finalize(mapping, self._unmap, where, locked(Path(path)))
        return mapped

    def _unmap(self, where, lock):
        self.side.mapped.remove(where)
        os.close(lock)


def locked(path):
    """A descriptor by which this process holds a file, beside others that do."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_locked(path):
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def main():
    device.CudaDevice = SharedDevice
    copying.REPORTED_PAIRS = REPORTED_PAIRS
    gpu_sizes.LEAST_MARGIN_BYTES = (
        gpu_sizes.MARGIN_BYTES
    )  # beside which the tests' pools are nothing
    code = program.main()
    sys.stderr.flush()
    os._exit(code)
