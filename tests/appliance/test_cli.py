"""The command as people and scripts run it: output to the byte, exit codes, signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance import cli_output
from tests.appliance.fake_daemon import RID, FakeDaemon, chat_event, text_event

ROOT = Path(__file__).parents[2]
DONE = b"data: [DONE]"

REQUEST: dict[str, Any] = {
    "id": RID,
    "phase": "decoding",
    "user": "ann",
    "prompt_tokens": 12,
    "output_tokens": 3,
    "max_tokens": 32,
    "age_ms": 1234.5,
    "ttft_ms": 231.4,
    "tokenize_ms": 0.4,
    "queue_ms": 61.0,
    "prefill_ms": 170.0,
    "handoff_ms": 1.82,
    "tpot_ms": 12.04,
    "e2e_ms": None,
    "worker": "decode",
}
ENDED = {**REQUEST, "id": "cmpl-0", "phase": "finished", "finish_reason": "stop", "worker": None}
ROW = {
    "rid": RID,
    "received_at": "2026-01-02T03:04:05.678Z",
    "peer_user": None,
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
    """A user with nothing configured but the socket."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PENSTOCK_SOCKET": str(tmp_path / "p.sock"),
        "PENSTOCK_STATE_DIR": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "appliance.cli", *arguments]


def penstock(
    environ: dict[str, str], *arguments: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        command(*arguments), env=environ, input=stdin, capture_output=True, timeout=60, check=False
    )
    return subprocess.CompletedProcess(
        ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode()
    )


def start(environ: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*arguments), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_run_prints_only_the_completion(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("Hel"), text_event("lo\x1b[2J ü", "length"), DONE]
    ended = penstock(environ, "run", "Say hello", "--max-tokens", "8", "--stop", "x", "--seed", "3")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "Hello\x1b[2J ü"  # to the byte, with no newline, into a pipe
    assert daemon.script.asked_for("POST /v1/completions") == [
        {"prompt": "Say hello", "max_tokens": 8, "seed": 3, "stop": ["x"], "stream": True}
    ]


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_run_reads_a_piped_prompt(
    daemon: FakeDaemon, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    daemon.script.events = [text_event("", "stop"), DONE]
    ended = penstock(environ, "run", *arguments, stdin="zwei\nZeilen ü\n".encode())
    assert (ended.returncode, ended.stdout) == (0, "")
    assert daemon.script.asked[-1][1] == {"prompt": "zwei\nZeilen ü", "stream": True}


def test_run_refuses_a_prompt_that_is_no_text(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    assert penstock(environ, "run", stdin=b"\xff\xfe").returncode == 2
    assert daemon.script.asked == []


def test_run_can_use_the_chat_template(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [chat_event("Hi"), chat_event("", "stop"), DONE]
    ended = penstock(environ, "run", "--chat", "Hello", "--temperature", "0")
    assert (ended.returncode, ended.stdout) == (0, "Hi")
    assert daemon.script.asked_for("POST /v1/chat/completions") == [
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0.0,
            "stream": True,
        }
    ]


def test_run_can_end_with_the_timings(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.events = [text_event("a", "stop"), DONE]
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, REQUEST)}
    ended = penstock(environ, "run", "p", "--stats")
    assert ended.stdout == "a"
    assert ended.stderr == (
        "in 12 out 3  ttft 231ms (tokenize 0.4ms queue 61ms prefill 170ms)"
        "  handoff 1.82ms  tpot 12ms  id cmpl-1\n"
    )


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([text_event("par"), {"error": {"message": "a worker\x1b[31m died"}}], "worker\\x1b[31m"),
        ([text_event("par"), text_event("", "abort"), DONE], "'abort'"),
        ([text_event("par")], "before the end"),
    ],
)
def test_run_says_that_a_reply_is_incomplete(
    daemon: FakeDaemon, environ: dict[str, str], events: list[object], words: str
) -> None:
    daemon.script.events = events
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (7, "par")
    assert ended.stderr.startswith("penstock: ")
    assert words in ended.stderr


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_on_the_server(
    daemon: FakeDaemon, environ: dict[str, str], number: int, exit_code: int
) -> None:
    daemon.script.events = [text_event("one"), text_event("two")]
    daemon.script.pause_after = 1
    daemon.script.replies = {f"GET /v1/requests/{RID}": (200, REQUEST)}
    running = start(environ, "run", "p")
    assert running.stdout is not None
    assert running.stdout.read(3) == b"one"  # streamed: the daemon is still at it
    running.send_signal(number)
    rest, notes = running.communicate(timeout=30)
    assert (running.returncode, rest, notes) == (exit_code, b"", b"cancelled after 3 tok\n")
    assert daemon.script.asked_for(f"POST /v1/requests/{RID}/cancel") == [{}]
    assert daemon.script.told_reader.is_set()  # it was cancelled before it was hung up on


def test_a_reader_that_leaves_cancels_on_the_server(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [text_event("x" * 1000) for _ in range(2000)]
    running = start(environ, "run", "p")
    assert running.stdout is not None
    assert running.stdout.read(1) == b"x"
    running.stdout.close()
    assert running.stderr is not None
    with running.stderr as notes:
        assert notes.read() == b""
    assert running.wait(30) == 141
    assert daemon.script.cancelled.is_set()


def test_a_terminal_gets_text_without_controls_and_a_newline(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.events = [text_event("a\x1b]0;evil\x07b\tc\x9b1m", "stop"), DONE]
    assert run_on_terminal(environ, "run", "p") == b"a]0;evilb\tc1m\r\n"


def test_a_terminal_gets_colour_unless_it_is_refused(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    environ["TERM"] = "xterm"
    assert b"\x1b[32mready\x1b[0m" in run_on_terminal(environ, "status")
    assert b"\x1b" not in run_on_terminal({**environ, "NO_COLOR": "1"}, "status")


def run_on_terminal(environ: dict[str, str], *arguments: str) -> bytes:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(*arguments), env=environ, stdin=theirs, stdout=theirs) as running:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # how Linux says that the last writer is gone
                break
            shown += part
    os.close(ours)
    assert running.returncode == 0
    return shown


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


@pytest.mark.parametrize(
    ("status", "exit_code"), [(400, 2), (403, 4), (404, 5), (429, 6), (503, 6), (500, 7)]
)
def test_a_refusal_has_its_exit_code(
    daemon: FakeDaemon, environ: dict[str, str], status: int, exit_code: int
) -> None:
    refusal = {"error": {"message": "not now", "code": None}}
    daemon.script.replies = {"POST /v1/completions": (status, refusal)}
    ended = penstock(environ, "run", "p")
    assert (ended.returncode, ended.stdout) == (exit_code, "")
    assert ended.stderr.startswith("penstock: not now\n")


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
    ended = penstock(environ, "top", "--ascii", "--socket", "/s.sock", "x")
    assert ended.stdout == "['--socket', '/s.sock', '--ascii', 'x']\n"


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
    assert cli_output._ms(value_ms) == shown
