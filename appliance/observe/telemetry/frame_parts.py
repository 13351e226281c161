"""Read workers, links and pools as parts of a frame.

Invariant: counts of one part are read at one moment; an unreported value is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from appliance.daemon.requests.request import Request
from appliance.observe.frame.late_frames import LateFrame
from appliance.observe.frame.latency import stages
from appliance.observe.frame.protocol import (
    MAX_POOL_OWNERS,
    DraftFrame,
    HolderFrame,
    OwnerFrame,
    PoolFrame,
    QueueFrame,
    RequestFrame,
    WayFrame,
)
from appliance.observe.telemetry.explain import QueueWaits
from engine.scheduler.sequences.draft_counts import DraftCounts
from engine.scheduler.sequences.sequence import Phase
from engine.scheduler.snapshot import PoolSnapshot, RolesSnapshot, Snapshot

_PHASE_ORDER = (
    *(Phase.QUEUED, Phase.PREFILLING, Phase.HANDING_OFF),
    *(Phase.PAUSED, Phase.DECODING),
)


def way_frames(roles: RolesSnapshot) -> list[WayFrame]:
    """List each kind of prediction of elastic roles, with its outcomes."""
    return [
        WayFrame(
            route=way.pair.route,
            worker=way.worker,
            is_beside=way.is_beside,
            has_all=way.num_cores == roles.num_cores,
            step_tokens=way.size,
            num_judged=record.num_judged,
            num_missed=record.num_missed,
            num_gave_way=record.num_gave_way,
            error_ratio=math.exp(record.error) if record.num_judged else None,
            is_closed=way in roles.closed,
        )
        for way, record in roles.predictions
    ]


def pool_frames(snapshot: Snapshot, live: Iterable[Request], block_bytes: int) -> list[PoolFrame]:
    """Describe each KV pool, and which users' requests hold it."""
    live = list(live)
    return [_pool_frame(pool, _owners(pool, live), block_bytes) for pool in snapshot.pools]


def _owners(pool: PoolSnapshot, live: list[Request]) -> list[OwnerFrame]:
    """Count the blocks and requests of each owner in a pool; draining blocks have no owner."""
    blocks: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for request in live:
        held = sum(pool.tables.get(s.seq_id, 0) for s in request.sequences)
        if held:
            blocks[request.peer.name] += held
            requests[request.peer.name] += 1
    most = blocks.most_common(MAX_POOL_OWNERS)
    return [OwnerFrame(user, num_blocks, requests[user]) for user, num_blocks in most]


def _pool_frame(pool: PoolSnapshot, owners: list[OwnerFrame], block_bytes: int) -> PoolFrame:
    return PoolFrame(
        name=pool.name,
        num_blocks=pool.capacity,
        block_size=pool.block_size,
        block_bytes=block_bytes,
        owners=owners,
        holders=[HolderFrame(*each) for each in pool.holders[:MAX_POOL_OWNERS]],
        evicted=pool.num_evicted,
        record_blocks=pool.record_blocks,
        records=pool.num_records,
        snapshots=pool.num_snapshots,
        window_blocks=pool.num_window_blocks,
        **pool.counts,
    )


def queue_frame(
    snapshot: Snapshot,
    kept: list[RequestFrame],
    first_token: LateFrame | None,
    next_token: LateFrame | None,
    now_ns: int,
) -> QueueFrame:
    """Count the sequences in each phase, and show how full the queue is.

    Args:
        kept: the requests of the daemon before that wait until this one continues them.
    """
    counts = Counter({str(phase): number for phase, number in snapshot.phases.items()})
    queue = snapshot.queue
    for request in kept:
        counts[request.phase] += request.num_sequences
    oldest_ns = queue.oldest_arrived_ns
    return QueueFrame(
        queued=counts.get(Phase.QUEUED, 0),
        prefilling=counts.get(Phase.PREFILLING, 0),
        handing_off=counts.get(Phase.HANDING_OFF, 0),
        paused=counts.get(Phase.PAUSED, 0),
        decoding=counts.get(Phase.DECODING, 0),
        max_queued=queue.max_sequences,
        oldest_queued_ms=None if oldest_ns is None else (now_ns - oldest_ns) / 1e6,
        num_owners=queue.num_owners,
        queued_tokens=queue.num_tokens,
        max_queued_tokens=queue.max_tokens,
        first_token=first_token,
        next_token=next_token,
    )


def draft_frames(counts: DraftCounts) -> list[DraftFrame]:
    """List the guesses of each drafter by place."""
    frames = []
    for drafter in counts.drafters:
        places = range(1 + max(place for name, place in counts.guessed if name == drafter))
        guessed, right = (
            [each[drafter, place] for place in places] for each in (counts.guessed, counts.right)
        )
        frames.append(DraftFrame(drafter, guessed, right))
    return frames


def waiting(snapshot: Snapshot, num_before_swap: int) -> QueueWaits:
    """Count what the sequences in the queue wait for, and requests for another model."""
    queue = snapshot.queue
    if not snapshot.has_ready_worker:
        return QueueWaits(for_workers=queue.num_waiting, for_swap=num_before_swap)
    num_others = queue.num_waiting - queue.num_fitting
    return QueueWaits(num_others, queue.num_fitting, for_swap=num_before_swap)


def request_frame(request: Request, snapshot: Snapshot | None, now_ns: int) -> RequestFrame:
    """Describe a request by the stages of its least advanced sequence.

    Args:
        snapshot: of the router; None: the request is closed, and holds no blocks.
        now_ns: CLOCK_MONOTONIC.
    """
    open_sequences = [s for s in request.sequences if not s.is_finished]
    if open_sequences:
        shown = min(open_sequences, key=lambda s: _PHASE_ORDER.index(s.phase))
    else:
        shown = max(request.sequences, key=lambda s: s.stamps.finished_ns or 0)
    seq_ids = [sequence.seq_id for sequence in request.sequences]
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
        num_blocks=sum(map(snapshot.num_blocks, seq_ids)) if snapshot else 0,
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
        cache_miss=None if shown.cache_miss is None else shown.cache_miss.reason,
        speculation=request.drafts.about,
        client=request.peer.client or None,
        waited_for=request.waited_for,
        recoveries=sum(s.num_recoveries for s in request.sequences),
        prefill_j=request.prefill_j,
        decode_j=request.decode_j,
    )
