"""status, once, checked and watched; and metrics."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import status_page
from tests.appliance.cli_data import FRAME
from tests.appliance.cli_process import penstock, run_on_terminal, start, user_environ
from tests.worlds.fake_daemon import FakeDaemon

STATE, STREAM = "GET /v1/penstock/state", "GET /v1/penstock/stream"
FINE = {**FRAME, "alerts": []}
ALERT = FRAME["alerts"][1]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        fake.script.content_type = "application/x-ndjson"
        yield fake


@pytest.mark.parametrize(
    ("changes", "exit_code", "codes"),
    [
        ({}, 0, []),
        ({"alerts": [ALERT]}, 8, ["queue.wait"]),
        ({"state": "loading", "state_reason": "model_loading"}, 8, ["state.loading"]),
        ({"state": "draining", "state_reason": "draining"}, 8, ["state.draining"]),
        (
            {"state": "degraded", "state_reason": "x", "alerts": [ALERT]},
            8,
            ["state.degraded", "queue.wait"],
        ),
        (
            {"state": "degraded", "alerts": [{**ALERT, "code": "state.degraded"}]},
            8,
            ["state.degraded"],
        ),
    ],
)
def test_a_check_ends_as_the_daemon_is(
    daemon: FakeDaemon,
    environ: dict[str, str],
    changes: dict[str, Any],
    exit_code: int,
    codes: list[str],
) -> None:
    daemon.script.replies = {STATE: (200, {**FINE, **changes})}
    ended = penstock(environ, "status", "--check", "-o", "json")
    assert ended.returncode == exit_code
    assert [alert["code"] for alert in json.loads(ended.stdout)["data"]] == codes
    page = penstock(environ, "status", "--check").stdout
    assert all(code in page for code in codes or ["OK"])


def test_a_page_tells_what_speculation_guessed() -> None:
    drafts = [{"drafter": "own_text", "guessed": [10, 5], "right": [9, 3]}]
    totals = {**FRAME["totals"], "decode_steps": 10, "decode_step_tokens": 22, "drafts": drafts}
    (line,) = (
        line
        for line in status_page.page({**FRAME, "totals": totals}, colour=False).splitlines()
        if line.startswith("guesses")
    )
    assert {"2.2", "80", "15"} <= {*line.split()}


def test_a_page_says_each_thing_once() -> None:
    tier = {"state": "on", "blocks": 3, "num_bytes": 3 << 20, "max_bytes": 1 << 30}
    tier |= {"stored_blocks": 0, "loaded_blocks": 1, "loads": 0, "regret_ms": 0.0}
    loss = "against the weights as stored: 82%"
    changes = {
        "weights": f"weights are q4; {loss}",
        "kv": "KV is int8; against KV in float32: 89%",
        "ssd": tier,
        "dram": {**tier, "loads": 1, "regret_ms": 2.0},
    }
    lines = status_page.page({**FRAME, **changes}, colour=False).splitlines()
    assert "weights  q4" in lines
    assert lines[lines.index("weights  q4") + 1].strip() == loss
    assert "kv       int8" in lines
    stored = "3.0 MiB of 1.0 GiB in 3 blocks; since start 0 stored, 1 loaded"
    assert f"ssd      {stored}" in lines
    (dram,) = (line for line in lines if line.startswith(f"dram     {stored}, "))
    assert dram.endswith(" 2ms")


def test_a_cache_that_is_being_opened_is_one_phrase_until_it_waits_for_something() -> None:
    for reason, end in (("", "being opened"), ("the disk is slow", "opened: the disk is slow")):
        tier = {"state": "opening", "reason": reason}
        lines = status_page.page({**FRAME, "ssd": tier}, colour=False).splitlines()
        assert next(line for line in lines if line.startswith("ssd")).endswith(end)


def test_a_check_without_a_daemon_says_so(environ: dict[str, str]) -> None:
    ended = penstock(environ, "status", "--check")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "not running" in ended.stderr


def test_a_watch_into_a_pipe_is_a_line_for_each_frame(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [json.dumps({**FRAME, "seq": seq}).encode() for seq in range(3)]
    ended = penstock(environ, "status", "--watch")
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("2026-01-02T03:04:06.000Z ready  1 queued, 1 prefilling, ")
    assert "kv 500 of 512 free" in lines[0]
    assert lines[0].endswith("error worker.down  warning queue.wait")
    assert (ended.returncode, daemon.script.asked) == (3, [(STREAM, None)])
    assert "has ended" in ended.stderr


def test_a_watch_in_json_lines_is_the_frames(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [json.dumps({**FRAME, "seq": seq}).encode() for seq in range(2)]
    ended = penstock(environ, "status", "-w", "-o", "ndjson")
    assert [json.loads(line)["seq"] for line in ended.stdout.splitlines()] == [0, 1]


def test_a_watch_ends_with_the_first_signal(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [json.dumps(FRAME).encode(), b""]
    daemon.script.pause_after = 1
    running = start(environ, "status", "--watch")
    assert running.stdout is not None
    assert running.stdout.readline()
    running.send_signal(signal.SIGINT)
    rest, notes = running.communicate(timeout=120)
    assert (running.returncode, rest, notes) == (130, b"", b"")


def test_a_watch_on_a_screen_draws_each_frame_over_the_last(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [json.dumps(FRAME).encode()] * 2
    environ = {**environ, "TERM": "xterm"}
    shown = run_on_terminal(environ, "status", "--watch", exit_code=3)
    assert shown.count(b"\x1b[H\x1b[J") == 2
    assert shown.count(b"\x1b[31merror\x1b[0m    worker.down") == 2
    dumb = run_on_terminal({**environ, "TERM": "dumb"}, "status", "--watch", exit_code=3)
    assert b"\x1b" not in dumb
    assert dumb.count(b"2026-01-02T03:04:06.000Z ready") == 2


@pytest.mark.parametrize(
    "arguments", [("--check", "--watch"), ("--watch", "-o", "json"), ("--watch", "-o", "csv")]
)
def test_what_has_no_end_is_no_document(
    daemon: FakeDaemon, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    ended = penstock(environ, "status", *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_an_older_daemon_is_shown_without_what_it_does_not_send(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    new = ("alerts", "limit", "handoff", "energy", "slo_ttft_ms")
    old = {name: value for name, value in FRAME.items() if name not in new}
    daemon.script.replies = {STATE: (200, old)}
    ended = penstock(environ, "status")
    assert ended.returncode == 0
    subjects = {line.split()[0] for line in ended.stdout.splitlines()}
    assert subjects == {"state", "model", "roles", "queue", "worker", "pool"} | {
        "latency",
        "totals",
        "power",
    }


def test_metrics_come_as_the_daemon_writes_them_but_for_what_reorders_text(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    written = '# HELP a b\na{model="m\u202e\u2066"} 1.0\n'
    daemon.script.replies = {"GET /metrics": (200, written.encode())}
    ended = penstock(environ, "metrics")
    assert (ended.returncode, ended.stdout) == (0, '# HELP a b\na{model="m"} 1.0\n')


def test_status_needs_no_library_of_the_daemon(tmp_path: Path) -> None:
    code = (
        "import sys, appliance.cli.main as m; m.build('status');"
        "print(*sorted(set(sys.modules) & set(sys.argv[1:])))"
    )
    heavy = ("prometheus_client", "msgspec", "textual", "starlette", "psutil", "sqlite3")
    environ = user_environ(tmp_path)
    command = [sys.executable, "-c", code, *heavy]
    ended = subprocess.run(command, env=environ, capture_output=True, check=True)
    assert ended.stdout.strip() == b""


@pytest.mark.parametrize("room", [40, 80, 120])
def test_what_is_longer_than_the_terminal_goes_on_below_itself(room: int) -> None:
    whole = status_page.page(FRAME, colour=False)
    folded = status_page.page(FRAME, colour=False, room=room)
    lines = folded.splitlines()
    assert max(len(line) for line in whole.splitlines()) > room
    longest_word = max(map(len, whole.split()))
    assert all(len(line) <= max(room, 9 + longest_word) for line in lines[1:])
    assert folded.split() == whole.split()
    assert all(line[:9].strip() or line[9] != " " for line in lines), "texts keep their column"


def test_a_pools_recurrent_states_are_counted() -> None:
    (pool,) = FRAME["pools"]
    kept = {**pool, "record_blocks": 51, "records": 4, "snapshots": 1}
    assert "; states: 4 running, 1 snapshot;" in status_page.page(
        {**FRAME, "pools": [kept]}, colour=False
    )
    assert "states" not in status_page.page(FRAME, colour=False)


def test_what_the_pools_keep_is_told_above_them() -> None:
    assert "int8" not in status_page.page(FRAME, colour=False)
    lines = status_page.page({**FRAME, "kv": "KV is int8; divergence"}, colour=False).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("kv"))
    assert lines[place].split() == ["kv", "int8"]
    assert lines[place + 1].strip() == "divergence"
    assert lines[place + 2].startswith("pool")


def test_what_was_chosen_at_start_is_told() -> None:
    assert "tuning" not in status_page.page(FRAME, colour=False)
    told = ["up to 256 prompt tokens a step", "attention of prompts by tiles"]
    lines = status_page.page({**FRAME, "trials": told}, colour=False).splitlines()
    assert [line for line in lines if line.startswith("tuning")] == [
        f"tuning   {each}" for each in told
    ]


def test_a_model_that_failed_to_load_is_told_with_its_reason_and_time() -> None:
    failed = {"model": "small", "reason": "its worker died", "retry_at": "2026-11-21T01:02:03Z"}
    swaps = {"others": ["small"], "num_waiting": 0, "num_swaps": 0}
    assert "failed: " not in status_page.page({**FRAME, "swaps": swaps}, colour=False)
    page = status_page.page({**FRAME, "swaps": {**swaps, "failed": [failed]}}, colour=False)
    assert "; failed: small, " in page
    assert ": its worker died" in page


def test_the_sums_of_today_outlive_the_daemon_that_counted_them():
    today = {"since": "2026-11-28T00:00:00.000Z", "requests": 8, "failed": 1}
    today |= {"prompt_tokens": 184, "output_tokens": 1542}
    shown = status_page.page({"state": "ready", "totals": {}, "today": today}, colour=False)
    (line,) = [each for each in shown.splitlines() if each.startswith("today")]
    assert [part in line for part in ("8 requests", "1 failed", "184", "1,542")] == [True] * 4
