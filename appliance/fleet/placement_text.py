"""A placement in lines for people: a worker each, then why it is so.

Owns: the words. Pure.
Invariant: every worker has its line, every reason its own.
Never: decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from appliance.fleet.placement import Placement, WorkerPlan, cpu_names
from engine.units import size_text


def placement_lines(placement: Placement) -> list[str]:
    """Who computes where with which pool, and the reasons."""
    rows = [list(_cells(placement, plan)) for plan in placement.workers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return lines + [f"  because {text}" for text in placement.reasons]


def _cells(placement: Placement, plan: WorkerPlan) -> Iterator[str]:
    pool = placement.places.pool_by_name[plan.pool]
    yield plan.name
    yield cpu_names(plan.cpus) if plan.gpu is None else f"{plan.gpu.name}, {plan.gpu.model}"
    yield "" if plan.gpu is None else cpu_names(plan.cpus)
    num_bytes = pool.num_blocks * placement.block_bytes
    num_tokens = (pool.num_blocks - 1) * placement.block_size
    first, *others = [each.name for each in placement.workers if each.pool == plan.pool]
    if plan.name != first:
        yield f"the pool of {first}"
        return
    what = "one pool" if others else "a pool"
    yield f"{what} of up to {num_tokens:,} tokens, {size_text(num_bytes)}"
