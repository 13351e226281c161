"""What stands out on the console, what is marked where, and how graphs are scaled."""

from __future__ import annotations

from dataclasses import replace

from tests.tui import frames
from tui.lines import Tone, text_of
from tui.panels import gauges, header, kv, lanes, latencies, requests
from tui.view import View


def tones(line, *words):
    return [run.tone for run in line if run.text.strip() in words]


def test_a_latency_beyond_its_target_stands_out_and_all_of_them_under_an_alert():
    frame = frames.busy()  # of 500 ms
    ttft = latencies.latency(View().after(frame), 80, 6)[1]
    assert tones(ttft, "204", "655") == [Tone.STRONG, Tone.WARN]
    frame.alerts = [frames.alert("queue.wait", severity="error")]
    ttft, itl = latencies.latency(View().after(frame), 80, 6)[1:3]
    assert tones(ttft, "204", "655", "97.1%", "■") == [Tone.BAD] * 4
    assert tones(itl, "11.6") == [Tone.STRONG]
    frame.alerts = [frames.alert("decode.stall")]
    assert "▲" in text_of(latencies.latency(View().after(frame), 24, 3)[2])


def test_readings_have_the_tone_of_their_alert():
    frame = frames.busy(alerts=[frames.alert("kv.occupancy"), frames.alert("queue.wait")])
    for height in (1, 2, 6):
        bar = max(
            (run for line in gauges.kv(View().after(frame), 60, height) for run in line),
            key=lambda run: run.text.count("█"),
        )
        assert bar.tone == Tone.WARN
    oldest = lanes.prefill(View().after(frame), 60, 7)[5]
    assert Tone.WARN in [run.tone for run in oldest]
    frame.alerts = []
    assert Tone.WARN not in [run.tone for run in lanes.prefill(View().after(frame), 60, 7)[5]]


def test_what_made_a_request_slow_stands_out_in_its_row():
    columns = [replace(column, gap=1) for column in requests.COLUMNS]

    def late(**changes):
        line = requests.row(frames.request(9, **changes), columns, is_selected=False)
        names = (column.title for column in columns)
        return {name for name, run in zip(names, line[1:], strict=True) if run.tone == Tone.WARN}

    assert late(slow_because=None) == set()
    assert late(slow_because="queue: 1.2s, usually 20ms") == {"QUEUE", "TTFT"}
    assert late(slow_because="prefill: 9s, usually 1s") == {"PREFILL", "TTFT"}
    assert late(slow_because="decode: 90ms/token") == {"TPOT"}


def test_a_stall_is_marked_above_its_value_where_the_graph_has_two_rows():
    view = frames.view_of(frames.busy())
    rows = lanes.decode(view, 100, 7)[1:3]
    (mark,) = (run for run in rows[0] if run.tone == Tone.BAD)
    place = text_of(rows[0]).index("!")
    assert set(mark.text) == {"!"}
    assert text_of(rows[1])[place] == "▂", "a tenth of the highest rate"
    assert text_of(rows[1]).startswith("of 1,988")
    assert "!" in text_of(lanes.decode(view, 100, 3)[1])


def test_occupancy_is_drawn_from_nothing_to_all_blocks():
    nearly_empty = frames.view_of(frames.idle(), lambda seq: frames.idle(seq, pools=[]))
    nearly_empty = nearly_empty.after(frames.idle(161, pools=[frames.pool(active=51)]))
    shown = list(map(text_of, kv.page(nearly_empty, 120, 40)))
    graph = shown[next(i for i, line in enumerate(shown) if "OCCUPANCY" in line) + 1 :]
    assert "100% " in graph[0]
    assert "█" not in "".join(graph)
    assert "MAP" not in "".join(shown), "a map of free blocks tells nothing"


def test_a_short_line_cuts_the_worst_alert_and_keeps_its_key_and_the_number_of_others():
    listed = frames.request(7)
    late = frames.alert("queue.wait", message="waiting 25.0s: " + "x" * 90, request_id=listed.id)
    frame = frames.busy(alerts=[late, frames.alert(), frames.alert()], requests=[listed])
    line = text_of(header.alert_line(View().after(frame), 80))
    assert (len(line), line.endswith("…; a shows it  (+2 more)")) == (80, True)


def test_a_full_queue_is_never_cut_inside_a_number():
    frame = frames.busy()
    frame.queue.queued, frame.queue.max_queued = 157, 512
    for width, shown in ((25, "157"), (36, "157/512")):
        first = text_of(lanes.prefill(View().after(frame), width, 3)[0])
        assert first.split()[-1] == shown
        assert len(first) <= width


def test_a_narrow_column_leaves_out_a_port_a_process_and_the_prefix_of_a_key():
    columns = [
        replace(each, gap=1) for each in requests.COLUMNS if each.title in ("USER", "CLIENT")
    ]

    def shown(user, client):
        line = requests.row(frames.request(1, user=user, client=client), columns, is_selected=False)
        return [run.text.strip() for run in line[1:]]

    assert shown("key:reports", "127.0.0.1:44646") == ["reports", "127.0.0.1"]
    assert shown("key:ana", "python3 93066") == ["key:ana", "python3"]
    assert shown("key:a-long-name", "10.11.12.13:44646") == ["a-long-…", "10.11.12…"]


def test_a_limit_that_an_alert_tells_is_not_told_twice():
    told = frames.alert(message="starved by other programs (load 9.1)")
    for limit, is_told in (("starved by other programs", True), ("KV is full", False)):
        view = View().after(frames.busy(alerts=[told], limit=limit))
        line = text_of(header.alert_line(view, 200))
        assert (line.count("starved"), "│" in line) == (1, not is_told)
