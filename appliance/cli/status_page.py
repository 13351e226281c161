"""Write the daemon's state as a page or a line of text."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.cli.fact_pages import roles_text
from appliance.cli.tables import Row, folded, painted
from appliance.observe.frame.figures import (
    bytes_per_s,
    clock,
    count,
    duration,
    fine_ratio,
    joules,
    plain,
    quantiles,
    rate,
    seconds,
    size,
    state_words,
    things,
    times,
    tokens_per_s,
    watts,
)
from appliance.observe.frame.request_facts import guesses
from engine.printable import printable

_RED, _YELLOW, _GREEN = "31", "33", "32"
_SEVERITY_COLOURS = {"error": _RED, "warning": _YELLOW}
_MAX_OWNERS = 3
_TEXT_AT = 9
"""The column in which texts begin, after their subjects."""
_STATE_COLOURS = {"ready": _GREEN, "loading": _YELLOW, "draining": _YELLOW, "degraded": _RED}


def page(frame: Row, *, colour: bool, room: int | None = None) -> str:
    """Write the page of `penstock status`, one subject a line, wrapped at `room` columns."""
    state = printable(frame.get("state"))
    lines = [("model", _model_text(frame))]
    if frame.get("weights"):
        lines += _note_lines("weights", "weights are ", frame["weights"])
    if swaps := frame.get("swaps"):
        lines.append(("swaps", _swaps_text(swaps)))
    lines.append(("roles", roles_text(frame)))
    lines.append(("queue", _queue_text(frame.get("queue") or {})))
    if frame.get("limit"):
        lines.append(("limit", str(frame["limit"])))
    lines += [("worker", _worker_text(worker)) for worker in frame.get("workers") or ()]
    if frame.get("offload"):
        lines.append(("disk", _offload_text(frame["offload"], frame.get("workers") or ())))
    lines += [("tuning", trial) for trial in frame.get("trials") or ()]
    if frame.get("kv"):
        lines += _note_lines("kv", "KV is ", frame["kv"])
    lines += [("pool", _pool_text(pool)) for pool in frame.get("pools") or ()]
    lines += [(name, _tier_text(frame[name])) for name in ("dram", "ssd") if frame.get(name)]
    if (frame.get("handoff") or {}).get("transport"):
        lines.append(("handoff", _handoff_text(frame["handoff"])))
    lines.append(("latency", _latency_text(frame.get("latency") or {})))
    if slo := _slo_text(frame):
        lines.append(("slo", slo))
    totals = frame.get("totals") or {}
    lines.append(("totals", _totals_text(totals)))
    if today := frame.get("today"):
        lines.append(("today", _today_text(today)))
    if totals.get("reader_failures") or totals.get("reader_restarts"):
        lines.append(("reader", _reader_text(totals)))
    if totals.get("drafts"):
        lines.append(("guesses", "; ".join(guesses(totals))))
    lines += [("power", _device_text(device)) for device in frame.get("devices") or ()]
    if frame.get("energy"):
        lines.append(("energy", _energy_text(frame["energy"])))
    lines += [("refused", _refused_text(each)) for each in frame.get("refusals") or ()]
    shown = [folded(f"{name:<8} {printable(text)}", room, _TEXT_AT) for name, text in lines]
    head = painted(state, _STATE_COLOURS.get(state), colour)
    alerts = [_alert_line(each, colour, room) for each in frame.get("alerts") or ()]
    return "\n".join([f"state    {head}{printable(_state_text(frame))}", *alerts, *shown])


def line(frame: Row) -> str:
    """Write one frame as a line, for `penstock status --watch` without a screen."""
    queue, latency = frame.get("queue") or {}, frame.get("latency") or {}
    parts = [f"{frame.get('at')} {frame.get('state')}", _phases_text(queue)]
    for pool in frame.get("pools") or ():
        free, whole = count(pool.get("free")), count(pool.get("num_blocks"))
        parts.append(f"{pool.get('name')} {free} of {whole} free")
    parts += [quantiles(latency, name, "p50", "p95") for name in ("ttft", "itl")]
    parts += [f"{a.get('severity')} {a.get('code')}" for a in frame.get("alerts") or ()]
    return printable("  ".join(parts))


def _note_lines(name: str, doubled: str, note: object) -> list[tuple[str, str]]:
    """Split a note of the start into lines, without the words that repeat its subject."""
    first, *others = str(note).removeprefix(doubled).split("; ")
    return [(name, first), *(("", each) for each in others)]


def _state_text(frame: Row) -> str:
    reason = state_words(frame.get("state_reason"))
    about = f" ({reason})" if reason and reason != frame.get("state") else ""
    return f"{about}, up {seconds(frame.get('uptime_s'))}, pid {plain(frame.get('pid'))}"


def _alert_line(alert: Row, colour: bool, room: int | None) -> str:
    severity = printable(alert.get("severity"))
    head = painted(severity, _SEVERITY_COLOURS.get(severity), colour)
    rest = f"{alert.get('code')}: {alert.get('message')} (since {alert.get('since')})"
    rest += f"; run `{alert['action']}`" if alert.get("action") else ""
    line = folded(f"{severity:<8} {printable(rest)}", room, _TEXT_AT)
    return head + line[len(severity) :]


def _model_text(frame: Row) -> str:
    note = frame.get("model_note")
    about = f" ({note})" if note else ""
    return (
        f"{frame.get('model')}{about}, {frame.get('dtype')},"
        f" up to {count(frame.get('max_model_len'))} tokens"
    )


def _resident_text(swaps: Row) -> str:
    """Name the loaded models besides the served one: `; loaded: small 1.2 GiB until 14:05:00`."""
    loaded = [
        f"{printable(each['model'])} {size(each['num_bytes'])}"
        + (f" until {clock(each['expires_at'])}" if each.get("expires_at") else "")
        for each in swaps.get("resident") or ()
    ]
    return f"; loaded: {', '.join(loaded)}" if loaded else ""


def _failed_text(swaps: Row) -> str:
    """Name the models that failed to load: `; failed: small, not tried until 14:05:00: it ...`."""
    return "".join(
        f"; failed: {printable(each['model'])}, not tried until {clock(each['retry_at'])}:"
        f" {printable(each['reason'])}"
        for each in swaps.get("failed") or ()
    )


def _swaps_text(swaps: Row) -> str:
    """Describe the swaps: `to small now, 3 wait; 2 swaps, the last in 2.1s; knows small`."""
    now = f"to {swaps['next']} now, " if swaps.get("next") else ""
    last = swaps.get("last_swap_ms")
    took = "" if last is None else f", the last in {duration(last)}"
    return (
        f"{now}{count(swaps.get('num_waiting'))} wait for another model;"
        f" {things(swaps.get('num_swaps'), 'swap')}{took};"
        f" knows {', '.join(swaps.get('others') or ())} too{_resident_text(swaps)}"
        f"{_failed_text(swaps)}"
    )


def _queue_text(queue: Row) -> str:
    oldest = (queue.get("first_token") or {}).get("waited_ms", queue.get("oldest_queued_ms"))
    waiting = "" if oldest is None else f", the oldest for {duration(oldest)}"
    return f"{_phases_text(queue)} (at most {count(queue.get('max_queued'))} queued{waiting})"


def _phases_text(queue: Row) -> str:
    phases = ("queued", "prefilling", "handing_off", "paused", "decoding")
    return ", ".join(f"{count(queue.get(p))} {p.replace('_', ' ')}" for p in phases)


def _worker_text(worker: Row) -> str:
    return (
        f"{worker.get('name')} {worker.get('state')} on"
        f" {worker.get('device')}{_lent_text(worker)}, pid {_pids(worker)},"
        f" attention {plain(worker.get('attention'))},"
        f" {things(worker.get('num_sequences'), 'sequence')},"
        f" prefill {tokens_per_s(worker.get('prefill_tokens_per_s'))},"
        f" decode {tokens_per_s(worker.get('decode_tokens_per_s'))},"
        f" {things(worker.get('num_restarts'), 'restart')}"
        f"{_ranks_text(worker)}"
    )


def _offload_text(offload: Row, workers: Iterable[Row]) -> str:
    """Say how many bytes of weights steps read from disk, and how workers wait for them."""
    disk, whole = size(offload.get("disk_bytes")), size(offload.get("weights_bytes"))
    waits = "".join(
        f"; {printable(each.get('name'))} waits {fine_ratio(each.get('disk_wait_ratio'))} of its"
        f" time, reads {bytes_per_s(each.get('disk_bytes_per_s'))}"
        for each in workers
    )
    held = size(offload.get("resident_bytes"))
    return f"each step reads {disk} of {whole} of weights, {held} are in memory{waits}"


def _ranks_text(worker: Row) -> str:
    """Say what each process of a group holds and waits, and what bounds the worker's steps."""
    each = (
        f"; process {rank} holds {size(process.get('rss_bytes'))}, waits"
        f" {fine_ratio(process.get('wait_ratio'))} of its time"
        for rank, process in enumerate(worker.get("ranks") or ())
    )
    bound = worker.get("bound_by")
    return "".join((*each, f"; steps are bound by {printable(bound)}" if bound else ""))


