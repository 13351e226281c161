"""Every field of a frame is shown somewhere, or listed here as one that is not."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from appliance.observe.frame.late_frames import (
    LateFrame,
    RefusalFrame,
    SurvivedFrame,
    UnwrittenFrame,
)
from appliance.observe.frame.offload_frame import OffloadFrame
from appliance.observe.frame.protocol import (
    DraftFrame,
    FailedModelFrame,
    Frame,
    HolderFrame,
    LinkFrame,
    RankFrame,
    ResidentFrame,
    SwapsFrame,
    WayFrame,
)
from appliance.observe.frame.tier_frames import TierFrame
from tests.tui import frames
from tui.lines import text_of
from tui.panels import gauges, header, lanes, latencies, request_page, requests
from tui.view import View
from tui.widgets import overview

INTERNAL = {
    "version": "checked before anything is read",
    "seq": "a gap in it is told as frames missed",
    "queue.oldest_queued_ms": "shown in recordings that lack `first_token`",
    **{
        f"queue.first_token.{name}": "the alert names it once it is late; shown is its wait"
        for name in ("id", "client", "prompt_tokens", "limit_ms", "number")
    },
    **{
        f"queue.next_token.{name}": "the alert names it once it is late"
        for name in ("id", "client", "prompt_tokens", "waited_ms", "limit_ms", "number")
    },
    "totals.accepted": "the sum of what is shown",
    "totals.cached_tokens": "of ended requests; shown are those of all that were placed",
    "totals.reader_failures": "an event tells of each kind; the status page and /metrics count",
    "totals.reader_restarts": "likewise",
    "totals.texts": "for /metrics: no request of the console's list",
    "totals.text_tokens": "likewise",
    "totals.log_rows_lost": "an alert of the daemon when it is not 0",
    "requests.computed_tokens": "as a share while it is prefilled",
    "latency.ttft_over_usual": "an alert of the daemon when it is large",
    "devices.parent": "places a slice under its GPU",
    "workers.pid": "status and the events have it",
    "workers.attention": "status has it",
    "workers.last_step_age_ms": "an alert where it grows",
    "workers.num_prefilling": "decides which phase the limiting sentence blames",
    "links.num_bytes": "the rate is shown; the sum is for /metrics",
    "links.num_strikes": "shown until the link is down",
    "links.has_detour": "decides whether it is an alert when it is slow",
    "ssd.reason": "shown where the state is not `on`",
    "dram.reason": "as of the other",
    "weights": "what became of them at start; the status page, doctor and the log say it",
    "kv": "likewise of the pools",
    "alerts.request_id": "decides between the keys and the command",
    **{
        f"survived.{name}": "the alert tells it, and an empty table while requests are kept"
        for name in ("how", "at", "num_kept", "num_waiting")
    },
    "starved": "an alert, and the limiting sentence",
    **{
        f"unwritten.{name}": "an alert of the daemon"
        for name in ("reason", "num_requests", "folder", "would_crash_lose")
    },
    "workers.num_refused": "status names them, with the reason",
    "workers.other_pids": "status has them",
    "workers.ranks.pid": "status has it",
    "workers.ranks.cpus": "the worker's device names them",
    "workers.cpu_share": "an alert where it is small",
    "devices.kind": "decides which readings there could be",
}
"""Fields that a change of their value need not show, and why."""


def rich() -> Frame:
    """A frame in which every optional field has a value."""
    until = "2026-01-02T03:04:05.006Z"
    device = frames.DeviceFrame(
        "gpu0", "gpu", 512.0, 700.0, 61.0, 1980.0, 0.5, 61 << 30, 80 << 30, "H100", "GPU-1", None,
        4e6, "energy counter", 540.0, 2619.0, ["thermal"], 0.3, 0.4, 0.6, 1e9, 2e9, 3e9, 4e9, 79,
    )  # fmt: skip
    request = msgspec.structs.replace(
        frames.finished(14), phase="handing_off", error="gone", num_sequences=2, worker="decode",
        restored_tokens=64, cached_tokens=128, restore_ms=3.0, restore_reason="x",
        workers="prefill0,decode1,decode0", links="peer,none", changes="x", cache_miss="x",
        speculation="x", client="curl 7", waited_for="x",
    )  # fmt: skip
    queued = msgspec.structs.replace(
        request, error=None, waits_for="KV; 1 s", behind="cmpl-1", behind_tokens=9
    )
    slow = msgspec.structs.replace(request, error=None)
    frame = frames.kv_critical()
    late = LateFrame("cmpl-1", "python 9495", 3825, 7800.0, 10_000.0, 2)
    frame.queue = msgspec.structs.replace(frame.queue, first_token=late, next_token=late)
    frame.alerts[0].request_id, frame.alerts[0].action = "cmpl-9", "penstock show 9"
    frame.workers = [
        msgspec.structs.replace(
            worker,
            step_ms_p50=4.0,
            step_ms_max=9.0,
            disk_wait_ratio=0.9,
            disk_bytes_per_s=3e8,
            disk_read_bytes=7 << 30,
            ranks=[RankFrame(14, [0], 5 << 30, 0.25)],
            bound_by="computing",
        )
        for worker in frames.busy().workers
    ]
    way = WayFrame("deflected", "decode", True, False, 256, 14, 3, 2, 1.7, False)
    for pool in frame.pools:
        pool.holders = [HolderFrame("ann", 14)]
        pool.record_blocks, pool.records, pool.snapshots = 51, 4, 9
    return msgspec.structs.replace(
        frame,
        totals=msgspec.structs.replace(
            frame.totals,
            ways=[way],
            has_prefix_cache=True,
            prefix_cache_queries=1000,
            prefix_cache_hits=400,
            decode_steps=1000,
            decode_step_tokens=3000,
            drafts=[DraftFrame("own_text", [100], [90])],
            client_errors=135,
        ),
        survived=SurvivedFrame("SIGKILL", until, 8, 3),
        unwritten=UnwrittenFrame("x", 3, "/var/lib", would_crash_lose=True),
        refusals=[
            RefusalFrame("ana", "curl 7", 404, "model_not_found", "no x", 135, 27, 4.5, until)
        ],
        swaps=SwapsFrame(
            ["small"],
            "small",
            3,
            2,
            2100.0,
            [ResidentFrame("small", 5 << 20, until)],
            until,
            [FailedModelFrame("bad", "its worker died", until)],
        ),
        links=[LinkFrame("prefill", "decode", "shm", 4e11, 3.6e11, 1e9, "lost", True, 14, 2)],
        devices=[device],
        requests=[request, queued, slow],
        num_requests=3,
        ssd=TierFrame(
            "on",
            "",
            "/var/kv",
            70,
            7 << 20,
            9 << 30,
            loads=3,
            load_ms=50.0,
            limit="its disk is full",
            other_models={"m": 5 << 20},
        ),
        dram=TierFrame("on", "", "", 7, 7 << 20, 9 << 30, loads=3, load_ms=5.0),
        state="draining",
        state_reason="x",
        offload=OffloadFrame(1 << 30, 3 << 30, 1 << 29),
        trials=["up to 256 prompt tokens a step"],
    )


def shown(frame: Frame) -> str:
    """All panels and pages, at a size at which they hide nothing."""
    view = View().after(frame)
    painters = [
        lanes.prefill, lanes.handoff, lanes.decode, gauges.kv, latencies.latency, gauges.machine,
        *overview.LINED.values(),
    ]  # fmt: skip
    lines = [line for paint in painters for line in paint(view, 120, 40)]
    lines += [header.header(view, 240), header.alert_line(view, 400)]
    titles = [lanes.prefill_title(view), lanes.decode_title(view), lanes.handoff_title(view),
              gauges.kv_title(view, 40, 9), latencies.title(view, 120),
              requests.title(view, 1, 1, 1)]  # fmt: skip
    lines.append(requests.summary(view, 400))
    for request in frame.requests:
        lines.append(requests.row(request, requests.columns_for(300), is_selected=False))
        lines += request_page.detail(request, 120)
    return "\n".join([*titles, *map(text_of, lines)])


def other(value: Any) -> Any:
    """Another value of the same kind, far enough away to look different."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "2026-11-21T01:02:03.004Z" if value.endswith("Z") and "T" in value else "qqq"
    if isinstance(value, int | float):
        return type(value)(value * 1.7 + 3)
    if isinstance(value, list):
        return [other(value[0])] if value else ["qqq"]
    if isinstance(value, dict):
        return {"qqq": 1}
    raise TypeError(type(value))


def leaves(struct: msgspec.Struct, prefix: str = "") -> list[str]:
    found = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, msgspec.Struct):
            found += leaves(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def changed(path: str) -> Frame:
    """The rich frame with another value at every struct of the path."""
    frame = copy.deepcopy(rich())
    *outer, last = path.split(".")
    reached: list[Any] = [frame]
    for name in outer:
        values = [getattr(struct, name) for struct in reached]
        reached = [item for v in values for item in (v if isinstance(v, list) else [v])]
    for struct in [each for each in reached if getattr(each, last) is not None] or reached:
        value = getattr(struct, last)
        setattr(struct, last, other(value if value is not None else 7))
    return frame


@pytest.fixture(scope="module")
def unchanged() -> str:
    return shown(rich())


@pytest.mark.parametrize("path", [path for path in leaves(rich()) if path not in INTERNAL])
def test_another_value_looks_different(path, unchanged):
    assert shown(changed(path)) != unchanged


def test_the_list_of_internal_fields_names_fields_that_exist():
    assert set(INTERNAL) <= set(leaves(rich()))
