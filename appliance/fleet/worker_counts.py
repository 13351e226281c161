"""Choose how many workers do what: one process or two on a GPU, and how many GPUs prefill.

Owns: that choice, by data sheets before a model was served, and by what its steps took after that.
Invariant: each role has a device; of all ways to divide them the one is taken whose slower role is
quickest, and whose links between the roles are the best; two processes share a GPU only where a
token waits less and prompts are hardly slower.
Never: measures or starts anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import GpuLink, Inventory
from engine.cache.topology import DECODE, PREFILL
from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.schedule.measurer import ALONE
from engine.schedule.step_times import place_of

USUAL_PROMPT_TOKENS = 2048
USUAL_OUTPUT_TOKENS = 256
_USUAL_DEPTH = USUAL_PROMPT_TOKENS / 2
MAX_BATCH = 32
"""Sequences that decode together; fewer where the KV of more has no room."""
_PRODUCT_SHARE, _BANDWIDTH_SHARE = 0.55, 0.65
"""Of what data sheets promise, that prefill and decode come to."""
_FLOPS_PER_BYTE: Mapping[tuple[int, int], float] = {
    (7, 5): 200,
    (8, 0): 155,
    (8, 6): 80,
    (8, 9): 165,
    (9, 0): 295,
    (10, 0): 280,
}
"""Products in halves to bytes of memory, a second of each, by data sheets of the usual GPUs."""
_USUAL_FLOPS_PER_BYTE = 200


def phase_costs(
    weights_bytes: int, kv_token_bytes: int, pool_bytes: int, capability: tuple[int, int] | None
) -> tuple[float, float]:
    """What a usual request takes of prefill and of decode; only their proportion means something.

    Args:
        weights_bytes: in memory, two for each parameter.
        kv_token_bytes: of one position.
        pool_bytes: of one device, for KV.
        capability: of the devices.
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
    """Costs of both phases from steps that were timed, in ms; None: too few of a kind to tell."""
    prompts = _values(profile, PROMPT_MS)
    decodes = [(key, ms) for key, ms in _values(profile, DECODE_MS) if key.size <= MAX_BATCH]
    if len(prompts) < 2 or not decodes:
        return None
    # the largest, which are what a busy device makes, and of those the one most like a usual one
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
    """How many of at least two prefill, and why."""
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


MAX_WAYS = 13_000
"""To choose some of the devices: up to so many are all compared."""
Counts = tuple[int, ...]
"""Devices by board."""
Quality = tuple[float, ...]
"""Of links, more is better: how many reach each other, NVLink, how short the path is."""


def divide(
    gpus: Sequence[Gpu], num_prefill: int, num_decode: int, inventory: Inventory
) -> tuple[list[Gpu], list[Gpu]]:
    """Choose the GPUs that prefill and those that decode: the best links between them.

    Instances of one board are alike, so that only their number on each board is chosen.
    """
    boards: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        boards.setdefault(gpu.board, []).append(gpu)
    groups = list(boards.values())
    links = [[_link_quality(inventory.link(a[0], b[0])) for b in groups] for a in groups]
    for i, row in enumerate(links):
        row[i] = (0, 0, 0)  # instances, which reach nobody, and no board is nearer

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
    """Add up the links from each of the ones to each of the others."""
    total = [0.0, 0.0, 0.0]
    for i, one in enumerate(ones):
        for j, other in enumerate(others):
            total = [x + one * other * value for x, value in zip(total, links[i][j], strict=True)]
    return tuple(total)


def _best_counts(rooms: Sequence[int], count: int, quality: Callable[[Counts], Quality]) -> Counts:
    """Choose how many devices of each board are taken.

    All ways are compared, or, of more than MAX_WAYS, those that moving one device at a time leads
    to from equal shares, as long as each is better than the one before.
    """
    ways = list(itertools.islice(_ways(rooms, count), MAX_WAYS + 1))
    if len(ways) <= MAX_WAYS:
        return max(ways, key=quality)
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


def _ways(rooms: Sequence[int], count: int) -> Iterator[Counts]:
    """All ways to take a number of devices, the most of the first boards first."""
    if not rooms:
        if not count:
            yield ()
        return
    least = max(0, count - sum(rooms[1:]))
    for number in range(min(rooms[0], count), least - 1, -1):
        for others in _ways(rooms[1:], count - number):
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
"""Of a token's wait in one worker: less has to be left of it in two."""
MIN_RATE_RATIO = 0.9
"""Of the prompt tokens a second of one worker: so many have to be left."""


def is_two_better(profile: Profile) -> tuple[bool, str] | None:
    """Say whether two processes on one GPU are better than one, and why; None: not measured.

    In one a token waits for the chunk of a prompt that its step has; in two, for whatever the
    device lets both processes compute at once.
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
        f"beside a chunk of {size:,} prompt tokens a token takes {one_ms:.3g} ms in one process "
        f"and {token_beside_ms:.3g} ms in a second, with prompts at {rate:.0%} of the rate"
    )


def _pair(profile: Profile, what: str, beside: str) -> tuple[int, float, float] | None:
    """The largest step that was timed both alone and beside another: its size, and both times."""
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