def _pids(worker: Row) -> str:
    """Name its processes, the first before a group's others."""
    return "+".join(plain(pid) for pid in (worker.get("pid"), *(worker.get("other_pids") or ())))


def _lent_text(worker: Row) -> str:
    """Say so where a worker computes on other cores than its own."""
    own, used = set(worker.get("cpus") or ()), set(worker.get("cpus_used") or ())
    if worker.get("state") != "ready" or "cpus_used" not in worker or own == used:
        return ""
    borrowed = ", ".join(map(str, sorted(used - own)))
    return f" (also using cpu {borrowed})" if borrowed else " (idle; cores lent)"


def _pool_text(pool: Row) -> str:
    states = ("active", "reserved", "draining", "cached")
    shown = ", ".join(f"{count(pool.get(state))} {state}" for state in states if pool.get(state))
    owners = (pool.get("owners") or ())[:_MAX_OWNERS]
    held = ", ".join(f"{owner.get('user')} {count(owner.get('num_blocks'))}" for owner in owners)
    snapshots = things(pool.get("snapshots"), "snapshot")
    has_states = bool(pool.get("record_blocks"))
    return (
        f"{pool.get('name')}: {count(pool.get('free'))} of"
        f" {count(pool.get('num_blocks'))} blocks free"
        f" ({size(pool.get('block_bytes'))} each)"
        + (f", {shown}" if shown else "")
        + (f"; states: {count(pool.get('records'))} running, {snapshots}" if has_states else "")
        + (f"; held by {held}" if held else "")
    )


