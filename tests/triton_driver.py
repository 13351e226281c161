"""A driver for Triton without a device: kernels are compiled for it, or noted, and never run.

For processes in which kernels are not interpreted.
"""

from types import SimpleNamespace

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

SHARED_BYTES = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""That one program may have, by compute capability."""
NUM_PROCESSORS = 132


class FakeDriver:
    """Device n is one of compute capability n."""

    def __init__(self, capability):
        self.capability = capability
        self.grids = []
        """Of each launch, (x, y, z)."""
        self.launcher_cls = lambda source, metadata: lambda *args: self.grids.append(args[:3])
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": SHARED_BYTES[device],
                "multiprocessor_count": NUM_PROCESSORS,
            },
            load_binary=lambda *args: (object(), 0, 0, 0, 1024),
            unload_module=lambda module: None,
        )
        self.asked_for = []
        """Kernels that were launched, by name and by what they would be compiled for."""

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def activate(self):
        triton.runtime.driver.set_active(self)
        return self

    def only_note(self):
        """Compile nothing from now on, and note every launch."""

        def note(*, key, fn, **rest):
            self.asked_for.append((fn.name.rsplit(".", 1)[-1], str(key)))
            return True

        knobs.runtime.jit_cache_hook = note
