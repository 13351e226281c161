"""The SSD cache as lines of the KV page: how full it is, what it has earned, what went wrong.

Owns: nothing; pure.
Invariant: what has not happened is left out, but for what was stored and loaded.
Never: shows a cache that the daemon has not reported.
"""

from __future__ import annotations

from appliance.protocol import Frame
from appliance.ssd_frame import SsdFrame
from tui import format as fmt
from tui.lines import Line, Span, Tone, facts, rule


def lines(frame: Frame, width: int) -> list[Line]:
    """A line on its state, and figures."""
    ssd = frame.ssd
    if ssd is None:
        return []
    if ssd.state != "on":
        tone = Tone.MUTED if ssd.state == "opening" else Tone.WARN
        return [rule("SSD CACHE", width, ssd.state), [Span(ssd.reason, tone)]]
    note = f"{fmt.size(ssd.num_bytes)} of {fmt.size(ssd.max_bytes)} in {fmt.clean(ssd.folder)}"
    return [rule("SSD CACHE", width, note), *facts(width, _figures(ssd))]


def _figures(ssd: SsdFrame) -> list[tuple[str, str]]:
    always = [
        ("blocks", fmt.short_count(ssd.blocks)),
        ("stored", fmt.short_count(ssd.stored_blocks)),
        ("loaded", fmt.short_count(ssd.loaded_blocks)),
        ("tokens", fmt.short_count(ssd.loaded_tokens)),
        ("reads at", f"{fmt.size(ssd.read_bytes_per_s)}/s"),
    ]
    if ssd.loads:
        always.append(("loads", fmt.short_count(ssd.loads)))
        always.append(("took", fmt.millis_unit(ssd.load_ms)))
        always.append(("computing", fmt.millis_unit(ssd.compute_ms)))
        always.append(("regret", fmt.millis_unit(ssd.regret_ms)))
    if "1" in ssd.would_find:
        others = [f"x{ratio} {fmt.ratio(v)}" for ratio, v in ssd.would_find.items() if ratio != "1"]
        always.append(("finds", f"{fmt.ratio(ssd.would_find['1'])} ({', '.join(others)})"))
    seldom = (
        ("waiting", ssd.waiting),
        ("declined", ssd.declined_loads),
        ("late", ssd.missed_deadlines),
        ("evicted", ssd.evicted_blocks),
        ("expired", ssd.expired_blocks),
        ("damaged", ssd.damaged_blocks),
        ("not stored", ssd.failed_stores),
    )
    return [*always, *((name, fmt.short_count(count)) for name, count in seldom if count)]
