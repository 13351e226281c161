"""Limit the memory of a process that reads a model, by how much it has read.

Invariant: the limit is what the process had before, `SPARE_BYTES`, and a number of bytes for each
byte of the model's files that it has read.
"""

from __future__ import annotations

import resource

from engine.checkpoint.model_file import tell_of_reads

SPARE_BYTES = 64 << 20
BYTES_PER_BYTE = 4
"""Memory of a header or a configuration as Python's objects, by its length."""
BYTES_PER_TOKENIZER_BYTE = 16
"""Memory of a vocabulary, which is there as text, values and tables at once."""
BYTES_PER_TEXT_BYTE = 1024
"""Memory of a text that is tokenized: a few places, names and spans of each token."""


def limit_memory(bytes_per_byte: int) -> None:
    """Limit this process from here on."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed_bytes = address_bytes() + SPARE_BYTES

    def allow(num_bytes: int) -> None:
        nonlocal allowed_bytes
        allowed_bytes += bytes_per_byte * num_bytes
        limit = allowed_bytes if hard == resource.RLIM_INFINITY else min(allowed_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    allow(0)
    tell_of_reads(allow)


def limit_memory_of_text(num_bytes: int) -> None:
    """Limit this process until the next text, by this one's length."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = address_bytes() + SPARE_BYTES + BYTES_PER_TEXT_BYTE * num_bytes
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def address_bytes() -> int:
    """Return the bytes of addresses that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
