"""Build the request log's row for a request.

Owns: which of a request's sequences a row describes; the statements that insert runs, requests and
events, and complete a request's energy; the file beside the log with a JSON line for each request
from its acceptance to its row, so that a crashed daemon's requests get rows.
Invariant: the fields are the columns of the requests table that are not computed, and `prompt`.
Never: reads a clock or the database.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from appliance.frame.latency import in_order
from appliance.frame.protocol import RequestFrame, computed_at_end
from appliance.request import Peer, Request
from engine.schedule.sequence import FinishReason, Sequence
from engine.wire.not_json import NOT_JSON

MAX_CLIENT_RID_CHARS = 128
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
    """Output tokens; None: unknown after a crash of the daemon."""
    max_tokens: int
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
        client_rid = request.client_request_id
        return cls(
            rid=request.request_id,
            client_rid=client_rid[:MAX_CLIENT_RID_CHARS] if client_rid else None,
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
                "client_rid": client_rid[:MAX_CLIENT_RID_CHARS] if client_rid else None,
                "peer_uid": peer.uid,
                "peer_gid": peer.gid,
                "peer_pid": peer.pid,
                "peer_user": peer.user,
                "key_name": peer.key,
                "http_status": http_status,
                "recoveries": 0,
                "t_tokenized_us": 0,
                "t_finished_us": int(1e3 * frame.age_ms),
            }
        )


class RowEnergy(NamedTuple):
    """The energy of a row's request, from the reading after the row."""

    rid: str
    prefill_j: float | None
    decode_j: float | None


def frame_of_row(row: dict[str, Any]) -> RequestFrame:
    """Turn a row into the form in which live requests are shown."""
    same = {name: row[name] for name in RequestFrame.__struct_fields__ if name in row}
    num_output = row["completion_tokens"]
    return RequestFrame(
        phase="finished",
        computed_tokens=computed_at_end(row["prompt_tokens"], num_output),
        output_tokens=num_output,
        num_blocks=0,
        worker=None,
        age_ms=row["e2e_ms"] or 0.0,
        **same,
    )


def _worst(sequences: list[Sequence]) -> str | None:
    reasons = [sequence.finish_reason for sequence in sequences if sequence.finish_reason]
    return max(reasons, key=_WORST_LAST.index, default=None)


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


# Rows of the request log to SQL.
# Invariant: a row that cannot be stored is refused alone, and does not hold up those after it.
# Never: commits, but for insert_run(); retries.


_LOG = logging.getLogger("penstock.request_log")

Event = tuple[str, str, str, str, str | None]
"""Time, severity, code, message, actor."""
_HEARD_IN = (("events", "at"), ("frames", "at"), ("requests", "received_at"))
"""Tables that show when a daemon was last alive, and their time columns."""


def insert_run(connection: sqlite3.Connection, run: dict[str, str | None]) -> int:
    """Insert a run; return its run_id."""
    with connection as db:
        names, marks = ", ".join(run), ", ".join(f":{name}" for name in run)
        inserted = db.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", run)
    return inserted.lastrowid or 0


def end_crashed_run(
    db: sqlite3.Connection, answered: Iterable[LogRow], cut: Iterable[LogRow]
) -> str | None:
    """Mark a run without an end as crashed, with its last sign of life, and log its requests.

    Args:
        db: in a transaction.
        answered: requests with a reply, possibly without a row.
        cut: requests that were open; rows that exist by now are skipped.

    Returns:
        A sentence for the operator; None: the last run has stopped.
    """
    answered, cut = ([row for row in rows if not _has_row(db, row.rid)] for rows in (answered, cut))
    found = db.execute(
        "SELECT run_id, started_at, boot_id, stopped_at IS NOT NULL FROM runs ORDER BY run_id DESC"
    ).fetchone()
    if found is None:  # the first run of this log: those rows are to be its own
        return None
    run_id, started_at, boot, has_stopped = found
    for row in answered:
        insert_row(db, run_id, row)
    num_rows = sum(insert_row(db, run_id, row) for row in cut)
    if has_stopped:
        return None
    heard_at = max(started_at, *(_newest(db, *where, run_id, started_at) for where in _HEARD_IN))
    db.execute(
        "UPDATE runs SET stopped_at = max(?, started_at), stop_reason = 'crash'"
        " WHERE stopped_at IS NULL",
        (heard_at,),
    )
    how = "was killed or crashed" if boot == boot_id() else "ended with the machine"
    requests = "1 request was" if num_rows == 1 else f"{num_rows} requests were"
    return f"the daemon before {how}, last heard of at {heard_at}; {requests} cut short"


def _newest(db: sqlite3.Connection, table: str, time: str, run_id: int, since: str) -> str:
    """Find the time of a run's newest row in a table, from the end; empty: no row."""
    found = db.execute(
        f"SELECT {time} FROM {table} WHERE run_id = ? AND {time} >= ? ORDER BY {time} DESC LIMIT 1",
        (run_id, since),
    ).fetchone()
    return "" if found is None else str(found[0])


def _has_row(db: sqlite3.Connection, rid: str) -> bool:
    return db.execute("SELECT 1 FROM requests WHERE rid = ?", (rid,)).fetchone() is not None


def insert_row(db: sqlite3.Connection, run_id: int, row: LogRow) -> bool:
    """Insert a request and its text, if any; False: a retry would fail, too."""
    columns = {name: _storable(getattr(row, name)) for name in row.__struct_fields__}
    prompt = columns.pop("prompt")
    columns["run_id"] = run_id
    names, marks = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    try:
        inserted = db.execute(f"INSERT INTO requests ({names}) VALUES ({marks})", columns)
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError) as error:
        _LOG.error("request %s is not logged: %s", row.rid, error)
        return False
    if prompt is not None:
        db.execute("INSERT INTO request_text VALUES (?, ?)", (inserted.lastrowid, prompt))
    return True


