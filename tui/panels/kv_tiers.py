"""Draw the caches below the pools as lines of the KV page.

Invariant: figures that are 0 are left out, except for stored and loaded blocks.
"""

from __future__ import annotations

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame
from appliance.observe.frame.tier_frames import TierFrame
from tui.lines import (
    Line,
    Run,
    Tone,
    clean,
    facts,
    rule,
)


def lines(frame: Frame, width: int) -> list[Line]:
    """Draw a line on each cache's state, and its figures."""
    caches = (("DRAM CACHE", frame.dram), ("SSD CACHE", frame.ssd))
    found = [line for title, tier in caches if tier for line in _lines(title, tier, width)]
    return [*found, *_weights(frame, width)]


def _weights(frame: Frame, width: int) -> list[Line]:
    """Draw the weights that steps read from disk, and each worker's waits for them."""
    offload = frame.offload
    if offload is None:
        return []
    note = f"{fig.size(offload.disk_bytes)} a step of {fig.size(offload.weights_bytes)}"
    figures = [("in memory", fig.size(offload.resident_bytes))]
    for worker in frame.workers:
        rate, whole = fig.bytes_per_s(worker.disk_bytes_per_s), fig.size(worker.disk_read_bytes)
        waits = f"waits {fig.ratio(worker.disk_wait_ratio)}, reads {rate}, {whole} so far"
        waits += f", {worker.bound_by}" if worker.bound_by else ""
        figures.append((worker.name, waits))
    return [rule("WEIGHTS ON DISK", width, note), *facts(width, figures)]


def _lines(title: str, tier: TierFrame, width: int) -> list[Line]:
    if tier.state != "on":
        tone = Tone.MUTED if tier.state == "opening" else Tone.WARN
        return [rule(title, width, tier.state), [Run(tier.reason, tone)]]
    note = f"{fig.size(tier.num_bytes)} of {fig.size(tier.max_bytes)}"
    note += f" in {clean(tier.folder)}" if tier.folder else ""
    limit = [[Run(tier.limit, Tone.WARN)]] if tier.limit else []
    return [rule(title, width, note), *limit, *facts(width, _figures(tier))]


def _figures(tier: TierFrame) -> list[tuple[str, str]]:
    always = [
        ("blocks", fig.short_count(tier.blocks)),
        ("stored", fig.short_count(tier.stored_blocks)),
        ("loaded", fig.short_count(tier.loaded_blocks)),
        ("tokens", fig.short_count(tier.loaded_tokens)),
        ("reads at", fig.bytes_per_s(tier.read_bytes_per_s)),
    ]
    for model, num_bytes in tier.other_models.items():
        always.append((f"kept for {clean(model)}", fig.size(num_bytes)))
    if tier.loads:
        always.append(("loads", fig.short_count(tier.loads)))
        always.append(("took", fig.duration(tier.load_ms)))
        always.append(("recomputing would take", fig.duration(tier.compute_ms)))
        if tier.regret_ms:
            always.append(("time lost", fig.duration(tier.regret_ms)))
    seldom = (
        ("waiting", tier.waiting),
        ("declined", tier.declined_loads),
        ("late", tier.missed_deadlines),
        ("evicted", tier.evicted_blocks),
        ("expired", tier.expired_blocks),
        ("damaged", tier.damaged_blocks),
        ("not stored", tier.failed_stores),
    )
    return [*always, *((name, fig.short_count(count)) for name, count in seldom if count)]
