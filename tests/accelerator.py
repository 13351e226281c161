"""An accelerator on a CPU: tensors that compute, and that no host tensor may be mixed with.

Torch takes `meta` for their device, whose guards do nothing. An operation on them runs on the
host tensors that they hold. One that also has a host tensor fails, as it would beside a GPU, and
one that brings a value to the host is counted, and fails while a graph is captured.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.workers.device import Memory

DEVICE = torch.device("meta")
_aten = torch.ops.aten


class OnDevice(torch.Tensor):
    """A tensor on the accelerator."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held):
        self.held = held

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of Accelerator.on()")


class _Literals(TorchFunctionMode):
    """Keeps the values of torch.tensor(..., device=DEVICE), of which `meta` makes none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return torch.tensor(*args, **kwargs | {"device": None}).to(DEVICE)
        return func(*args, **kwargs)


class Accelerator(TorchDispatchMode):
    """While on(), tensors made on DEVICE are OnDevice."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0
        """Times that the host has waited for a value."""
        self.num_writes = 0
        """Copies of host tensors."""
        self._is_capturing = False
        self._is_composite = {}

    @contextlib.contextmanager
    def on(self):
        # wrappers of both modes do not mix, so all are made in the workers'; and threads, which
        # operations as small as the tests' only wait for, have to be few
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode(), _Literals(), self:
                yield self
        finally:
            torch.set_num_threads(num_threads)

    @contextlib.contextmanager
    def capturing(self):
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self._is_composite:
            self._is_composite[func] = func._can_decompose()
        if self._is_composite[func]:  # the operations that it is made of come back here
            with torch._C.DisableTorchFunction(), self:
                return func.decompose(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func, args, kwargs):
        ours, theirs = {}, []
        named = kwargs.get("device")

        def held(x):
            if isinstance(x, OnDevice):
                ours[id(x.held)] = x
                return x.held
            if isinstance(x, torch.Tensor):
                theirs.append(x)
            elif isinstance(x, list | tuple):
                return [held(each) for each in x]
            return x

        def wrapped(x):
            if isinstance(x, list | tuple):
                return type(x)(wrapped(each) for each in x)
            if not isinstance(x, torch.Tensor):
                return x
            return ours[id(x)] if id(x) in ours else OnDevice(x)

        host_args = [held(x) for x in args]
        host_kwargs = {name: held(x) for name, x in kwargs.items()}
        is_ours = bool(ours) if named is None else torch.device(named) == DEVICE
        if named is not None and is_ours:
            host_kwargs["device"] = torch.device("cpu")
        self._check(func, ours, theirs, is_ours, args[0] if args else None)
        made = func(*host_args, **host_kwargs)
        return wrapped(made) if is_ours else made

    def _check(self, func, ours, theirs, is_ours, first):
        is_copy = func in (_aten._to_copy.default, _aten.copy_.default)
        if ours and not is_copy and any(x.dim() for x in theirs):
            raise RuntimeError(f"{func} mixes host and device tensors")
        if func is _aten.copy_.default:
            is_ours = isinstance(first, OnDevice)
        is_read = bool(ours) and (func is _aten._local_scalar_dense.default or not is_ours)
        is_write = is_copy and is_ours and bool(theirs)
        self.num_reads += is_read
        self.num_writes += is_write
        if self._is_capturing and (is_read or is_write):
            raise RuntimeError(f"{func} crosses between host and device in a captured step")


class FakeDevice:
    """A Device whose graphs run what was captured again, on the buffers that it saw.

    Whoever captures or replays is within device.accelerator.on().
    """

    torch_device = DEVICE
    is_served_by_mps = False

    def __init__(self, exported=None, order=None):
        self.accelerator = Accelerator()
        self.num_captures = 0
        self.memory_now = Memory(8 << 30, 8 << 30, 1 << 20, 2 << 20)
        self.exported = [] if exported is None else exported
        """Memory that another process can map: the one list of two workers' devices."""
        self.order = order
        self.pinned_memory = []
        """Host memory that it was told of."""
        self.replayed = []
        """Which capture each replay was of."""

    def pinned(self, values, dtype):
        return torch.tensor(values, dtype=dtype)

    def fetch(self, tensor):
        copied = tensor.clone()  # as the device's copy: of the values that are there now
        return lambda: copied.tolist()

    def buffer(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self):
        return lambda: None

    def memory(self):
        return self.memory_now

    def forget_peak(self):
        pass

    def export(self, memory):
        self.exported.append(memory)
        return str(len(self.exported) - 1).encode()

    def map(self, exported):
        return self.exported[int(exported)].view(-1).view(torch.uint8)

    def pin(self, memory):
        self.pinned_memory.append(memory)

    def new_event(self):
        return self.order.event()

    def open_event(self, handle):
        return self.order.opened(handle)

    def capture(self, step):
        number = self.num_captures
        self.num_captures += 1
        with self.accelerator.capturing():
            step()

        def replay():
            self.replayed.append(number)
            with self.accelerator.capturing():
                step()

        return replay
