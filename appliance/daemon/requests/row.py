"""Build the request log's row for a request.

Invariant: the fields are the columns of the requests table that are not computed, and `prompt`.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import NamedTuple

import msgspec

from appliance.daemon.requests.request import Peer, Request
from appliance.daemon.requests.text_request import TextRequest
from appliance.observe.frame.latency import in_order
from appliance.observe.frame.logged_requests import of_all
from appliance.observe.frame.protocol import RequestFrame
from engine.scheduler.sequences.sequence import Sequence
from engine.wire.finish_reason import FinishReason

MAX_CLIENT_RID_CHARS = 128
CONTINUES = "the model to be loaded again: it continues after the daemon's end"
_WORST_LAST = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the requests table, and its text for request_text."""

    rid: str
    client_rid: str | None
    received_at: str
    endpoint: str
    model: str
    peer_uid: int | None
    peer_gid: int | None
    peer_pid: int | None
    peer_user: str | None
    key_name: str | None
    stream: bool
    num_sequences: int
    prompt_tokens: int
    cached_tokens: int | None
    restored_tokens: int
    completion_tokens: int | None
    """Output tokens; None: vectors or scores were asked for, or unknown after a crash."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    """None if the request's body was never read."""
    http_status: int
    finish_reason: str | None
    error: str | None
    cancelled_by: str | None
    transport: str | None
    route: str | None
    route_reason: str | None
    restore_reason: str | None
    cache_miss: str | None
    workers: str | None
    """The workers that ran that sequence, in order."""
    links: str | None
    """How its KV came to each further worker: a transport, or `none`."""
    handoff_bytes: int
    handoff_blocks: int
    recoveries: int
    preemptions: int
    prefill_j: float | None
    decode_j: float | None
    t_tokenized_us: int | None
    t_started_us: int | None
    t_first_token_us: int | None
    t_attached_us: int | None
    t_decode_started_us: int | None
    t_second_token_us: int | None
    t_last_token_us: int | None
    t_finished_us: int | None
    restored_us: int | None
    """Queue time spent loading blocks from a cache."""
    paused_us: int | None
    """Total time of its pauses."""
    num_timed_tokens: int
    """Output tokens of the sequence that has these stamps."""
    prompt: str | None = None
    """The text for request_text; None: not stored."""
    output_offset: int | None = None
    """Prompt tokens, at its end, that an earlier request has output."""
    changes: str | None = None
    """What was changed in order to serve it, in words; None: nothing."""
    speculation: str | None = None
    """Its tokens per step and right guesses, in words; None: no guesses."""
    client: str | None = None
    """The program and process that sent it, or its address; None: neither is known."""
    waited_for: str | None = None
    """What its prompt waited for last, in words; None: it had its turn within a second."""

    @classmethod
    def from_request(cls, request: Request, *, with_text: bool = False) -> LogRow:
        """Build the row of a request after its terminal reply.

        Bytes, output tokens, recoveries and preemptions are sums over its sequences; a prompt
        counts once, as in the client's usage. The finish reason is the worst of all. Stamps come
        from the sequence that finished last, which the client waited for: only one sequence's
        stages add up.
        """
        sequences = request.sequences
        sampling = sequences[0].sampling
        slowest = max(sequences, key=lambda sequence: sequence.stamps.finished_ns or 0)
        return cls(
            rid=request.request_id,
            client_rid=_cut(request.client_request_id),
            received_at=request.received_at,
            endpoint=request.endpoint,
            model=request.model,
            peer_uid=request.peer.uid,
            peer_gid=request.peer.gid,
            peer_pid=request.peer.pid,
            peer_user=request.peer.user,
            key_name=request.peer.key,
            stream=request.is_stream,
            num_sequences=len(sequences),
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            restored_tokens=sum(sequence.num_restored_tokens for sequence in sequences),
            completion_tokens=sum(sequence.num_output_tokens for sequence in sequences),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            output_offset=sampling.output_offset,
            changes=request.changes,
            http_status=request.http_status,
            finish_reason=_worst(sequences),
            error=next((sequence.error for sequence in sequences if sequence.error), None),
            cancelled_by=request.cancelled_by,
            transport=next((seq.transport for seq in sequences if seq.transport), None),
            route=slowest.route,
            route_reason=slowest.route_reason,
            restore_reason=slowest.restore_reason,
            cache_miss=request.cache_miss,
            speculation=request.drafts.about,
            client=request.peer.client or None,
            waited_for=request.waited_for,
            workers=",".join(slowest.workers) or None,
            links=",".join(slowest.links) or None,
            handoff_bytes=sum(sequence.handoff_bytes for sequence in sequences),
            handoff_blocks=sum(sequence.handoff_blocks for sequence in sequences),
            recoveries=sum(sequence.num_recoveries for sequence in sequences),
            preemptions=sum(sequence.num_preemptions for sequence in sequences),
            prefill_j=request.prefill_j,
            decode_j=request.decode_j,
            prompt=request.prompt_text if with_text else None,
            num_timed_tokens=slowest.num_output_tokens,
            restored_us=_us(slowest.stamps.restored_ns),
            paused_us=_us(slowest.stamps.paused_ns),
            **_offsets(slowest),
        )

    @classmethod
    def of_waiting(
        cls, frame: RequestFrame, peer: Peer, client_rid: str | None, http_status: int
    ) -> LogRow:
        """Build the row of a request that waited for its model and was never admitted.

        Its body was not read, so its contents are unknown; all its time is queue time.
        """
        names = cls.__struct_fields__
        counts = {n: 0 for n in names if n.endswith(("_tokens", "_bytes", "_blocks"))}
        known = {n: getattr(frame, n) for n in RequestFrame.__struct_fields__ if n in names}
        return cls(
            **{
                **dict.fromkeys(names),
                **counts,
                **known,
                "rid": frame.id,
                "client_rid": _cut(client_rid),
                "peer_uid": peer.uid,
                "peer_gid": peer.gid,
                "peer_pid": peer.pid,
                "peer_user": peer.user,
                "key_name": peer.key,
                "http_status": http_status,
                "recoveries": 0,
                "handoff_bytes": 0,
                "t_tokenized_us": int(1e3 * (frame.tokenize_ms or 0.0)),
                "t_finished_us": int(1e3 * frame.age_ms),
            }
        )

    @classmethod
    def from_texts(cls, request: TextRequest, now_ns: int, *, http_status: int) -> LogRow:
        """Build the row of a request for vectors or scores: a prompt without an answer."""
        frame, client_rid = request.frame(now_ns), request.client_request_id
        row = cls.of_waiting(frame, request.peer, client_rid, http_status)
        ended_us = None if request.finished_ns is None else row.t_finished_us
        return msgspec.structs.replace(
            row,
            completion_tokens=None,
            t_started_us=row.t_tokenized_us,
            t_finished_us=ended_us,
        )


