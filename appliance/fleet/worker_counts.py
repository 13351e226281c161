"""Choose how many workers do what: one process or two on a GPU, and how many GPUs prefill.

Invariant: each role has a device; the division with the fastest slower role and the best links
between the roles is taken; two processes share a GPU only where a token waits less and prompts are
hardly slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import GpuLink, Inventory
from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.scheduler.cache.topology import DECODE, PREFILL
from engine.scheduler.measurer import ALONE
from engine.scheduler.routing.step_times import place_of

USUAL_PROMPT_TOKENS = 2048
USUAL_OUTPUT_TOKENS = 256
_USUAL_DEPTH = USUAL_PROMPT_TOKENS / 2
MAX_BATCH = 32
"""Assumed sequences that decode together; fewer if KV memory is short."""
_PRODUCT_SHARE, _BANDWIDTH_SHARE = 0.55, 0.65
"""Shares of the data sheets' rates that prefill and decode reach."""
_FLOPS_PER_BYTE: Mapping[tuple[int, int], float] = {
    (7, 5): 200,
    (8, 0): 155,
    (8, 6): 80,
    (8, 9): 165,
    (9, 0): 295,
    (10, 0): 280,
}
"""FP16 products per second divided by memory bytes per second, by compute capability."""
_USUAL_FLOPS_PER_BYTE = 200


