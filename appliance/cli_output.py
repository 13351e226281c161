"""What the CLI shows: daemon JSON to text for people, and to documents for programs.

Owns: the layout of every table, and what may reach a terminal. Called by: cli.
Invariant: pure; nothing that came from the daemon is shown with a control character in it.
Never: prints, computes a figure that the daemon did not send, or shows None as 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DASH = "-"
_BOLD, _RED, _YELLOW, _GREEN = "1", "31", "33", "32"
_STATE_COLOURS = {"ready": _GREEN, "loading": _YELLOW, "draining": _YELLOW, "degraded": _RED}

Row = Mapping[str, Any]


def document(verb: str, content: Mapping[str, Any]) -> str:
    """One JSON document; keys are only ever added within a schema's number."""
    return json.dumps({"schema": f"penstock.{verb}/1", **content}, indent=2)


def printable(value: object) -> str:
    """Text with everything escaped that could move a cursor or reorder a line."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )


def for_terminal(text: str) -> str:
    """Completion text without what a terminal would obey: only newlines and tabs are kept."""
    return "".join(
        char for char in text if char in "\n\t" or not (char < " " or "\x7f" <= char <= "\x9f")
    )


def requests_table(frames: Iterable[Row], *, colour: bool) -> str:
    """`penstock ps`."""
    return _table(
        ("ID", "PHASE", "USER", "IN", "OUT", "MAX", "AGE", "TTFT", "TPOT", "WORKER"),
        [
            (
                frame.get("id"),
                frame.get("finish_reason") or frame.get("phase"),
                frame.get("user"),
                _count(frame.get("prompt_tokens")),
                _count(frame.get("output_tokens")),
                _count(frame.get("max_tokens")),
                _ms(frame.get("age_ms")),
                _ms(frame.get("ttft_ms")),
                _ms(frame.get("tpot_ms")),
                frame.get("worker"),
            )
            for frame in frames
        ],
        numeric=frozenset(range(3, 9)),
        colour=colour,
    )


def log_table(rows: Iterable[Row], *, colour: bool) -> str:
    """`penstock log`."""
    stages = ("queue_ms", "prefill_ms", "ttft_ms", "handoff_ms", "tpot_ms", "e2e_ms")
    return _table(
        ("RECEIVED", "ID", "USER", "IN", "OUT", *_titles(stages), "PATH", "END"),
        [
            (
                row.get("received_at"),
                row.get("rid"),
                row.get("peer_user"),
                _count(row.get("prompt_tokens")),
                _count(row.get("completion_tokens")),
                *(_ms(row.get(name)) for name in stages),
                row.get("transport"),
                row.get("finish_reason"),
            )
            for row in rows
        ],
        numeric=frozenset(range(3, 11)),
        colour=colour,
    )


def status_page(frame: Row, *, colour: bool) -> str:
    """`penstock status`: one screen, one subject a line."""
    state = printable(frame.get("state"))
    lines = [("model", _model_text(frame))]
    path = frame.get("transport")
    lines.append(("roles", f"{frame.get('roles')}" + (f", handoff by {path}" if path else "")))
    lines.append(("queue", _queue_text(frame.get("queue") or {})))
    lines += [("worker", _worker_text(worker)) for worker in frame.get("workers") or ()]
    lines += [("kv", _pool_text(pool)) for pool in frame.get("pools") or ()]
    lines.append(("latency", _latency_text(frame.get("latency") or {})))
    lines.append(("totals", _totals_text(frame.get("totals") or {})))
    lines += [("power", _device_text(device)) for device in frame.get("devices") or ()]
    shown = [f"{name:<8} {printable(text)}" for name, text in lines]
    painted = _painted(state, _STATE_COLOURS.get(state), colour)
    return "\n".join([f"state    {painted}{printable(_state_text(frame))}", *shown])


def stats_line(frame: Row) -> str:
    """`penstock run --stats`, from the request as the daemon measured it."""
    parts = [f"in {_count(frame.get('prompt_tokens'))} out {_count(frame.get('output_tokens'))}"]
    stages = ("tokenize", "queue", "prefill")
    shares = " ".join(f"{stage} {_ms(frame.get(f'{stage}_ms'))}" for stage in stages)
    parts.append(f"ttft {_ms(frame.get('ttft_ms'))} ({shares})")
    later = ("handoff", "decode_wait", "decode", "first_itl", "tpot", "e2e")
    reached = [name for name in later if frame.get(f"{name}_ms") is not None]
    parts += [f"{name} {_ms(frame[f'{name}_ms'])}" for name in reached]
    return "  ".join([*parts, f"id {printable(frame.get('id'))}"])


def _state_text(frame: Row) -> str:
    reason = frame.get("state_reason")
    about = f" ({reason})" if reason and reason != frame.get("state") else ""
    uptime_s = frame.get("uptime_s")
    up = _ms(None if uptime_s is None else uptime_s * 1000)
    return f"{about}, up {up}, pid {_count(frame.get('pid'))}"


def _model_text(frame: Row) -> str:
    note = frame.get("model_note")
    about = f" ({note})" if note else ""
    return (
        f"{frame.get('model')}{about}, {frame.get('dtype')},"
        f" up to {_count(frame.get('max_model_len'))} tokens"
    )


def _queue_text(queue: Row) -> str:
    phases = ("queued", "prefilling", "handing_off", "decoding")
    shown = ", ".join(f"{_count(queue.get(p))} {p.replace('_', ' ')}" for p in phases)
    oldest = queue.get("oldest_queued_ms")
    waiting = "" if oldest is None else f", the oldest for {_ms(oldest)}"
    return f"{shown} (at most {_count(queue.get('max_queued'))} queued{waiting})"


def _worker_text(worker: Row) -> str:
    return (
        f"{worker.get('name')} {worker.get('state')} on"
        f" {worker.get('device')}, pid {_count(worker.get('pid'))},"
        f" {_count(worker.get('num_sequences'))} sequences,"
        f" prefill {_rate(worker.get('prefill_tokens_per_s'))},"
        f" decode {_rate(worker.get('decode_tokens_per_s'))},"
        f" {_count(worker.get('num_restarts'))} restarts"
    )


def _pool_text(pool: Row) -> str:
    states = ("active", "reserved", "cached", "draining", "quarantined")
    shown = ", ".join(f"{_count(pool.get(state))} {state}" for state in states if pool.get(state))
    return (
        f"{pool.get('name')}: {_count(pool.get('free'))} of"
        f" {_count(pool.get('num_blocks'))} blocks free"
        f" ({_bytes(pool.get('block_bytes'))} each)" + (f", {shown}" if shown else "")
    )


def _latency_text(latency: Row) -> str:
    if not latency.get("num_requests"):
        return f"no request finished in the last {_count(latency.get('window_s'))} s"
    return (
        f"ttft p50 {_ms(latency.get('ttft_ms_p50'))} p95 {_ms(latency.get('ttft_ms_p95'))},"
        f" itl p50 {_ms(latency.get('itl_ms_p50'))} p95 {_ms(latency.get('itl_ms_p95'))}"
        f" max {_ms(latency.get('itl_ms_max'))},"
        f" handoff p50 {_ms(latency.get('handoff_ms_p50'))}"
        f" ({latency['num_requests']} requests in {_count(latency.get('window_s'))} s)"
    )


def _totals_text(totals: Row) -> str:
    names = ("accepted", "finished", "refused", "aborted", "failed")
    counts = ", ".join(f"{_count(totals.get(name))} {name}" for name in names)
    return (
        f"{counts}; {_count(totals.get('prompt_tokens'))} tokens in,"
        f" {_count(totals.get('output_tokens'))} out"
    )


def _device_text(device: Row) -> str:
    power_w = device.get("power_w")
    return f"{device.get('name')} {_DASH if power_w is None else f'{power_w:.1f} W'}"


def _titles(names: Iterable[str]) -> list[str]:
    return [name.removesuffix("_ms").upper() for name in names]


def _table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numeric: frozenset[int],
    colour: bool,
) -> str:
    """Columns two spaces apart, as wide as their longest cell; numbers to the right."""
    cells = [[_DASH if cell is None else printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([_painted(line(headers), _BOLD, colour), *map(line, cells)])


def _painted(text: str, code: str | None, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text


def _count(value: Any) -> str:
    return _DASH if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _rate(value: float | None) -> str:
    return _DASH if value is None else f"{value:.0f} tok/s"


def _ms(value: float | None) -> str:
    """A duration to three digits: 1.24ms, 231ms, 4.2s, 3m12s, 2h05m."""
    if value is None:
        return _DASH
    if value < 999.5:
        return f"{value:.0f}ms" if value >= 99.95 else f"{value:.3g}ms"
    seconds = value / 1000
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _bytes(value: float | None) -> str:
    if value is None:
        return _DASH
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
