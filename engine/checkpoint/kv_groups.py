"""Divide the KV layers of a model with sliding windows into groups of equal bytes.

A block of the KV pool holds one group of layers. The first group keeps every block of a sequence;
it has the layers without a window. The blocks of the other groups are its *window blocks*: they
are given to others once they are behind the window. A model without windows has one group.

Invariant: every layer is in one group, and all groups have as many places; a place may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_GROUPS = 8
"""Maximum blocks for the same tokens: a step has a table for each."""
LEAST_SAVING = 1 / 6
"""Smallest share of the KV of the longest text for which layers are divided."""
_REFERENCE_WINDOWS = 8
"""Length of the text, in windows, for which the groups' size saves most."""


class KvGroups(NamedTuple):
    """The layers of the KV pool by group."""

    num_layers: int
    """Places in a group, and in a block."""
    num_groups: int
    window: int | None
    """The longest window of the groups after the first; None: there is one group."""
    places: tuple[tuple[int, int], ...]
    """Per layer of the pool: its group, and its place there."""


def one_group(num_layers: int) -> KvGroups:
    """Keep all layers in each block."""
    return KvGroups(num_layers, 1, None, tuple((0, layer) for layer in range(num_layers)))


def divide(windows: Sequence[int | None], longest: int) -> KvGroups:
    """Divide layers into groups, if that saves enough.

    Where every layer has a window, the first group has some of these layers.

    Args:
        windows: of each layer of the pool; None: it reads all tokens.
        longest: tokens of the longest text.
    """
    kept = [layer for layer, window in enumerate(windows) if window is None]
    passing = [layer for layer, window in enumerate(windows) if window is not None]
    window = max((each for each in windows if each is not None), default=0)
    saved = len(passing) / len(windows) * max(longest - window, 0) / longest
    if saved <= LEAST_SAVING:
        return one_group(len(windows))

    num_kept = len(kept)

    def num_groups(size: int) -> int:
        return 1 + -(-(len(windows) - (num_kept or size)) // size)

    def num_places(size: int) -> tuple[int, int]:
        return (_REFERENCE_WINDOWS + num_groups(size) - 1) * size, -size

    sizes = [s for s in range(max(num_kept, 1), len(windows)) if num_groups(s) <= MOST_GROUPS]
    if not sizes:
        return one_group(len(windows))
    size = min(sizes, key=num_places)
    order = kept + passing
    places = {layer: (0, place) for place, layer in enumerate(order[: num_kept or size])}
    for number, layer in enumerate(order[len(places) :]):
        places[layer] = (1 + number // size, number % size)
    ordered = tuple(places[layer] for layer in range(len(windows)))
    return KvGroups(size, num_groups(size), window, ordered)