def phase_costs(
    weights_bytes: int, kv_token_bytes: int, pool_bytes: int, capability: tuple[int, int] | None
) -> tuple[float, float]:
    """Estimate a usual request's prefill and decode costs; only their ratio has a meaning.

    Args:
        weights_bytes: in memory, two for each parameter.
        pool_bytes: of one device, for KV.
    """
    length = USUAL_PROMPT_TOKENS + USUAL_OUTPUT_TOKENS
    batch = max(min(MAX_BATCH, pool_bytes // (length * kv_token_bytes)), 1)
    per_byte = _USUAL_FLOPS_PER_BYTE
    if capability is not None:
        per_byte = int(_FLOPS_PER_BYTE.get(capability, per_byte))
    # a product and a sum for each parameter and token, and two bytes a parameter
    prefill = weights_bytes * USUAL_PROMPT_TOKENS / (_PRODUCT_SHARE * per_byte)
    read_bytes = weights_bytes / batch + length * kv_token_bytes
    return prefill, USUAL_OUTPUT_TOKENS * read_bytes / _BANDWIDTH_SHARE


def measured_costs(profile: Profile) -> tuple[float, float] | None:
    """Return both phases' costs in ms from timed steps; None: too few steps."""
    prompts = _values(profile, PROMPT_MS)
    decodes = [(key, ms) for key, ms in _values(profile, DECODE_MS) if key.size <= MAX_BATCH]
    if len(prompts) < 2 or not decodes:
        return None
    # the largest batches, as on a busy device; among them the one nearest to usual lengths
    prompt, prompt_ms = max(
        prompts, key=lambda each: (each[0].size, -abs(each[0].depth - _USUAL_DEPTH))
    )
    decode, decode_ms = max(
        decodes, key=lambda each: (each[0].size, -abs(each[0].depth - USUAL_PROMPT_TOKENS))
    )
    return (
        USUAL_PROMPT_TOKENS * prompt_ms / prompt.size,
        USUAL_OUTPUT_TOKENS * decode_ms / decode.size,
    )


def num_prefilling(
    num_devices: int, costs: tuple[float, float], *, are_measured: bool = False
) -> tuple[int, str]:
    """Choose how many of at least two devices prefill, and say why."""
    prefill, decode = costs
    shares = f"{100 * prefill / (prefill + decode):.0f} to {100 * decode / (prefill + decode):.0f}"
    count = min(
        range(1, num_devices), key=lambda n: (max(prefill / n, decode / (num_devices - n)), n)
    )
    how = "was measured to need" if are_measured else "is estimated to need"
    about = (
        f"{count} of {num_devices} prefill: a request of {USUAL_PROMPT_TOKENS:,} prompt and "
        f"{USUAL_OUTPUT_TOKENS} output tokens {how} prefill and decode as {shares}"
    )
    return count, about


MAX_DIVISIONS = 13_000
"""Maximum divisions of the devices that are all compared."""
Counts = tuple[int, ...]
"""Devices by board."""
Quality = tuple[float, ...]
"""The quality of links, more is better: how many are direct, NVLink, length of the path."""


def divide(
    gpus: Sequence[Gpu], num_prefill: int, num_decode: int, inventory: Inventory
) -> tuple[list[Gpu], list[Gpu]]:
    """Choose the GPUs for prefill and for decode, with the best links between the roles.

    Instances of one board are equal, so only their number on each board is chosen.
    """
    boards: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        boards.setdefault(gpu.board, []).append(gpu)
    groups = list(boards.values())
    links = [[_link_quality(inventory.link(a[0], b[0])) for b in groups] for a in groups]
    for i, row in enumerate(links):
        row[i] = (0, 0, 0)  # instances reach no other memory, and no board is nearer

    def among(counts: Counts) -> Quality:
        return _links_quality(links, counts, counts)

    chosen = _best_counts([len(group) for group in groups], num_prefill + num_decode, among)

    def between(prefill: Counts) -> Quality:
        decode = tuple(c - p for c, p in zip(chosen, prefill, strict=True))
        return _links_quality(links, prefill, decode)

    prefill = _best_counts(chosen, num_prefill, between)
    split = list(zip(groups, prefill, chosen, strict=True))
    return (
        [gpu for group, count, _ in split for gpu in group[:count]],
        [gpu for group, count, end in split for gpu in group[count:end]],
    )


def _link_quality(link: GpuLink) -> Quality:
    level = 99 if link.level is None else link.level
    path = 0 if link.num_nvlinks else -level
    return bool(link.can_reach), link.nvlink_bytes_per_s or link.num_nvlinks, path


def _links_quality(links: Sequence[Sequence[Quality]], ones: Counts, others: Counts) -> Quality:
    """Add up the links between two groups of devices."""
    total = [0.0, 0.0, 0.0]
    for i, one in enumerate(ones):
        for j, other in enumerate(others):
            total = [x + one * other * value for x, value in zip(total, links[i][j], strict=True)]
    return tuple(total)


def _best_counts(rooms: Sequence[int], count: int, quality: Callable[[Counts], Quality]) -> Counts:
    """Choose how many devices of each board are taken.

    All divisions are compared. With more than MAX_DIVISIONS, the search starts at equal shares
    and moves one device at a time while that improves the result.
    """
    divisions = list(itertools.islice(_divisions(rooms, count), MAX_DIVISIONS + 1))
    if len(divisions) <= MAX_DIVISIONS:
        return max(divisions, key=quality)
    best = _equal_shares(rooms, count)
    while True:
        moved = [best]
        for source, target in itertools.permutations(range(len(rooms)), 2):
            if best[source] and best[target] < rooms[target]:
                counts = list(best)
                counts[source] -= 1
                counts[target] += 1
                moved.append(tuple(counts))
        better = max(moved, key=quality)
        if better == best:
            return best
        best = better


def _divisions(rooms: Sequence[int], count: int) -> Iterator[Counts]:
    """Yield all ways to take a number of devices, most from the first boards first."""
    if not rooms:
        if not count:
            yield ()
        return
    least = max(0, count - sum(rooms[1:]))
    for number in range(min(rooms[0], count), least - 1, -1):
        for others in _divisions(rooms[1:], count - number):
            yield number, *others


def _equal_shares(rooms: Sequence[int], count: int) -> Counts:
    taken = [0] * len(rooms)
    while sum(taken) < count:
        free = [i for i, room in enumerate(rooms) if taken[i] < room]
        taken[min(free, key=lambda i: (taken[i] / rooms[i], i))] += 1
    return tuple(taken)


STARTED_TWO = FactKey("started_two")
"""1 from the start of two processes on one GPU until both are ready."""
MAX_GAP_RATIO = 0.75
"""Maximum wait of a token in two processes, relative to one."""
MIN_RATE_RATIO = 0.9
"""Minimum prompt rate of two processes, relative to one."""


def is_two_better(profile: Profile) -> tuple[bool, str] | None:
    """Say whether two processes on one GPU are better than one, and why; None: not measured.

    In one process a token waits for the prompt chunk in its step; in two, the device divides its
    time between both.
    """
    beside = place_of(PREFILL, 1), place_of(DECODE, 1)
    prompt = _pair(profile, PROMPT_MS, beside[0])
    token = _pair(profile, DECODE_MS, beside[1])
    if prompt is None or token is None:
        return None
    (size, prompt_alone_ms, prompt_beside_ms), (_, token_alone_ms, token_beside_ms) = prompt, token
    one_ms = prompt_alone_ms + token_alone_ms
    rate = one_ms / prompt_beside_ms
    is_better = token_beside_ms / one_ms <= MAX_GAP_RATIO and rate >= MIN_RATE_RATIO
    return is_better, (
        f"ITL beside a {size:,}-token chunk: {one_ms:.3g} ms in one process, "
        f"{token_beside_ms:.3g} ms in two; prompts run at {rate:.0%} of the rate"
    )


def _pair(profile: Profile, what: str, beside: str) -> tuple[int, float, float] | None:
    """Find the largest step timed alone and beside another: its size, and both times."""
    alone = {(key.size, key.depth): ms for key, ms in _values(profile, what, ALONE)}
    both = [
        (size, -depth, alone[size, depth], ms)
        for (_, size, depth, _), ms in _values(profile, what, beside)
        if (size, depth) in alone
    ]
    if not both:
        return None
    size, _, alone_ms, beside_ms = max(both)
    return size, alone_ms, beside_ms


def _values(profile: Profile, what: str, place: str | None = None) -> list[tuple[FactKey, float]]:
    return [(key, fact.value) for key, fact in profile.about(what, place)]
