"""The C library's heap, told to keep large buffers out of it.

Python keeps objects of more than half a kilobyte there. The GNU C library first gives large ones
pages of their own, which go back when they are freed; but with every large one that is freed it
raises the size from which it does so. Bodies and replies then lie among small things that stay, and
leave holes: of 100,000 hostile requests 26 MiB, where 18 MiB were in use from first to last.
Owns: that size.
Never: raises; another C library is left as it is.
"""

from __future__ import annotations

import ctypes

OWN_PAGES_BYTES = 64 << 10
"""From here on a buffer has pages of its own, whatever was freed before."""
KEPT_BYTES = 128 << 10
"""Free at the heap's end; what is more goes back."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def keep_small() -> bool:
    """Set the sizes for this process; False if the C library does not know them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    sizes = ((_MMAP_THRESHOLD, OWN_PAGES_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(name, size) == 1 for name, size in sizes)
