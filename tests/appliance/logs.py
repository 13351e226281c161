"""Requests, rows and log files, for tests of the log."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from appliance.daemon.requests.request import Peer, Request
from appliance.daemon.requests.row import LogRow
from appliance.observe.log.retention import RetentionLimits
from appliance.observe.log.writer import RequestLog
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams

US = 1_000


def sequence(index: int = 0, *, finished_us: int = 30_000, reason: str = "length") -> Sequence:
    stamps = Stamps(
        7_000_000,
        tokenized_ns=7_000_000 + 1_000 * US,
        started_ns=7_000_000 + 3_000 * US,
        first_token_ns=7_000_000 + 10_000 * US,
        attached_ns=7_000_000 + 11_000 * US,
        decode_started_ns=7_000_000 + 12_000 * US,
        second_token_ns=7_000_000 + 14_000 * US,
        last_token_ns=7_000_000 + 28_000 * US,
        finished_ns=7_000_000 + finished_us * US,
    )
    return Sequence(
        seq_id=index,
        request_id="cmpl-1",
        index=index,
        prompt_token_ids=[1, 2, 3],
        spec=RunSpec(SamplingParams(max_tokens=10, seed=5, temperature=0.0)),
        stamps=stamps,
        output_token_ids=[4] * 10,
        finish_reason=FinishReason(reason),
        handoff_blocks=2,
        handoff_bytes=64,
        transport="shm",
    )


def request(rid: str = "cmpl-1", *sequences: Sequence, text: str | None = "secret") -> Request:
    return Request(
        request_id=rid,
        endpoint="/v1/completions",
        model="tiny",
        peer=Peer(uid=1000, gid=100, pid=42, user="ann"),
        is_stream=True,
        received_at="2026-01-02T03:04:05.678Z",
        sequences=list(sequences) or [sequence()],
        prompt_text=text,
    )


def row(rid: str, **columns: Any) -> LogRow:
    return msgspec.structs.replace(LogRow.from_request(request(rid)), **columns)


def start(path: Path, limits: RetentionLimits | None = None) -> RequestLog:
    log = RequestLog(path, limits)
    log.start_run(version="1", model="tiny", dtype="float32", roles="static", transport="alias")
    return log


def write(path: Path, *rows: LogRow) -> None:
    """A log that a daemon has left behind."""
    log = start(path)
    for one in rows:
        log.record(one)
    assert log.close()


DAYS = tuple(f"2026-01-0{day}T12:00:00.000Z" for day in range(1, 6))


def write_five_days(folder: Path) -> Path:
    """Write five requests, a day apart: two of bob's key, one refused, one aborted, one slow."""
    path = folder / "requests.db"
    write(
        path,
        row("a", received_at=DAYS[0]),
        row("b", received_at=DAYS[1], peer_user=None, key_name="bob", model="other"),
        row("c", received_at=DAYS[2], peer_user=None, key_name="bob", http_status=500),
        row("d", received_at=DAYS[3], finish_reason="abort", t_decode_started_us=None),
        row("e", received_at=DAYS[4], t_first_token_us=600_000, peer_user=None),
    )
    return path


def query(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def rids(rows: list[dict[str, object]]) -> list[object]:
    return [found["id"] for found in rows]


def run_python(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
