"""The reading verbs as people and scripts run them: golden output, JSON, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli import text
from tests.appliance.cli_process import REQUEST, ROOT, penstock, run_on_terminal, user_environ
from tests.appliance.fake_daemon import RID, FakeDaemon

ENDED = {**REQUEST, "id": "cmpl-0", "phase": "finished", "finish_reason": "stop", "worker": None}
ROW = {
    "rid": RID,
    "received_at": "2026-01-02T03:04:05.678Z",
    "user": None,
    "prompt_tokens": 12,
    "completion_tokens": 32,
    "queue_ms": 0.5,
    "prefill_ms": 20.0,
    "ttft_ms": 20.6,
    "handoff_ms": 0.21,
    "tpot_ms": 9.97,
    "e2e_ms": 61234.0,
    "transport": "alias",
    "finish_reason": "length",
}
FRAME = {
    "version": 1,
    "state": "ready",
    "state_reason": "",
    "uptime_s": 192.0,
    "pid": 77,
    "model": "starter",
    "model_note": "random weights",
    "dtype": "float32",
    "max_model_len": 2048,
    "roles": "static",
    "transport": "alias",
    "queue": {
        "queued": 1,
        "prefilling": 1,
        "handing_off": 0,
        "decoding": 2,
        "max_queued": 256,
        "oldest_queued_ms": 12.0,
    },
    "workers": [
        {
            "name": "prefill",
            "state": "ready",
            "device": "cpu 0",
            "pid": 78,
            "num_sequences": 1,
            "prefill_tokens_per_s": 812.4,
            "decode_tokens_per_s": 0.0,
            "num_restarts": 0,
        }
    ],
    "pools": [
        {
            "name": "kv",
            "num_blocks": 512,
            "block_bytes": 1 << 20,
            "free": 500,
            "active": 10,
            "reserved": 2,
            "cached": 0,
        }
    ],
    "latency": {
        "window_s": 60.0,
        "num_requests": 4,
        "ttft_ms_p50": 20.0,
        "ttft_ms_p95": 41.0,
        "itl_ms_p50": 9.5,
        "itl_ms_p95": 12.0,
        "itl_ms_max": None,
        "handoff_ms_p50": 0.2,
    },
    "totals": {
        "accepted": 9,
        "finished": 4,
        "refused": 0,
        "aborted": 1,
        "failed": 0,
        "prompt_tokens": 120,
        "output_tokens": 300,
    },
    "devices": [{"name": "package-0", "power_w": None}],
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        yield fake


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return user_environ(tmp_path)


def test_a_terminal_gets_colour_unless_it_is_refused(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    environ["TERM"] = "xterm"
    assert b"\x1b[32mready\x1b[0m" in run_on_terminal(environ, "status")
    assert b"\x1b" not in run_on_terminal({**environ, "NO_COLOR": "1"}, "status")


def test_status_fits_on_one_screen(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    ended = penstock(environ, "status")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "state    ready, up 3m12s, pid 77",
        "model    starter (random weights), float32, up to 2048 tokens",
        "roles    static, handoff by alias",
        "queue    1 queued, 1 prefilling, 0 handing off, 2 decoding"
        " (at most 256 queued, the oldest for 12ms)",
        "worker   prefill ready on cpu 0, pid 78, 1 sequences, prefill 812 tok/s, decode 0 tok/s,"
        " 0 restarts",
        "kv       kv: 500 of 512 blocks free (1 MiB each), 10 active, 2 reserved",
        "latency  ttft p50 20ms p95 41ms, itl p50 9.5ms p95 12ms max -, handoff p50 0.2ms"
        " (4 requests in 60 s)",
        "totals   9 accepted, 4 finished, 0 refused, 1 aborted, 0 failed; 120 tokens in, 300 out",
        "power    package-0 -",
    ]


def test_status_as_json_is_the_frame(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    shown = json.loads(penstock(environ, "status", "--json").stdout)
    assert shown == {"schema": "penstock.status/1", **FRAME}


def test_ps_lists_live_requests(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    listed = {"object": "list", "data": [REQUEST, ENDED]}
    daemon.script.replies = {"GET /v1/requests": (200, listed)}
    assert penstock(environ, "ps").stdout.splitlines() == [
        "ID      PHASE     USER  IN  OUT  MAX   AGE   TTFT  TPOT  WORKER",
        "cmpl-1  decoding  ann   12    3   32  1.2s  231ms  12ms  decode",
    ]
    assert penstock(environ, "ps", "-a").stdout.splitlines()[-1] == (
        "cmpl-0  stop      ann   12    3   32  1.2s  231ms  12ms  -"
    )
    shown = json.loads(penstock(environ, "ps", "--json").stdout)
    assert shown == {"schema": "penstock.ps/1", "data": [REQUEST]}


def test_names_cannot_write_on_the_terminal(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    evil = {**REQUEST, "user": "a\x1b[2J\n\u202eb"}
    daemon.script.replies = {"GET /v1/requests": (200, {"data": [evil]})}
    assert "a\\x1b[2J\\n\\u202eb" in penstock(environ, "ps").stdout


def test_log_shows_the_newest_last_and_json_the_newest_first(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    rows = [ROW, {**ROW, "rid": "cmpl-0", "ttft_ms": None, "finish_reason": "abort"}]
    daemon.script.replies = {"GET /v1/penstock/log?limit=2": (200, {"data": rows})}
    assert penstock(environ, "log", "-n", "2").stdout.splitlines() == [
        "RECEIVED                  ID      USER  IN  OUT  QUEUE  PREFILL    TTFT  HANDOFF    TPOT"
        "    E2E  PATH   END",
        "2026-01-02T03:04:05.678Z  cmpl-0  -     12   32  0.5ms     20ms       -   0.21ms  9.97ms"
        "  1m01s  alias  abort",
        "2026-01-02T03:04:05.678Z  cmpl-1  -     12   32  0.5ms     20ms  20.6ms   0.21ms  9.97ms"
        "  1m01s  alias  length",
    ]
    shown = json.loads(penstock(environ, "log", "--json", "-n", "2").stdout)
    assert shown == {"schema": "penstock.log/1", "data": rows}


def test_log_reads_the_file_when_no_daemon_answers(tmp_path: Path, environ: dict[str, str]) -> None:
    from tests.appliance.test_request_log import row
    from tests.appliance.test_request_log import start as start_log

    path = tmp_path / "state" / "requests.db"
    log = start_log(path)
    log.record(row("cmpl-7"))
    assert log.close()
    ended = penstock(environ, "log", "--json", "-n", "1")
    (shown,) = json.loads(ended.stdout)["data"]
    assert {"rid", "ttft_ms", "handoff_ms", "completion_tokens", "transport"} <= shown.keys()
    assert f"reading {path}" in ended.stderr
    assert ended.returncode == 0


def test_cancel_goes_on_after_an_unknown_id(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    missing = {"error": {"message": "no live request", "code": "request_not_found"}}
    daemon.script.replies = {"POST /v1/requests/gone/cancel": (404, missing)}
    ended = penstock(environ, "cancel", "gone", "cmpl-1")
    assert ended.stdout == "cancelled cmpl-1\n"
    assert ended.stderr == "penstock: gone: no live request\n"
    assert ended.returncode == 5


def test_version_works_with_and_without_a_daemon(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /version": (200, {"version": "9.9.9"})}
    assert "(daemon 9.9.9)" in penstock(environ, "version").stdout
    environ["PENSTOCK_SOCKET"] = "/nonexistent"
    shown = json.loads(penstock(environ, "version", "--json").stdout)
    assert shown["schema"] == "penstock.version/1"
    assert shown["daemon_version"] is None


@pytest.mark.parametrize("verb", [("status",), ("ps",), ("log",), ("run", "p"), ("cancel", "x")])
def test_no_daemon_is_exit_code_3_with_a_hint(
    environ: dict[str, str], verb: tuple[str, ...]
) -> None:
    ended = penstock(environ, *verb)
    assert (ended.returncode, ended.stdout) == (3, "")
    error, hint = ended.stderr.splitlines()
    assert error.startswith("penstock: unix://")
    assert hint.startswith("hint: ")


def test_usage_errors_are_exit_code_2(environ: dict[str, str]) -> None:
    assert penstock(environ, "dance").returncode == 2
    assert penstock(environ, "log", "-n", "0").returncode == 2


def test_a_wrong_configuration_is_exit_code_78(environ: dict[str, str]) -> None:
    ended = penstock(environ, "serve", "--transport", "shm", "--roles", "colocated")
    assert ended.returncode == 78
    assert "transport" in ended.stderr
    ended = penstock(environ, "serve", "--kv-memory", "plenty")
    assert (ended.returncode, ended.stderr) == (
        78,
        "penstock: --kv-memory: 'plenty' is not allowed; give a size such as 2GiB, 512MiB or 4G\n",
    )


def test_top_opens_the_console_with_the_socket_and_its_own_flags(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    console = tmp_path / "path" / "tui"
    console.mkdir(parents=True)
    (console / "__init__.py").touch()
    (console / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    environ["PYTHONPATH"] = f"{tmp_path / 'path'}:{ROOT}"
    ended = penstock(environ, "top", "--ascii", "--socket", "/s.sock")
    assert ended.stdout == "['--socket', '/s.sock', '--ascii']\n"


@pytest.mark.parametrize(
    ("value_ms", "shown"),
    [
        (None, "-"),
        (0.0, "0ms"),
        (0.0123, "0.0123ms"),
        (9.999, "10ms"),
        (99.96, "100ms"),
        (999.6, "1.0s"),
        (59_949.0, "59.9s"),
        (59_960.0, "1m00s"),
        (3_599_400.0, "59m59s"),
        (3_600_000.0, "1h00m"),
    ],
)
def test_durations_have_three_digits(value_ms: float | None, shown: str) -> None:
    assert text.ms(value_ms) == shown
