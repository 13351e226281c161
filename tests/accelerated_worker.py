"""A worker process on a GPU that is made up: the tests' accelerator in place of CUDA.

Its memory can be mapped by other processes, as with CUDA IPC. What it writes there goes over a link
that tests can break, by files in a folder that is named in the environment:

    hold     a number: so many blocks more are written, then `held` is there and nothing goes on
             until the file is gone
    broken   writing a block fails
    lossy    of each block that is written one value is wrong
"""

import contextlib
import mmap
import os
import sys
import time
from pathlib import Path

import msgspec
import torch

from engine.workers import __main__ as program
from engine.workers import copying, device
from tests.accelerator import DEVICE, Accelerator, FakeDevice

FAULTS = "ACCELERATED_FAULTS"
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
    """Exports by file descriptor, which lives as long as its process, or whoever has mapped it."""

    def __init__(self, uuid):
        super().__init__()
        self.uuid = uuid
        self.side = Link(Path(os.environ[FAULTS]))
        self.entered = contextlib.ExitStack()
        self.entered.enter_context(self.accelerator.on())  # for all of the process's life

    def export(self, memory):
        storage = memory.held.untyped_storage()
        fd, num_bytes = storage._share_fd_cpu_()
        return msgspec.msgpack.encode((os.getpid(), os.dup(fd), num_bytes))

    def map(self, exported):
        pid, number, num_bytes = msgspec.msgpack.decode(exported)
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        memory = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        os.close(fd)
        mapped = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        mapped.accelerator.finish()
        mapped.value = memory
        self.side.mapped.append((memory.data_ptr(), memory.data_ptr() + num_bytes))
        return mapped


def main():
    device.CudaDevice = SharedDevice
    copying.REPORTED_PAIRS = REPORTED_PAIRS
    code = program.main()
    sys.stderr.flush()
    os._exit(code)