def _reader_text(totals: Row) -> str:
    """Say how often the process that reads templates and grammars failed, and at what."""
    failures = (totals.get("reader_failures") or {}).items()
    parts = [things(totals.get("reader_restarts"), "restart")]
    parts += [f"{count(number)} given up ({why})" for why, number in failures]
    return ", ".join(parts)


def _handoff_text(handoff: Row) -> str:
    probed = handoff.get("probe_bytes_per_s")
    failed = handoff.get("num_failed")
    return (
        f"{handoff.get('transport')}, {count(handoff.get('num_in_flight'))} on the way,"
        f" {rate(handoff.get('handoffs_per_s'))}/s, {size(handoff.get('bytes_per_s'))}/s"
        + (f" (probed at {size(probed)}/s)" if probed is not None else "")
        + (f", {count(failed)} failed" if failed else "")
    )


def _latency_text(latency: Row) -> str:
    if not latency.get("num_requests"):
        return f"no request finished in the last {count(latency.get('window_s'))} s"
    return (
        f"{quantiles(latency, 'ttft', 'p50', 'p95')},"
        f" {quantiles(latency, 'itl', 'p50', 'p95', 'max')},"
        f" {quantiles(latency, 'handoff', 'p50')}"
        f" ({count(latency['num_requests'])} finished in {count(latency.get('window_s'))} s)"
    )


