"""Read workers, links and pools as parts of a frame.

Owns: the wording of each part. Invariant: counts of one part are read at one moment; an unreported
value is None. Never: keeps a value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain

from appliance.fleet.placement import Placement
from appliance.frame.latency import stages
from appliance.frame.protocol import (
    MAX_POOL_OWNERS,
    HolderFrame,
    OwnerFrame,
    PoolFrame,
    QueueFrame,
    RequestFrame,
    WayFrame,
)
from appliance.request import Request
from appliance.telemetry.explain import QueueWaits
from engine.cache.blocks import BlockPool
from engine.schedule.roles_in_force import Roles
from engine.schedule.router import Router
from engine.schedule.sequence import Phase

_PHASE_ORDER = (
    *(Phase.QUEUED, Phase.PREFILLING, Phase.HANDING_OFF),
    *(Phase.PAUSED, Phase.DECODING),
)


def way_frames(roles: Roles) -> list[WayFrame]:
    """List the routes that elastic roles have predicted, with the outcomes."""
    closed = roles.outcomes.closed()
    return [
        WayFrame(
            route=way.pair.route,
            worker=way.worker,
            is_beside=way.is_beside,
            has_all=way.num_cores == len(roles.cores.all),
            step_tokens=way.size,
            num_judged=record.num_judged,
            num_missed=record.num_missed,
            num_gave_way=record.num_gave_way,
            error_ratio=math.exp(record.error) if record.num_judged else None,
            is_closed=way in closed,
        )
        for way, record in sorted(roles.outcomes.records.items())
    ]


def pool_frames(router: Router, live: Iterable[Request], block_bytes: int) -> list[PoolFrame]:
    """Describe each KV pool and the owners of its blocks."""
    live = list(live)
    return [
        _pool_frame(pool, _owners(router, live, name), block_bytes)
        for name, pool in router.ledger.pools.items()
    ]


def _owners(router: Router, live: list[Request], pool: str) -> list[OwnerFrame]:
    """Count the blocks and requests of each owner in a pool; draining blocks have no owner."""
    blocks: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for request in live:
        held = sum(len(router.ledger.table(s.seq_id, pool)) for s in request.sequences)
        if held:
            blocks[request.peer.name] += held
            requests[request.peer.name] += 1
    most = blocks.most_common(MAX_POOL_OWNERS)
    return [OwnerFrame(user, num_blocks, requests[user]) for user, num_blocks in most]


def _pool_frame(pool: BlockPool, owners: list[OwnerFrame], block_bytes: int) -> PoolFrame:
    """Show one pool; padding block 0 is left out."""
    counts = {str(state): count for state, count in pool.counts.items()}
    return PoolFrame(
        name=pool.name,
        num_blocks=pool.capacity,
        block_size=pool.block_size,
        block_bytes=block_bytes,
        owners=owners,
        holders=[HolderFrame(*each) for each in pool.index.held.most_common(MAX_POOL_OWNERS)],
        evicted=pool.index.num_evicted,
        **counts,
    )


def queue_frame(router: Router, now_ns: int) -> QueueFrame:
    """Count the sequences in each phase, and how full the queue is."""
    counts = dict.fromkeys(Phase, 0)
    at = router.at
    for sequence in chain(router.queue, at.paused.values(), at.holders()):
        counts[sequence.phase] += 1
    oldest_ns = min((s.stamps.arrived_ns for s in router.queue), default=None)
    return QueueFrame(
        queued=counts[Phase.QUEUED],
        prefilling=counts[Phase.PREFILLING],
        handing_off=counts[Phase.HANDING_OFF],
        paused=counts[Phase.PAUSED],
        decoding=counts[Phase.DECODING],
        max_queued=router.queue.max_sequences,
        oldest_queued_ms=None if oldest_ns is None else (now_ns - oldest_ns) / 1e6,
        num_owners=router.queue.num_owners,
        queued_tokens=router.queue.num_tokens,
        max_queued_tokens=router.queue.max_tokens,
    )


def waiting(router: Router, num_before_swap: int) -> QueueWaits:
    """Count the queued sequences by what they wait for."""
    if not router.roles.ready_workers:
        return QueueWaits(for_workers=len(router.queue), for_swap=num_before_swap)
    num_free = router.allocator.num_free()
    num_fitting = sum(router.routes.fits(sequence, num_free) for sequence in router.queue)
    num_others = len(router.queue) - num_fitting
    return QueueWaits(for_blocks=num_others, for_prefill=num_fitting, for_swap=num_before_swap)


def request_frame(
    request: Request, router: Router, placement: Placement, now_ns: int
) -> RequestFrame:
    """Describe a request by the stages of its least advanced sequence."""
    open_sequences = [s for s in request.sequences if not s.is_finished]
    if open_sequences:
        shown = min(open_sequences, key=lambda s: _PHASE_ORDER.index(s.phase))
    else:
        shown = max(request.sequences, key=lambda s: s.stamps.finished_ns or 0)
    cut = stages(shown.stamps, shown.num_output_tokens)
    moved = [s.handoff_bytes for s in request.sequences if s.transport]
    end_ns = shown.stamps.finished_ns if request.is_finished else now_ns
    return RequestFrame(
        id=request.request_id,
        endpoint=request.endpoint,
        phase=str(shown.phase),
        model=request.model,
        user=request.peer.name,
        stream=request.is_stream,
        num_sequences=len(request.sequences),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        output_tokens=sum(s.num_output_tokens for s in request.sequences),
        max_tokens=sum(s.sampling.max_tokens for s in request.sequences),
        num_blocks=sum(
            len(router.ledger.table(s.seq_id, pool))
            for s in request.sequences
            for pool in router.ledger.pools
        ),
        worker=shown.last_worker,
        transport=next((s.transport for s in request.sequences if s.transport), None),
        received_at=request.received_at,
        age_ms=((end_ns or now_ns) - shown.stamps.arrived_ns) / 1e6,
        finish_reason=None if shown.finish_reason is None else str(shown.finish_reason),
        error=next((s.error for s in request.sequences if s.error), None),
        **asdict(cut),
        handoff_bytes=sum(moved) if moved else None,
        preemptions=sum(s.num_preemptions for s in request.sequences),
        restored_tokens=sum(s.num_restored_tokens for s in request.sequences),
        cancelled_by=request.cancelled_by,
        changes=request.changes,
        route=shown.route,
        route_reason=shown.route_reason,
        workers=",".join(shown.workers) or None,
        links=",".join(shown.links) or None,
        restore_reason=shown.restore_reason,
        cache_miss=shown.cache_miss,
        prefill_j=request.prefill_j,
        decode_j=request.decode_j,
    )
