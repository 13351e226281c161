"""A worker process on a GPU that is made up: the tests' accelerator in place of CUDA.

Its memory can be mapped by other processes, as with CUDA IPC.
"""

import contextlib
import mmap
import os
import sys

import msgspec
import torch

from engine.workers import __main__ as program
from engine.workers import device
from tests.accelerator import DEVICE, FakeDevice


class SharedDevice(FakeDevice):
    """Exports by file descriptor, which lives as long as its process, or whoever has mapped it."""

    def __init__(self, uuid):
        super().__init__()
        self.uuid = uuid
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
        return mapped


if __name__ == "__main__":
    device.CudaDevice = SharedDevice
    code = program.main()
    sys.stderr.flush()
    os._exit(code)