def _slo_text(frame: Row) -> str:
    """Show the share of requests within each target."""
    latency = frame.get("latency") or {}
    named = (
        ("ttft", latency.get("ttft_slo_ratio"), frame.get("slo_ttft_ms")),
        ("itl", latency.get("itl_slo_ratio"), frame.get("slo_itl_ms")),
    )
    return ", ".join(
        f"{name} {fine_ratio(in_time)} within {duration(target_ms)}"
        for name, in_time, target_ms in named
        if target_ms is not None
    )


def _totals_text(totals: Row) -> str:
    names = ("accepted", "finished", "refused", "aborted", "failed")
    counts = ", ".join(f"{count(totals.get(name))} {name}" for name in names)
    if totals.get("client_errors"):
        counts += f", {count(totals['client_errors'])} client errors"
    return (
        f"{counts}; {count(totals.get('prompt_tokens'))} tokens in,"
        f" {count(totals.get('output_tokens'))} out"
    )


def _today_text(today: Row) -> str:
    """Sum up the requests that ended since midnight, also under daemons before this one."""
    failed = f", {count(today['failed'])} failed" if today.get("failed") else ""
    return (
        f"{things(today.get('requests'), 'request')}{failed} since {clock(today.get('since'))};"
        f" {count(today.get('prompt_tokens'))} tokens in, {count(today.get('output_tokens'))} out"
    )


def _refused_text(refusal: Row) -> str:
    """Describe one caller's refusals: `404, 135,381 times, 27,000 in the last minute: ...`."""
    who = refusal.get("client") or refusal.get("user")
    how_often = times(refusal.get("number") or 0)
    return (
        f"{refusal.get('status')} {refusal.get('code')} to {who}, {how_often},"
        f" {count(refusal.get('last_minute'))} in the last minute: {refusal.get('message')}"
    )


def _device_text(device: Row) -> str:
    return f"{device.get('name')} {watts(device.get('power_w'))}"


def _energy_text(energy: Row) -> str:
    if energy.get("total_j") is None:
        return str(energy.get("method"))
    parts = ("prefill", "decode", "unattributed")
    shares = " + ".join(f"{part} {joules(energy.get(f'{part}_j'))}" for part in parts)
    per_token = ", ".join(
        f"{phase} {joules(energy.get(f'{phase}_j_per_token'))}" for phase in ("prefill", "decode")
    )
    return (
        f"{joules(energy['total_j'])} = {shares}; a token: {per_token},"
        f" {watts(energy.get('power_w'))}"
        f" in {count(energy.get('window_s'))} s ({energy.get('method')})"
    )


def _tier_text(tier: Row) -> str:
    """Say how full the cache is and how it has served, e.g. `1.2 GiB of 20.0 GiB in 96 blocks`."""
    if tier.get("state") != "on":
        state = "being opened" if tier.get("state") == "opening" else tier.get("state")
        return f"{state}: {tier['reason']}" if tier.get("reason") else str(state)
    text = (
        f"{size(tier.get('num_bytes'))} of {size(tier.get('max_bytes'))} in"
        f" {things(tier.get('blocks'), 'block')}; since start"
        f" {count(tier.get('stored_blocks'))} stored, {count(tier.get('loaded_blocks'))} loaded"
    )
    if tier.get("loads"):
        text += f", time lost versus recomputing {duration(tier.get('regret_ms'))}"
    if limit := tier.get("limit"):
        text += f"; {limit}"
    if others := tier.get("other_models"):
        kept = (f"{printable(name)} {size(held)}" for name, held in others.items())
        text += f"; of other models {', '.join(kept)}"
    return text
