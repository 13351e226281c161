"""An accelerator on a CPU: tensors that compute late, and that no host tensor may be mixed with.

Torch takes `meta` for their device, whose guards do nothing. An operation on them is put in a
queue, and runs on the host tensors that they will hold when somebody waits for it, never before:
by a mark, a value that is read, a copy that blocks. One that also has a host tensor fails, as
it would beside a GPU; one that brings a value to the host is counted, and fails while a graph is
captured.
"""

import contextlib
import threading
import time
from collections import deque
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.worker.device import DeviceTime, Memory

DEVICE = torch.device("meta")
_aten = torch.ops.aten
_TO_HOST = (_aten._local_scalar_dense.default, _aten.equal.default)
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_CHOOSE_SIZES = (
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.bincount.default,
)
"""By values that the host has to see."""


class _Layout(NamedTuple):
    shape: tuple
    strides: tuple
    offset: int
    dtype: torch.dtype


_LAYOUTS = {}
"""Of what operations make, by what they are given; they cost more to find than the operations."""


class OnDevice(torch.Tensor):
    """A tensor on the accelerator, by its layout: shape, strides, place in a storage, dtype."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, layout, accelerator):
        shape, strides, offset, dtype = layout
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=DEVICE
        )

    def __init__(self, layout, accelerator):
        self.own_layout, self.accelerator = layout, accelerator
        self.value = None
        """On the host, once it is computed."""

    @property
    def held(self):
        """The value, when all before it is done."""
        if self.value is None:
            self.accelerator.finish()
        return self.value

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

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
        self.num_launched = 0
        """Operations put in the queue."""
        self._queue = deque()
        self.lock = threading.RLock()
        """Of the queue, which copies use beside the steps."""
        self._is_capturing = False
        self._is_composite = {}

    @property
    def num_done(self):
        return self.num_launched - len(self._queue)

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

    def finish(self, num_launched=None):
        """Run what is in the queue, as far as it had come then; all of it."""
        last = self.num_launched if num_launched is None else num_launched
        with self.lock, _disable_current_modes(), torch.inference_mode():
            while self.num_done < last:
                self._queue.popleft()()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.lock:
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func, args, kwargs):
        if func not in self._is_composite:
            self._is_composite[func] = func._can_decompose()
        if self._is_composite[func]:  # the operations that it is made of come back here
            with torch._C.DisableTorchFunction(), self:
                return func.decompose(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func, args, kwargs):
        ours, theirs = [], []
        _sort((*args, *kwargs.values()), ours, theirs)
        named = kwargs.get("device")
        is_ours = bool(ours) if named is None else torch.device(named) == DEVICE
        if not ours and not is_ours:
            return func(*args, **kwargs)
        if func is _aten.copy_.default:
            is_ours = isinstance(args[0], OnDevice)
        is_ours = is_ours and func not in _TO_HOST
        is_late = func in _COPIES and bool(kwargs.get("non_blocking") or args[2:] == (True,))
        self._check(func, ours, theirs, is_ours)
        if not is_ours and not (is_late and func is _aten.copy_.default):
            self.finish()
            return func(*_held(args), **_held(kwargs))
        made = self._launch(func, args, kwargs, ours) if is_ours else self._copy_out(args)
        if is_ours and theirs and func in _COPIES and not is_late:
            self.finish()  # a copy from the host that blocks waits for all that is before it
        return made

    def _launch(self, func, args, kwargs, ours):
        """Put an operation in the queue; what it will have made."""
        if func in _CHOOSE_SIZES:
            self.finish()
        on_host = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") else kwargs
        wrapped = _mapped(
            self._layouts(func, args, kwargs),
            lambda x: ours[x] if isinstance(x, int) else OnDevice(x, self),
            (int, _Layout),
        )

        def run():
            _bind(wrapped, func(*_held(args), **_held(on_host)))

        self._queue.append(run)
        self.num_launched += 1
        return wrapped

    def _layouts(self, func, args, kwargs):
        """Of what an operation makes; a number for the one among its tensors that it returns."""
        if func in _CHOOSE_SIZES:
            with _disable_current_modes():
                made = func(*_held(args), **_held(kwargs))
            return _mapped(made, _layout_of, torch.Tensor)
        key = (func, _signature(args), _signature(kwargs))
        if key not in _LAYOUTS:
            places = {}

            def shaped(x):
                shape, strides, offset, dtype = x.own_layout
                size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
                empty = torch.empty(max(size, 0), dtype=dtype, device="meta")
                empty = empty.as_strided(shape, strides, offset)
                places[id(empty)] = len(places), empty
                return empty

            with _disable_current_modes():
                made = func(*_mapped(args, shaped), **_mapped(kwargs, shaped))
            _LAYOUTS[key] = _mapped(
                made,
                lambda x: places[id(x)][0] if id(x) in places else _layout_of(x),
                torch.Tensor,
            )
        return _LAYOUTS[key]

    def _copy_out(self, args):
        """Copy to the host when the queue has come so far."""
        target, source = args[:2]
        self._queue.append(lambda: target.copy_(source.value))
        self.num_launched += 1
        return target

    def _check(self, func, ours, theirs, is_ours):
        is_copy = func in _COPIES
        if ours and not is_copy and any(x.dim() for x in theirs):
            raise RuntimeError(f"{func} mixes host and device tensors")
        is_read = bool(ours) and (func in _CHOOSE_SIZES or not is_ours)
        is_write = is_copy and is_ours and bool(theirs)
        self.num_reads += is_read
        self.num_writes += is_write
        if self._is_capturing and (is_read or is_write):
            raise RuntimeError(f"{func} crosses between host and device in a captured step")


def _sort(x, ours, theirs):
    """Tensors among arguments, by where they are; no closure, whose cycle would keep them alive."""
    if isinstance(x, OnDevice):
        ours.append(x)
    elif isinstance(x, torch.Tensor):
        theirs.append(x)
    elif isinstance(x, list | tuple):
        for each in x:
            _sort(each, ours, theirs)


def _mapped(x, change, kind=OnDevice):
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, list | tuple):  # not a layout, which would have been of the kind
        return type(x)(_mapped(each, change, kind) for each in x)
    if isinstance(x, dict):
        return {name: _mapped(each, change, kind) for name, each in x.items()}
    return x


def _layout_of(x):
    return _Layout(x.shape, x.stride(), x.storage_offset(), x.dtype)


def _signature(x):
    """What the layouts of an operation's results depend on."""
    if isinstance(x, OnDevice):
        return x.own_layout
    if isinstance(x, torch.Tensor):
        return "host", x.shape, x.dtype
    if isinstance(x, list | tuple):
        return tuple(_signature(each) for each in x)
    if isinstance(x, dict):
        return tuple((name, _signature(each)) for name, each in x.items())
    return type(x), x


