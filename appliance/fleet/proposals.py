"""Propose several processes, or weights on disk, where a model needs them on this machine.

Invariant: a machine that has room for the model's weights as it serves by itself gets no proposal.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.devices.inventory import Inventory, Node
from appliance.fleet.gpu_placement import WORKER_BYTES as GPU_WORKER_BYTES
from appliance.fleet.placement import Placement, cpu_names
from appliance.fleet.weights_offload import WORKER_BYTES
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype
from engine.checkpoint.layer_units import weight_bytes
from engine.checkpoint.shard_bytes import group_bytes
from engine.checkpoint.shards import num_shards, why_no_shards
from engine.checkpoint.weights_layout import (
    AT_START,
    PanelsLayout,
    WeightsLayout,
    panels_layout,
    weights_layout,
)
from engine.errors import ConfigError
from engine.kernels.cpu import has_kernels
from engine.units import size_text

_WIDTHS = (4, 2)


def propose(checkpoint: Checkpoint, inventory: Inventory) -> str | None:
    """Return with what settings a model can be served, and why; None: it needs none."""
    if _fits_on_gpu(checkpoint, inventory):
        return None
    dtype = choose_dtype("auto", checkpoint.stored_dtype)
    total = sum(weight_bytes(checkpoint, dtype, _layout(checkpoint, dtype)).values())
    room = inventory.memory_bytes - 2 * WORKER_BYTES
    if total > room:
        why = f"weights of {size_text(total)} exceed the {size_text(max(room, 0))} of memory"
        ways = [f"--offload-weights auto reads {size_text(total - room)} or more from disk a step"]
        return f"{why}: {'; or '.join([*ways, *_fewer_bits(checkpoint, dtype, room)])}"
    nodes = [node for node in inventory.nodes if node.cores]
    if len(nodes) * total <= room:
        return None
    why = f"a copy of {size_text(total)} on each of {len(nodes)} NUMA nodes exceeds the memory"
    place = _over_nodes(checkpoint, dtype, nodes, inventory.memory_bytes)
    return f"{why}: {place or '--roles colocated has one copy'}"


def check_copies(
    checkpoint: Checkpoint,
    layout: WeightsLayout | PanelsLayout | None,
    placement: Placement,
    inventory: Inventory,
) -> None:
    """Refuse a copy of the weights on each NUMA node where memory has no room for all.

    Raises:
        ConfigError: with what would fit.
    """
    nodes = {plan.node for plan in placement.workers if plan.gpu is None and not plan.ranks}
    if layout is None or len(nodes) < 2 or len(nodes) * layout.num_bytes <= inventory.memory_bytes:
        return
    what = f"{len(nodes)} copies of weights of {size_text(layout.num_bytes)}"
    what += f", and {size_text(inventory.memory_bytes)} of memory are free"
    hint = propose(checkpoint, inventory) or "--roles colocated has one copy"
    raise ConfigError(what, where="place", hint=hint)


def _layout(checkpoint: Checkpoint, dtype: str) -> WeightsLayout | PanelsLayout | None:
    """Return the layout of the weights in the host's memory; None: the files' own."""
    panels = panels_layout(checkpoint, dtype) if has_kernels() else None
    return panels or weights_layout(checkpoint, dtype, can_widen=has_kernels())


def _fits_on_gpu(checkpoint: Checkpoint, inventory: Inventory) -> bool:
    """Say whether a GPU has room; where none has, cores serve."""
    needed = checkpoint.num_bytes + GPU_WORKER_BYTES
    usable = [gpu for gpu in inventory.gpus if gpu.obstacle is None]
    return any(gpu.memory_bytes >= needed for gpu in usable)


def _fewer_bits(checkpoint: Checkpoint, dtype: str, room: int) -> list[str]:
    """Name the quantisation at start with the most bits that fits; empty: none does."""
    for bits in AT_START if checkpoint.is_plain and has_kernels() else ():
        layout = panels_layout(checkpoint, dtype, bits)
        if layout is not None and layout.num_bytes <= room:
            return [f"--weights {bits} takes {size_text(layout.num_bytes)}"]
    return []


def _over_nodes(
    checkpoint: Checkpoint, dtype: str, nodes: Sequence[Node], memory_bytes: int
) -> str | None:
    """Place one worker over several NUMA nodes, a process on each; None: it cannot be divided."""
    if why_no_shards(checkpoint) is not None or not has_kernels():
        return None
    for width in _WIDTHS:
        chosen = [node.cores for node in nodes[:width]]
        if len(chosen) < width or num_shards(checkpoint) % width or not all(map(_is_run, chosen)):
            continue
        num_cores = min(map(len, chosen))
        held = group_bytes(checkpoint, dtype, width, is_packed=dtype == "bfloat16")
        own = sum(held.own) + held.sums + width * WORKER_BYTES
        if held.mapped + own > memory_bytes:
            continue
        each = [cpu_names(cores[:num_cores]).removeprefix("cpu ") for cores in chosen]
        place = f"--roles colocated --place colocated={'+'.join(each)}"
        return f"{place} keeps {size_text(max(held.own))} and less on each of {width}"
    return None


def _is_run(cores: Sequence[int]) -> bool:
    """Say whether --place can name these cores as a range."""
    return list(cores) == list(range(cores[0], cores[0] + len(cores)))