def kept_frame(row: LogRow, num_tokens: int | None, now: float) -> RequestFrame:
    """Show a request of the previous daemon that waits for the model to be loaded.

    Args:
        num_tokens: its output tokens so far; None: unknown.
        now: Unix seconds.
    """
    names = RequestFrame.__struct_fields__
    same = {name: getattr(row, name) for name in LogRow.__struct_fields__ if name in names}
    known = {
        **same,
        "transport": None,
        "finish_reason": None,
        "error": None,
        "max_tokens": of_all(row.max_tokens, row.num_sequences),
        "handoff_bytes": None,
        "recoveries": row.recoveries + row.num_sequences,
    }
    peer = Peer(row.peer_uid, row.peer_gid, row.peer_pid, row.peer_user, row.key_name)
    arrived = datetime.fromisoformat(row.received_at).timestamp()
    return RequestFrame(
        id=row.rid,
        phase="paused" if num_tokens else "queued",
        user=peer.name,
        computed_tokens=None,
        output_tokens=num_tokens,
        num_blocks=0,
        worker=None,
        age_ms=max(1e3 * (now - arrived), 0.0),
        waits_for=CONTINUES,
        **known,
    )


class RowEnergy(NamedTuple):
    """The energy of a row's request, from the reading after the row."""

    rid: str
    prefill_j: float | None
    decode_j: float | None


class RefusalRow(NamedTuple):
    """Refusals of one caller for one reason, since its last such row."""

    at: str
    user: str
    client: str
    status: int
    code: str
    number: int


def _worst(sequences: list[Sequence]) -> str | None:
    reasons = [sequence.finish_reason for sequence in sequences if sequence.finish_reason]
    return max(reasons, key=_WORST_LAST.index, default=None)


def _cut(client_rid: str | None) -> str | None:
    return client_rid[:MAX_CLIENT_RID_CHARS] if client_rid else None


def _us(duration_ns: int | None) -> int | None:
    return None if duration_ns is None else duration_ns // 1000


def _offsets(sequence: Sequence) -> dict[str, int | None]:
    """Compute the t_*_us columns from the stamps with equal names."""
    stamps = in_order(sequence.stamps)
    offsets: dict[str, int | None] = {}
    for field in fields(stamps):
        if field.name.startswith(("paused", "restored")):
            continue  # no points in time
        at_ns = getattr(stamps, field.name)
        column = f"t_{field.name.removesuffix('_ns')}_us"
        offsets[column] = None if at_ns is None else (at_ns - stamps.arrived_ns) // 1000
    del offsets["t_arrived_us"]
    return offsets
