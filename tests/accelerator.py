"""An accelerator on a CPU: tensors that compute, and that no host tensor may be mixed with.

Torch takes `meta` for their device, whose guards do nothing. An operation on them runs on the
host tensors that they hold. One that also has a host tensor fails, as it would beside a GPU, and
one that brings a value to the host is counted, and fails while a graph is captured.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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

    @contextlib.contextmanager
    def on(self):
        # wrappers of both modes do not mix, so all are made in the workers'
        with torch.inference_mode(), _Literals(), self:
            yield self

    @contextlib.contextmanager
    def capturing(self):
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # what is made of other operations comes back as those
        with torch._C.DisableTorchFunction(), self:
            made = func.decompose(*args, **kwargs)
        return self._compute(func, args, kwargs) if made is NotImplemented else made

    def _compute(self, func, args, kwargs):
        flat, spec = pytree.tree_flatten((args, kwargs))
        ours = [x for x in flat if isinstance(x, OnDevice)]
        theirs = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice)]
        named = kwargs.get("device")
        is_ours = bool(ours) if named is None else torch.device(named) == DEVICE
        self._check(func, ours, theirs, is_ours, flat[0] if flat else None)
        args, kwargs = pytree.tree_unflatten([_held(x) for x in flat], spec)
        made = func(*args, **kwargs)
        if not is_ours:
            return made
        known = {id(x.held): x for x in ours}

        def wrapped(x):
            if not isinstance(x, torch.Tensor):
                return x
            return known[id(x)] if id(x) in known else OnDevice(x)

        return pytree.tree_map(wrapped, made)

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


def _held(x):
    if isinstance(x, OnDevice):
        return x.held
    if isinstance(x, torch.device) and x == DEVICE:
        return torch.device("cpu")
    return x


class FakeDevice:
    """A Device whose graphs run what was captured again, on the buffers that it saw.

    Whoever captures or replays is within device.accelerator.on().
    """

    torch_device = DEVICE

    def __init__(self):
        self.accelerator = Accelerator()
        self.num_captures = 0
        self.replayed = []
        """Which capture each replay was of."""

    def pinned(self, values, dtype):
        return torch.tensor(values, dtype=dtype)

    def fetch(self, tensor):
        copied = tensor.clone()  # as the device's copy: of the values that are there now
        return lambda: copied.tolist()

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
