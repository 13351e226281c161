"""Draw the KV page: pools, a block map where blocks are scarce, holders, caches.

Invariant: cells of a map add up to its pool; an owner has the same line in every pool.
"""

from __future__ import annotations

from functools import partial

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame, PoolFrame
from tui.lines import (
    STATE_CELLS,
    Line,
    Run,
    Tone,
    beside,
    beside_chart,
    facts,
    gauge,
    nonzero,
    pad,
    rule,
    state_bar,
)
from tui.panels.gauges import kv, used_spans
from tui.panels.kv_tiers import lines
from tui.view import View, pool_counts

_WIDE = 110
"""Minimum width for two columns."""
_NARROW = 76
"""Minimum width for the pools' table."""
_NAME_WIDTH = 10
_NUMBER_WIDTH = 8
_MAP_ROWS = 2
_MAX_ROWS = 8
"""Maximum rows of a map or a graph."""
_MAX_OWNERS = 8
_MAX_HOLDERS = 8
_MAP_FROM = 0.2
"""Minimum occupancy of a pool whose blocks are drawn as a map: an emptier one tells nothing."""


def page(view: View, width: int, height: int) -> list[Line]:
    """Draw pools and their maps; owners, the largest requests and the history beside or below."""
    frame = view.frame
    if frame is None:
        return []
    if not frame.pools:
        return [rule("POOLS", width), [Run("no pool yet", Tone.MUTED)]]
    if width < _WIDE:
        return [
            *_pools(view, frame, width),
            *_maps(frame, width, _MAP_ROWS),
            *_history(view, width, 1),
            *_owners(frame, width),
            *_holders(frame, width),
            *_prefix_cache(frame, width),
            *lines(frame, width),
        ]
    pools, tiers = _pools(view, frame, width), lines(frame, width)
    # a map and a graph of each pool share what is left below the rules and the legend
    num_maps = len(_mapped(frame))
    room = height - len(pools) - len(tiers) - num_maps - 2
    rows = max(1, min(_MAX_ROWS, room // (len(frame.pools) + num_maps)))
    left = (width - 2) * 3 // 5
    right = width - 2 - left
    return [
        *pools,
        *beside(
            [*_maps(frame, left, max(rows, _MAP_ROWS)), *_history(view, left, rows)],
            [*_owners(frame, right), *_holders(frame, right), *_prefix_cache(frame, right)],
            left,
        ),
        *tiers,
    ]


def _prefix_cache(frame: Frame, width: int) -> list[Line]:
    """Draw the hit rate of all prompts, and the users with cached blocks."""
    totals = frame.totals
    found, asked = totals.prefix_cache_hits, totals.prefix_cache_queries
    rate = fig.ratio(found / asked if asked else None)
    note = f"hit rate {rate} of {fig.short_count(asked)} tokens"
    lines: list[Line] = [rule("PREFIX CACHE", width, note)]
    if not totals.has_prefix_cache:
        return [*lines, [Run("off, or loading", Tone.MUTED)]]
    evicted = sum(pool.evicted for pool in frame.pools)
    fetched = totals.prefix_cache_fetches
    lines += facts(
        width,
        [
            ("hashing took", fig.duration(1000 * totals.prefix_cache_s)),
            *nonzero(("blocks evicted", evicted), ("tokens fetched", fetched)),
        ],
    )
    for pool in frame.pools:
        lines += _records(pool, width)
        items = [
            (f"{pool.name}: {holder.user}", f"{fig.count(holder.num_blocks)} blocks")
            for holder in pool.holders
        ]
        lines += facts(width, items[:_MAX_OWNERS])
    has_some = any(pool.holders for pool in frame.pools)
    return lines if has_some else [*lines, [Run("no cached blocks", Tone.MUTED)]]


def _records(pool: PoolFrame, width: int) -> list[Line]:
    """Count a pool's records of recurrent states, where the model keeps some."""
    if not pool.record_blocks:
        return []
    counts = f"{fig.count(pool.records)} running, {fig.things(pool.snapshots, 'snapshot')}"
    size = fig.size(pool.record_blocks * pool.block_bytes)
    each = f"{fig.things(pool.record_blocks, 'block')}, {size}"
    return facts(width, [(f"{pool.name}: states", counts), ("each takes", each)])


def _pools(view: View, frame: Frame, width: int) -> list[Line]:
    """Draw a row for each pool: occupancy, size, blocks by state."""
    columns = ["blocks", "size", *(state for state in STATE_CELLS)]
    head = pad("pool", _NAME_WIDTH) + pad("used", 5, right=True)
    head += "".join(pad(c, _cell(c), right=True) for c in columns)
    pool = frame.pools[0]
    note = f"{pool.block_size} tokens, {fig.size(pool.block_bytes)} a block"
    if pool.window_blocks:
        note += f", and {pool.window_blocks} beside it within windows"
    if width < _NARROW:
        return [rule("POOLS", width, note), *kv(view, width, 2 * len(frame.pools))]
    lines: list[Line] = [rule("POOLS", width, note), [Run(head, Tone.MUTED)]]
    for pool in frame.pools:
        counts = pool_counts(pool)
        cells = [
            (fig.short_count(pool.num_blocks), "blocks"),
            (fig.size(pool.num_blocks * pool.block_bytes), "size"),
            *((fig.short_count(counts[state]), state) for state in STATE_CELLS),
        ]
        row = "".join(pad(text, _cell(column), right=True) for text, column in cells)
        name = Run(pad(pool.name, _NAME_WIDTH), Tone.STRONG)
        lines.append([name, *used_spans(frame, pool), Run(row)])
    return lines


def _cell(column: str) -> int:
    return 9 if column in ("reserved", "draining", "size") else _NUMBER_WIDTH - 1


def _mapped(frame: Frame) -> list[PoolFrame]:
    return [pool for pool in frame.pools if (pool.used_ratio or 0.0) >= _MAP_FROM]


def _maps(frame: Frame, width: int, rows: int) -> list[Line]:
    """Draw each pool that is filled enough as rows of cells by state."""
    legend = " ".join(f"{cell}{state}" for state, cell in STATE_CELLS.items())
    lines: list[Line] = []
    for pool in _mapped(frame):
        cells = state_bar(pool_counts(pool), width * rows)
        per_cell = pool.num_blocks / len(cells) if cells else 0
        note = f"a cell is {per_cell:.1f} blocks"
        lines.append(rule(f"MAP {pool.name}", width, note))
        lines += [
            [Run(cells[start : start + width], Tone.ACCENT)]
            for start in range(0, len(cells), width)
        ]
    return [*lines, [Run(legend, Tone.MUTED)]] if lines else []


def _history(view: View, width: int, height: int) -> list[Line]:
    """Draw the occupancy of each pool over the window, from 0 to all of its blocks."""
    lines: list[Line] = [rule("OCCUPANCY", width, f"last {fig.whole_seconds(view.window_s)}")]
    for name, samples in view.history.kv_used_ratio.items():
        used = fig.ratio(samples[-1] if samples else None)
        head = [
            Run(pad(name, _NAME_WIDTH), Tone.MUTED),
            Run(pad(used, 4, right=True), Tone.STRONG),
        ]
        recent = partial(view.recent, samples)
        lines += beside_chart(head, recent, width, height, fig.ratio, 1.0)
    return lines


def _owners(frame: Frame, width: int) -> list[Line]:
    """Draw the users holding blocks, pool by pool."""
    lines: list[Line] = [rule("OWNERS", width, "blocks and requests")]
    for pool in frame.pools:
        lines += _pool_owners(pool, width)
    return lines if len(lines) > 1 else [*lines, [Run("no blocks in use", Tone.MUTED)]]


def _pool_owners(pool: PoolFrame, width: int) -> list[Line]:
    room = max(0, width - 2 * _NAME_WIDTH - 17)
    return [
        [
            Run(pad(pool.name, _NAME_WIDTH), Tone.MUTED),
            Run(pad(owner.user, _NAME_WIDTH), Tone.STRONG),
            Run(pad(fig.short_count(owner.num_blocks), 7, right=True)),
            Run(pad(f"{fig.count(owner.num_requests)} req ", 10, right=True), Tone.MUTED),
            Run(gauge(owner.num_blocks / max(1, pool.num_blocks), room), Tone.ACCENT),
        ]
        for owner in pool.owners[:_MAX_OWNERS]
    ]


def _holders(frame: Frame, width: int) -> list[Line]:
    """List the live requests with most blocks."""
    ranked = sorted(frame.requests, key=lambda request: -request.num_blocks)
    items = [
        (fig.short_id(request.id), fig.count(request.num_blocks))
        for request in ranked[:_MAX_HOLDERS]
        if request.num_blocks
    ]
    lines = facts(width, items) or [[Run("none", Tone.MUTED)]]
    return [rule("LARGEST REQUESTS", width, "blocks"), *lines]
