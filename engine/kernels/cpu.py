"""The compiled CPU kernels: which were built, which this machine can run, what they are called with.

setup.py compiles the same C files once per instruction set, each into a module of its own. The
functions take addresses, sizes and strides, and trust them: a wrong one is memory overwritten.
Owns: the choice of the level. Called by: engine.model.
Invariant: one level is chosen once, at start. Never: compiles, imports torch.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""The types of elements, as the kernels number them."""


class Kernels(Protocol):
    """The functions of one level; the C files say what each argument is."""

    def supported(self) -> tuple[str, ...]:
        """Levels that this processor can run, best first."""

    def rms_norm(self, *arguments: float) -> None:
        """Norm rows, each by its own root mean square."""


def load_kernels(level: str | None = None) -> tuple[Kernels, str]:
    """The kernels of a level, or of the best there is, and the level's name.

    Raises:
        ImportError: nothing was built, or not this level; the text says what to do.
    """
    try:
        portable = _module("portable")
    except ImportError:
        raise ImportError("not built: install again with a C compiler") from None
    for supported in portable.supported():
        if level in {None, supported}:
            try:
                return _module(supported), supported
            except ImportError:
                continue  # the compiler did not know this level
    raise ImportError(f"no {level} kernels here")


def _module(level: str) -> Kernels:
    return cast("Kernels", importlib.import_module(f"engine.kernels._{level}"))
