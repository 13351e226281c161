"""How much memory torch's operations hold at once, of what they have made themselves."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; what was there before is not counted."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._tensors = {}
        """By storage: how many tensors over it live."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {_storage(x)._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        for tensor in filter(_is_tensor, tree_leaves(made)):
            storage = _storage(tensor)
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self._tensors:
                if key in given:
                    continue  # a view of what was there before
                self._tensors[key] = 0
                self.now += num_bytes
                self.peak = max(self.peak, self.now)
            self._tensors[key] += 1
            weakref.finalize(tensor, self._gone, key, num_bytes)
        return made

    def _gone(self, key, num_bytes):
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]
            self.now -= num_bytes

    def forget_peak(self):
        self.peak = self.now


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def _storage(tensor):
    return tensor.untyped_storage()
