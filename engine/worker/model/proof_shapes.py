"""Derive the steps that attention is proved on: one on each side of each branch that it may take.

Branches of our adapters, of our kernels and of libraries' own heuristics count, for a model's heads
and a card's processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

Sequences = tuple[tuple[int, int], ...]
"""A step's sequences: tokens before, and new ones."""

SHORT_WINDOW = 300
"""Stands for longer windows, which take the same branches over more keys."""
_QUERY_TILE = 64
"""Queries of one program in FlashAttention 2."""
_DECODE_ROWS = (1, 2, 4)
_CHUNKS = (31, 32, 33, 64, 65, 97)
"""On both sides of a lone query behind blocks of 32 and of 64."""
_MANY = 512
"""Most sequences of a step that is looked for."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer, by which the work of its attention is cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


def library_parts(num_programs: int, num_keys: int, head_dim: int, num_processors: int) -> int:
    """Count the parts that FlashAttention 2 cuts keys into by itself.

    It takes the fewest whose last wave of programs is nearly as full as with the best number.
    """
    slots = 2 * num_processors
    if num_programs >= 0.8 * slots:
        return 1
    blocks = -(-num_keys // key_block(head_dim))
    fullness = {}
    for parts in range(1, min(128, slots, blocks) + 1):
        if parts == 1 or -(-blocks // parts) < -(-blocks // (parts - 1)):
            programs = num_programs * parts
            fullness[parts] = programs / (-(-programs // slots) * slots)
    wanted = 0.85 * max(fullness.values())
    return next(parts for parts, full in fullness.items() if full >= wanted)


def key_block(head_dim: int) -> int:
    """Return how many keys FlashAttention 2 reads at once where it cuts keys into parts."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


def attention_steps(
    heads: Heads, num_processors: int, own_parts: Callable[[int, int], int]
) -> list[Sequences]:
    """List the steps, each branch's two sides among them where both can be reached.

    Args:
        num_processors: of the card.
        own_parts: our kernel's parts, by the number of sequences and of keys that each sees.
    """
    found = [*_plain_steps(heads)]

    def chunks(count: int, new: int, keys: int) -> int:
        programs = count * heads.num_heads * -(-new // _QUERY_TILE)
        return library_parts(programs, keys, heads.head_dim, num_processors)

    def packed(count: int, _new: int, keys: int) -> int:
        programs = count * heads.num_kv_heads * -(-heads.group_size // _QUERY_TILE)
        return library_parts(programs, keys, heads.head_dim, num_processors)

    def own(count: int, _new: int, keys: int) -> int:
        return own_parts(count, keys if heads.window is None else min(keys, heads.window))

    is_packed = heads.group_size > 1 and heads.window is None
    steps = ((3, chunks), (1, packed if is_packed else chunks), (3, own), (1, own))
    for new, parts in steps:
        for is_cut in (True, False):
            found += _first_step(heads, new, parts, is_cut=is_cut)
    return list(dict.fromkeys(found))


def brief_steps(heads: Heads) -> list[Sequences]:
    """List a few steps of all kinds: a new prompt, a continued one, rows that decode."""
    before = 290 if heads.window is None else heads.window + 40
    return [((0, 97),), ((45, 33),), ((before, 1), (37, 1), (0, 19), (3, 6))]


def recurrent_steps(conv_size: int, num_kept: int, chunk: int) -> list[Sequences]:
    """List the steps that recurrent heads are proved on.

    Args:
        conv_size: tokens that the convolution sees.
        num_kept: tokens of a step whose inputs our kernels keep.
        chunk: tokens that torch computes at once.
    """
    tail = max(conv_size - 1, 1)
    return [
        # records that are read or not, tails that are moved or new, runs within a tile and beyond
        ((0, 1), (40, 1), (0, tail), (7, conv_size), (3, conv_size + 1), (0, 9)),
        ((0, num_kept),),
        ((9, num_kept + 1), (2, 1)),
        ((0, chunk),),
        ((chunk - 3, 7), (0, chunk + 1)),
    ]


def product_rows(tile: int) -> tuple[int, ...]:
    """List how many tokens products are proved with: on both sides of tiles of 16 and of `tile`."""
    return 1, 16, 17, tile, tile + 1


def _plain_steps(heads: Heads) -> Iterator[Sequences]:
    """Yield the steps that every card takes: lone chunks, few rows, ragged ones, windows' edges."""
    for new in _CHUNKS:
        yield ((0, new),)
        yield ((45, new),)
    for count in _DECODE_ROWS:
        yield tuple((290 - 61 * place, 1) for place in range(count))
    yield ((0, 1), (37, 1), (0, 19), (300, 6), (3, 70))
    if heads.window is not None:
        for edge in (-1, 0, 1):
            before = heads.window - 1 + edge
            yield ((before, 1),)
            yield ((before, 1), (before + 40, 1))
        for new in (heads.window, heads.window + 1):
            yield ((0, new),)


def _first_step(
    heads: Heads, new: int, parts: Callable[[int, int, int], int], *, is_cut: bool
) -> Iterator[Sequences]:
    """Yield the smallest step of several sequences whose keys are cut into parts, or are not."""
    counts = [2, 3, 4, *(1 << power for power in range(3, _MANY.bit_length()))]
    block = key_block(heads.head_dim)
    for count, blocks in product(counts, (2, 4, 8)):
        keys = blocks * block
        if (parts(count, new, keys) > 1) == is_cut and count * keys <= _MANY * block:
            # the longest first, and none as long as another
            yield tuple((keys - new - place % (block - new), new) for place in range(count))
            return