def update_energy(db: sqlite3.Connection, energy: RowEnergy) -> None:
    """Complete the energy of an existing row; ignore lost or deleted rows."""
    db.execute(
        "UPDATE requests SET prefill_j = ?, decode_j = ? WHERE rid = ?",
        (energy.prefill_j, energy.decode_j, energy.rid),
    )


def insert_events(db: sqlite3.Connection, run_id: int, events: Iterable[Event]) -> None:
    """Insert events in their order."""
    db.executemany(
        "INSERT INTO events (run_id, at, severity, code, message, actor) VALUES (?, ?, ?, ?, ?, ?)",
        [(run_id, *map(_storable, event)) for event in events],
    )


def boot_id() -> str | None:
    """Return the kernel's id of this boot; runs with an equal id share their uptime."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _storable(value: object) -> object:
    """Replace halves of surrogate pairs, which UTF-8 cannot store, by question marks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# Requests that have no row yet, in a file: what a daemon that is killed cannot say any more.
# Invariant: a request is in the file before anything of its reply is sent, and until the log has
# its row; that it was answered is there as soon as its reply's last bytes are on their way, while
# its row waits for others to be committed with. The file survives the daemon, not the machine: it
# is as durable as the last rows of the log.
# Never: holds a prompt's text, or waits for a disk to sync; ends the daemon because a disk is full.


MIN_REWRITE_BYTES = 1 << 20
"""Minimum size for a rewrite, once half of its lines have a row."""
CUT = "the daemon ended before the reply did"


class OpenRequests:
    """The file of open requests of one daemon; usable from any thread."""

    def __init__(self, log_path: Path) -> None:
        """Read the file of the previous daemon; begin() starts a new one."""
        self.path = log_path.with_suffix(".open")
        self.answered, self.cut = _read(self.path)
        """Rows of requests that had none yet, as their clients have seen them end."""
        self._lines: dict[str, bytes] = {}
        """Lines of requests without a row, by id."""
        self._fd = -1
        self._num_bytes = self._rewrite_at = 0
        self._is_failing = False
        self._lock = threading.Lock()

    def leave(self, rids: Iterable[str]) -> dict[str, LogRow]:
        """Keep requests open that were cut, since this daemon continues them; return their rows."""
        left = {row.rid: row for row in self.cut if row.rid in rids}
        self.cut = [row for row in self.cut if row.rid not in left]
        for rid, row in left.items():
            self._lines[rid] = _line(msgspec.structs.replace(row, finish_reason=None, error=None))
        return left

    def begin(self) -> None:
        """Start a new file: the previous daemon's requests are in the log."""
        with self._lock:
            self._rewrite()

    def add(self, row: LogRow) -> None:
        """Write an accepted request; the write takes microseconds, into the page cache."""
        self._note(row)

    def end(self, row: LogRow) -> None:
        self._note(msgspec.structs.replace(row, prompt=None))

    def _note(self, row: LogRow) -> None:
        line = _line(row)
        with self._lock:
            self._lines[row.rid] = line
            is_due = self._is_failing or self._num_bytes > self._rewrite_at
            if not (is_due and self._rewrite()):
                self._write(line)

    def settle(self, rids: Iterable[str]) -> None:
        """Forget requests that have their rows; write the lines that the disk had refused."""
        with self._lock:
            had_some = bool(self._lines)
            for rid in rids:
                self._lines.pop(rid, None)
            if self._is_failing:
                self._rewrite()
            elif had_some and not self._lines and self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
                    self._num_bytes = 0

    def close(self) -> None:
        """Remove the file, unless some of its requests could not be logged."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd, self._is_failing = -1, False
            if not self._lines:
                self.path.unlink(missing_ok=True)

    def _rewrite(self) -> bool:
        """Start a file with the requests without a row; False: the old one stays."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        lines, fd = b"".join(self._lines.values()), -1
        try:
            fd = os.open(fresh, flags, 0o600)
            _write_whole(fd, lines)
            os.replace(fresh, self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._say_failing(error)
            return False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._num_bytes, self._is_failing = fd, len(lines), False
        self._rewrite_at = max(MIN_REWRITE_BYTES, 2 * self._num_bytes)
        return True

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            return
        try:
            _write_whole(self._fd, line)
        except OSError as error:
            self._say_failing(error)
        else:
            self._num_bytes += len(line)

    def _say_failing(self, error: OSError) -> None:
        if not self._is_failing:
            what = "requests cut off by a crash now will have no row"
            _LOG.error("%s: cannot write, so that %s: %s", self.path, what, error.strerror)
        self._is_failing = True


def _write_whole(fd: int, lines: bytes) -> None:
    """Append lines; raises OSError if the disk has no room for all of them."""
    if os.write(fd, lines) < len(lines):
        os.write(fd, b"\n")  # the next line must not follow half a line
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(row: LogRow) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def _read(path: Path) -> tuple[list[LogRow], list[LogRow]]:
    """Read the rows of answered and of cut-off requests."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], []
    answered: dict[str, LogRow] = {}
    cut: dict[str, LogRow] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=LogRow)
        except NOT_JSON as error:  # torn by a full disk, or another version's
            _LOG.warning("%s:%d: an unfinished request cannot be read: %s", path, number, error)
            continue
        if row.finish_reason is not None:
            answered[row.rid] = row
            cut.pop(row.rid, None)
            continue
        # A stream's status was sent at its acceptance; other clients saw no status.
        status = row.http_status if row.stream else 500
        cut[row.rid] = msgspec.structs.replace(
            row, http_status=status, finish_reason="error", error=CUT, completion_tokens=None
        )
    return [*answered.values()], [*cut.values()]
