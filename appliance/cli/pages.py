"""The pages that are not lists: the daemon's state, a reply's timings, who one is.

Owns: their wording. Called by: the verbs, and reply. Invariant: pure; one subject a line.
Never: computes a figure that the daemon did not send.
"""

from __future__ import annotations

from appliance.cli.tables import Row, flat, painted
from appliance.cli.text import DASH, count, joules, ms, printable, size, things, tokens_per_s, word

_RED, _YELLOW, _GREEN = "31", "33", "32"
_STATE_COLOURS = {"ready": _GREEN, "loading": _YELLOW, "draining": _YELLOW, "degraded": _RED}


def status_page(frame: Row, *, colour: bool) -> str:
    """`penstock status`: one screen, one subject a line."""
    state = printable(frame.get("state"))
    lines = [("model", _model_text(frame))]
    lines.append(("roles", roles_text(frame)))
    lines.append(("queue", _queue_text(frame.get("queue") or {})))
    lines += [("worker", _worker_text(worker)) for worker in frame.get("workers") or ()]
    lines += [("kv", _pool_text(pool)) for pool in frame.get("pools") or ()]
    lines.append(("latency", _latency_text(frame.get("latency") or {})))
    lines.append(("totals", _totals_text(frame.get("totals") or {})))
    lines += [("power", _device_text(device)) for device in frame.get("devices") or ()]
    if frame.get("energy"):
        lines.append(("energy", _energy_text(frame["energy"])))
    shown = [f"{name:<8} {printable(text)}" for name, text in lines]
    head = painted(state, _STATE_COLOURS.get(state), colour)
    return "\n".join([f"state    {head}{printable(_state_text(frame))}", *shown])


def stats_line(frame: Row) -> str:
    """`penstock run --stats`, from the request as the daemon measured it."""
    parts = [f"in {count(frame.get('prompt_tokens'))} out {count(frame.get('output_tokens'))}"]
    stages = ("tokenize", "queue", "prefill")
    shares = " ".join(f"{stage} {ms(frame.get(f'{stage}_ms'))}" for stage in stages)
    parts.append(f"ttft {ms(frame.get('ttft_ms'))} ({shares})")
    later = ("handoff", "decode_wait", "decode", "first_itl", "tpot", "e2e")
    reached = [name for name in later if frame.get(f"{name}_ms") is not None]
    parts += [f"{name} {ms(frame[f'{name}_ms'])}" for name in reached]
    return "  ".join([*parts, f"id {printable(frame.get('id'))}"])


def facts(content: Row) -> str:
    """Names and values, one a line."""
    named = {name: word(value) for name, value in flat(content).items()}
    width = max(map(len, named), default=0)
    return "\n".join(f"{printable(name):<{width}}  {value}" for name, value in named.items())


def _state_text(frame: Row) -> str:
    reason = frame.get("state_reason")
    about = f" ({reason})" if reason and reason != frame.get("state") else ""
    uptime_s = frame.get("uptime_s")
    up = ms(None if uptime_s is None else uptime_s * 1000)
    return f"{about}, up {up}, pid {count(frame.get('pid'))}"


def _model_text(frame: Row) -> str:
    note = frame.get("model_note")
    about = f" ({note})" if note else ""
    return (
        f"{frame.get('model')}{about}, {frame.get('dtype')},"
        f" up to {count(frame.get('max_model_len'))} tokens"
    )


def _queue_text(queue: Row) -> str:
    phases = ("queued", "prefilling", "handing_off", "decoding")
    shown = ", ".join(f"{count(queue.get(p))} {p.replace('_', ' ')}" for p in phases)
    oldest = queue.get("oldest_queued_ms")
    waiting = "" if oldest is None else f", the oldest for {ms(oldest)}"
    return f"{shown} (at most {count(queue.get('max_queued'))} queued{waiting})"


def _worker_text(worker: Row) -> str:
    return (
        f"{worker.get('name')} {worker.get('state')} on"
        f" {worker.get('device')}{_lent_text(worker)}, pid {count(worker.get('pid'))},"
        f" {things(worker.get('num_sequences'), 'sequence')},"
        f" prefill {tokens_per_s(worker.get('prefill_tokens_per_s'))},"
        f" decode {tokens_per_s(worker.get('decode_tokens_per_s'))},"
        f" {things(worker.get('num_restarts'), 'restart')}"
    )


def roles_text(frame: Row) -> str:
    """What the workers are for, and the targets that somebody has set."""
    path = frame.get("transport")
    named = (("ttft", frame.get("slo_ttft_ms")), ("gaps", frame.get("slo_itl_ms")))
    targets = [f"{name} {ms(value)}" for name, value in named if value is not None]
    return (
        f"{frame.get('roles')}"
        + (f", handoff by {path}" if path else "")
        + (f", targets {' and '.join(targets)}" if targets else "")
    )


def _lent_text(worker: Row) -> str:
    """Where the cores that it computes on are not its own."""
    own, used = set(worker.get("cpus") or ()), set(worker.get("cpus_used") or ())
    if worker.get("state") != "ready" or "cpus_used" not in worker or own == used:
        return ""
    borrowed = ", ".join(map(str, sorted(used - own)))
    return f" (with cpu {borrowed} on loan)" if borrowed else " (lent out, parked)"


def _pool_text(pool: Row) -> str:
    states = ("active", "reserved", "cached", "draining", "quarantined")
    shown = ", ".join(f"{count(pool.get(state))} {state}" for state in states if pool.get(state))
    return (
        f"{pool.get('name')}: {count(pool.get('free'))} of"
        f" {count(pool.get('num_blocks'))} blocks free"
        f" ({size(pool.get('block_bytes'))} each)" + (f", {shown}" if shown else "")
    )


def _latency_text(latency: Row) -> str:
    if not latency.get("num_requests"):
        return f"no request finished in the last {count(latency.get('window_s'))} s"
    return (
        f"ttft p50 {ms(latency.get('ttft_ms_p50'))} p95 {ms(latency.get('ttft_ms_p95'))},"
        f" itl p50 {ms(latency.get('itl_ms_p50'))} p95 {ms(latency.get('itl_ms_p95'))}"
        f" max {ms(latency.get('itl_ms_max'))},"
        f" handoff p50 {ms(latency.get('handoff_ms_p50'))}"
        f" ({things(latency['num_requests'], 'request')} in {count(latency.get('window_s'))} s)"
    )


def _totals_text(totals: Row) -> str:
    names = ("accepted", "finished", "refused", "aborted", "failed")
    counts = ", ".join(f"{count(totals.get(name))} {name}" for name in names)
    return (
        f"{counts}; {count(totals.get('prompt_tokens'))} tokens in,"
        f" {count(totals.get('output_tokens'))} out"
    )


def _device_text(device: Row) -> str:
    power_w = device.get("power_w")
    return f"{device.get('name')} {DASH if power_w is None else f'{power_w:.1f} W'}"


def _energy_text(energy: Row) -> str:
    """The account and how it was made; or that there is none."""
    if energy.get("total_j") is None:
        return f"{energy.get('method')}"
    parts = ("prefill", "decode", "unattributed")
    shares = " + ".join(f"{part} {joules(energy.get(f'{part}_j'))}" for part in parts)
    per_token = ", ".join(
        f"{phase} {joules(energy.get(f'{phase}_j_per_token'))}" for phase in ("prefill", "decode")
    )
    return (
        f"{joules(energy['total_j'])} = {shares}; a token: {per_token}"
        f" in {count(energy.get('window_s'))} s ({energy.get('method')})"
    )
