"""The caches below the pools as lines of the KV page: how full, what they earned, what went wrong.

Owns: nothing; pure.
Invariant: what has not happened is left out, but for what was stored and loaded.
Never: shows a cache that the daemon has not reported.
"""

from __future__ import annotations

from appliance.frame.protocol import Frame
from appliance.frame.tier_frame import TierFrame
from tui import format as fmt
from tui.lines import Line, Run, Tone, facts, rule


def lines(frame: Frame, width: int) -> list[Line]:
    """Of each a line on its state, and figures."""
    caches = (("DRAM CACHE", frame.dram), ("SSD CACHE", frame.ssd))
    return [line for title, tier in caches if tier for line in _lines(title, tier, width)]


def _lines(title: str, tier: TierFrame, width: int) -> list[Line]:
    if tier.state != "on":
        tone = Tone.MUTED if tier.state == "opening" else Tone.WARN
        return [rule(title, width, tier.state), [Run(tier.reason, tone)]]
    note = f"{fmt.size(tier.num_bytes)} of {fmt.size(tier.max_bytes)}"
    note += f" in {fmt.clean(tier.folder)}" if tier.folder else ""
    return [rule(title, width, note), *facts(width, _figures(tier))]


def _figures(tier: TierFrame) -> list[tuple[str, str]]:
    always = [
        ("blocks", fmt.short_count(tier.blocks)),
        ("stored", fmt.short_count(tier.stored_blocks)),
        ("loaded", fmt.short_count(tier.loaded_blocks)),
        ("tokens", fmt.short_count(tier.loaded_tokens)),
        ("reads at", f"{fmt.size(tier.read_bytes_per_s)}/s"),
    ]
    if tier.loads:
        always.append(("loads", fmt.short_count(tier.loads)))
        always.append(("took", fmt.millis_unit(tier.load_ms)))
        always.append(("computing", fmt.millis_unit(tier.compute_ms)))
        always.append(("regret", fmt.millis_unit(tier.regret_ms)))
    if "1" in tier.would_find:
        others = [f", x{n} {fmt.ratio(share)}" for n, share in tier.would_find.items() if n != "1"]
        always.append(("finds", f"{fmt.ratio(tier.would_find['1'])}{''.join(others)}"))
    seldom = (
        ("waiting", tier.waiting),
        ("declined", tier.declined_loads),
        ("late", tier.missed_deadlines),
        ("evicted", tier.evicted_blocks),
        ("expired", tier.expired_blocks),
        ("damaged", tier.damaged_blocks),
        ("not stored", tier.failed_stores),
    )
    return [*always, *((name, fmt.short_count(count)) for name, count in seldom if count)]