def _held(x):
    def value(x):
        assert x.value is not None, "another process's memory, and nothing is there yet"
        return x.value

    return _mapped(x, value)


def _bind(wrapped, made):
    """What was made, to those that stand for it."""
    if isinstance(wrapped, OnDevice):
        wrapped.value = made if wrapped.value is None else wrapped.value
    elif isinstance(wrapped, list | tuple):
        for one, value in zip(wrapped, made, strict=True):
            _bind(one, value)


class FakeDevice:
    """A Device whose graphs run what was captured again, on the buffers that it saw.

    Whoever captures or replays is within device.accelerator.on().
    """

    torch_device = DEVICE
    is_served_by_mps = False
    card = None

    def __init__(self, exported=None):
        self.accelerator = Accelerator()
        self.side = Accelerator()
        """Its stream beside the steps, which waits for none of them."""
        self.num_captures = 0
        self.memory_now = Memory(8 << 30, 8 << 30, 1 << 20, 2 << 20)
        self.exported = [] if exported is None else exported
        """Memory that another process can map: the one list of two workers' devices."""
        self.pinned_memory = []
        """Host memory that it was told of."""
        self.replayed = []
        """Which capture each replay was of."""

    def pinned(self, values, dtype):
        return torch.tensor(values, dtype=dtype)

    def fetch(self, tensor):
        copied = tensor.clone()  # in order with the steps
        wait = self.mark()

        def values():
            wait()
            return copied.value.tolist()

        return values

    def buffer(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def beside(self):
        with self.side.on():
            taken, started_ns = DeviceTime(), time.monotonic_ns()
            yield taken
            self.side.finish()
            taken.elapsed_ns = time.monotonic_ns() - started_ns

    def mark(self):
        accelerator = self.accelerator
        num_launched = accelerator.num_launched
        return lambda: accelerator.finish(num_launched)

    def finish(self):
        self.accelerator.finish()
        self.side.finish()

    def memory(self):
        self.finish()
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
