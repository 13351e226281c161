"""The program as a person runs it: in a terminal, in a pipe, with and without a daemon."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from appliance.cli.live import STARTING
from appliance.observe.frame.protocol import Frame
from tests.tui import frames
from tests.tui.daemon import FakeDaemon
from tui.__main__ import _width, can_draw_blocks

ROOT = Path(__file__).parents[2]
SGR = re.compile(rb"\x1b\[([0-9;:]*)m")
CONTROL = re.compile(rb"\x1b\[[^a-zA-Z]*[a-zA-Z]")


@pytest.fixture
async def daemon(tmp_path):
    async with FakeDaemon(tmp_path / "penstock.sock") as daemon:
        daemon.send(frames.busy(1))
        yield daemon


def environ(**changes: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **changes}


async def start(daemon: FakeDaemon, *options: str, **streams) -> asyncio.subprocess.Process:
    env = streams.pop("env", environ())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "tui", "--socket", str(daemon.socket_path), *options,
        env={**env, "PYTHONPATH": str(ROOT)}, cwd="/", **streams,
    )  # fmt: skip


async def run_piped(daemon: FakeDaemon, *options: str, env=None) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await start(daemon, *options, stdout=pipe, stderr=pipe, env=env or environ())
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("options", [("--once",), ("--once", "--json"), ("--plain",)])
async def test_a_full_disk_is_told_in_a_line(daemon, options):
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start(daemon, *options, stdout=full, stderr=asyncio.subprocess.PIPE)
    os.close(full)
    async with asyncio.timeout(120):
        _out, said = await process.communicate()
    told = b"penstock: cannot write: No space left on device\n"
    assert (process.returncode, said) == (1, told)


class Terminal:
    """A pseudo terminal with the console in it."""

    def __init__(self, columns: int = 120, rows: int = 40) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = b""
        self.has_output = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Terminal:
        os.set_blocking(self.master, False)
        asyncio.get_running_loop().add_reader(self.master, self._read)
        return self

    async def __aexit__(self, *exc: object) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        if self.process and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def _read(self) -> None:
        self.output += os.read(self.master, 1 << 16)
        self.has_output.set()

    async def run(self, daemon: FakeDaemon, *options: str, env: dict[str, str]) -> None:
        tty = self.slave
        self.process = await start(daemon, *options, stdin=tty, stdout=tty, stderr=tty, env=env)

    async def until(self, condition: Callable[[bytes], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition(self.output):
                self.has_output.clear()
                await self.has_output.wait()

    async def quit(self) -> int:
        assert self.process is not None
        os.write(self.master, b"q")
        async with asyncio.timeout(120):
            return await self.process.wait()


def colours(output: bytes) -> set[str]:
    """Every colour parameter of every SGR sequence; defaults (39, 49) are none."""
    codes = {code for found in SGR.findall(output) for code in found.decode().split(";")}
    chosen = {*range(30, 39), *range(40, 49), *range(90, 98), *range(100, 108)}
    return {code for code in codes if code.isdigit() and int(code) in chosen}


def plain(output: bytes) -> bytes:
    """What was drawn, without positions and colours."""
    return CONTROL.sub(b"", output)


async def test_a_terminal_gets_the_console_in_colour(daemon):
    async with Terminal() as terminal:
        await terminal.run(daemon, env=environ())
        await terminal.until(lambda output: b"LIVE" in output and b"decoding" in output)
        assert await terminal.quit() == 0
        assert colours(terminal.output)
        assert not {"38", "48"} & colours(terminal.output), "the terminal's own palette only"


SIZES = [
    (0, 0),
    (80, 0),
    (0, 24),
    (1, 1),
    (30, 8),
    (80, 24),
    (81, 25),
    (120, 40),
    (200, 50),
    (300, 80),
    (65535, 65535),
]


async def test_a_terminal_of_any_size_is_quiet_while_nothing_changes(daemon):
    num_bytes = await asyncio.gather(*(quiet_bytes(daemon, *size) for size in SIZES))
    assert max(num_bytes) < 10_000, dict(zip(SIZES, num_bytes, strict=True))


async def quiet_bytes(daemon: FakeDaemon, columns: int, rows: int) -> int:
    """Count what the console writes in three seconds once it has drawn, or in the last ones."""
    async with Terminal(columns, rows) as terminal:
        await terminal.run(daemon, env=environ())
        await terminal.until(lambda output: len(output) > 500)
        for _ in range(20):  # on a busy machine the largest takes long to draw, with pauses
            num_drawn = len(terminal.output)
            await asyncio.sleep(3)
            num_bytes = len(terminal.output) - num_drawn
            if num_bytes < 10_000:
                break
        assert await terminal.quit() == 0
    return num_bytes


async def test_no_color_means_no_colour_at_all(daemon):
    async with Terminal() as terminal:
        await terminal.run(daemon, env=environ(NO_COLOR="1"))
        await terminal.until(lambda output: b"LIVE" in output and b"decoding" in output)
        assert await terminal.quit() == 0
        assert SGR.search(terminal.output), "attributes are still used"
        assert colours(terminal.output) == set()


@pytest.mark.parametrize("env", [environ(LANG="C"), environ(LC_ALL="POSIX")])
async def test_a_locale_without_utf8_gets_ascii(daemon, env):
    async with Terminal() as terminal:
        await terminal.run(daemon, env=env)
        await terminal.until(lambda output: b"LIVE" in output and b"decoding" in output)
        assert await terminal.quit() == 0
        assert terminal.output.isascii()


async def test_a_dumb_terminal_gets_lines_without_escapes(daemon):
    async with Terminal() as terminal:
        await terminal.run(daemon, env=environ(TERM="dumb"))
        await terminal.until(lambda output: b"live 30" in output)
        daemon.send(frames.busy(2))
        await terminal.until(lambda output: output.count(b"live 30") == 2)
        assert b"\x1b" not in terminal.output
        assert terminal.output.count(b"EVENT") == len(frames.busy().events)


async def test_once_prints_one_reading(daemon):
    code, out, err = await run_piped(daemon, "--once")
    assert (code, err) == (0, "")
    assert "penstock-starter-random-1  (random weights)" in out
    assert out.count("decoding") == 23
    assert "\x1b" not in out


def test_a_width_that_no_terminal_has_is_not_believed(monkeypatch):
    with monkeypatch.context() as patch:  # pytest's own report would be as wide
        patch.setenv("COLUMNS", "99999999999")
        assert _width() == 1000


async def test_once_as_json_is_the_frame_and_nothing_else(daemon):
    code, out, err = await run_piped(daemon, "--once", "--json")
    assert (code, err) == (0, "")
    assert msgspec.json.decode(out, type=Frame) == frames.busy(1)
    assert out.count("\n") == 1


async def test_json_without_once_is_refused(daemon):
    code, out, err = await run_piped(daemon, "--json")
    assert (code, out) == (2, "")
    assert "--once" in err
    assert "--socket PATH |" not in err, "that a socket must be named is not so for penstock top"


async def test_plain_gives_lines_on_a_terminal_too(daemon):
    async with Terminal() as terminal:
        await terminal.run(daemon, "--plain", env=environ())
        await terminal.until(lambda output: b"live 30" in output)
        assert b"\x1b" not in terminal.output


@pytest.mark.parametrize(
    ("options", "shown"), [((), b"D drain"), (("--read-only", "--no-mouse"), b"ana read-only")]
)
async def test_read_only_hides_what_changes_something_and_the_mouse_may_be_left_alone(
    daemon, options, shown
):
    """The last line has room for every key; 120 columns lose `e explain` with the first request."""
    async with Terminal(columns=240) as terminal:
        await terminal.run(daemon, *options, env=environ())
        parts = (b"y copy id", b"e explain", shown)
        await terminal.until(lambda output: all(part in plain(output) for part in parts))
        assert await terminal.quit() == 0
        assert (b"D drain" in plain(terminal.output)) == (shown == b"D drain")
        assert (b"\x1b[?1000h" in terminal.output) == (not options)


async def test_once_in_ascii(daemon):
    code, out, _ = await run_piped(daemon, "--once", "--ascii")
    assert code == 0
    assert out.isascii()


@pytest.mark.parametrize("options", [("--once",), ("--once", "--json"), ()])
async def test_a_pipe_without_a_daemon_exits_3_with_a_hint(daemon, options):
    await daemon.die()
    code, out, err = await run_piped(daemon, *options)
    assert (code, out) == (3, "")
    assert "not running" in err
    assert "penstock serve" in err


async def test_a_pipe_that_closes_ends_the_lines_quietly(daemon):
    pipe = asyncio.subprocess.PIPE
    process = await start(daemon, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert process.stderr is not None
    await process.stdout.readline()
    process.stdout._transport.close()  # as `head -1` does
    seq = 2
    async with asyncio.timeout(120):
        while process.returncode is None:
            daemon.send(frames.busy(seq))
            seq += 1
            await asyncio.sleep(0.05)
    assert process.returncode == 141
    assert await process.stderr.read() == b""


async def test_lines_say_when_the_daemon_goes(daemon):
    pipe = asyncio.subprocess.PIPE
    process = await start(daemon, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    await process.stdout.readline()
    await daemon.die()
    async with asyncio.timeout(120):
        while not (line := await process.stdout.readline()).startswith(b"DISCONNECTED"):
            assert line
    process.kill()
    await process.communicate()


async def test_plain_text_does_not_load_the_terminal_library():
    script = "import sys, tui.__main__; sys.exit('textual' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT)
    assert await process.wait() == 0


@pytest.mark.parametrize(
    ("env", "can_draw"),
    [
        ({}, True),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "de_DE.utf8", "TERM": "linux"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ({"LC_CTYPE": "C.UTF-8"}, True),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, False),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, True),
        ({"LANG": "de_DE.ISO-8859-1"}, False),
    ],
)
def test_block_characters_need_a_utf8_locale(env, can_draw):
    assert can_draw_blocks(env) is can_draw


async def test_top_says_that_it_starts_and_erases_that_before_it_draws(daemon):
    async with Terminal() as terminal:
        tty = terminal.slave
        terminal.process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "appliance.cli", "--host", str(daemon.socket_path), "top",
            env={**environ(), "PYTHONPATH": str(ROOT)}, cwd="/", stdin=tty, stdout=tty, stderr=tty,
        )  # fmt: skip
        await terminal.until(lambda output: b"LIVE" in output)
        before, _, drawn = terminal.output.partition(b"\x1b[?1049h")
        assert before.startswith(STARTING.encode())
        assert before.endswith(b"\r\x1b[2K")
        assert STARTING.encode() not in drawn
        assert await terminal.quit() == 0
