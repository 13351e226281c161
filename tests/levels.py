"""The levels of compiled kernels that tests run: what this processor runs and was built."""

from __future__ import annotations

import pytest

from engine.kernels.cpu import load_kernels

NOT_BUILT = "not built: install with PENSTOCK_BUILD_KERNELS=all"


def supported() -> tuple[str, ...]:
    """This processor's levels, best first; none where nothing is compiled."""
    try:
        return load_kernels("portable")[0].supported()
    except ImportError:
        return ()


def is_built(level: str) -> bool:
    try:
        load_kernels(level)
    except ImportError:
        return False
    return True


LEVELS = tuple(level for level in supported() if is_built(level))
PARAMS = [
    pytest.param(level, marks=[] if level in LEVELS else pytest.mark.skip(reason=NOT_BUILT))
    for level in supported()
]
each_level = pytest.mark.parametrize("level", PARAMS)
needs_kernels = pytest.mark.skipif(not LEVELS, reason="no compiled kernels")
