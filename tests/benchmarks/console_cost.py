"""What the console costs: `penstock top` in a pseudo terminal, fed a busy frame every second.

usage: python -m tests.benchmarks.console_cost [--size 120x40] [--seconds 30] [--page 1]

Thirty live requests, all rates moving, over a real socket. Counted from the second after the first
frame is on screen: CPU time of the console's process, bytes that it writes to the terminal, and its
resident memory. A tick is the CPU time between two frames. A noisy machine makes the CPU figures
larger (cold caches), never smaller: look at the least of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import pty
import statistics
import struct
import sys
import tempfile
import termios
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.tui import frames
from tests.tui.daemon import FakeDaemon

ROOT = Path(__file__).parents[2]
BUDGET_CPU_PERCENT, BUDGET_KB_PER_S, BUDGET_RSS_MB = 2.0, 25.0, 60.0


@dataclass
class Cost:
    """What was measured."""

    tick_ms: list[float] = field(default_factory=list)
    num_bytes: int = 0
    rss_bytes: int = 0


class Screen:
    """The terminal's end that nobody looks at: it counts."""

    def __init__(self, width: int, height: int) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        os.set_blocking(self.master, False)
        self.num_bytes = 0
        self.is_drawn = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def _read(self) -> None:
        data = os.read(self.master, 1 << 16)
        self.num_bytes += len(data)
        if b"LIVE" in data:
            self.is_drawn.set()

    def close(self) -> None:
        """Give both ends back."""
        asyncio.get_running_loop().remove_reader(self.master)
        os.close(self.master)
        os.close(self.slave)


def cpu_ns(pid: int) -> int:
    """CPU time of all threads, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


def rss_bytes(pid: int) -> int:
    """Resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


async def measure(width: int, height: int, num_seconds: int, page: str) -> Cost:
    """Run one console."""
    with tempfile.TemporaryDirectory() as folder:
        socket_path = Path(folder) / "p.sock"
        async with FakeDaemon(socket_path) as daemon:
            daemon.requests = {f"{n}": frames.finished(n) for n in range(200)}
            daemon.send(frames.busy(1))
            screen = Screen(width, height)
            environ = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
            tty = screen.slave
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "tui", "--socket", str(socket_path),
                stdin=tty, stdout=tty, stderr=tty, env=environ,
            )  # fmt: skip
            await asyncio.wait_for(screen.is_drawn.wait(), 30)
            os.write(screen.master, page.encode())
            await asyncio.sleep(2)
            cost = await _count(daemon, screen, process.pid, num_seconds)
            os.write(screen.master, b"q")
            await process.wait()
            screen.close()
    return cost


async def _count(daemon: FakeDaemon, screen: Screen, pid: int, num_seconds: int) -> Cost:
    cost, first_bytes = Cost(), screen.num_bytes
    spent_ns = cpu_ns(pid)
    for seq in range(2, 2 + num_seconds):
        frame = frames.busy(seq, requests=[_older(r, seq) for r in frames.busy(seq).requests])
        daemon.lines.clear()  # or a new reader would get them all
        daemon.send(msgspec.json.encode(frame) + b"\n")
        await asyncio.sleep(1)
        now_ns = cpu_ns(pid)
        cost.tick_ms.append((now_ns - spent_ns) / 1e6)
        spent_ns = now_ns
    cost.num_bytes, cost.rss_bytes = screen.num_bytes - first_bytes, rss_bytes(pid)
    return cost


def _older(request: frames.RequestFrame, seconds: int) -> frames.RequestFrame:
    """As it would be later: its age and its output have grown."""
    grown = request.output_tokens + 80 * seconds if request.phase == "decoding" else 0
    return msgspec.structs.replace(
        request, age_ms=request.age_ms + 1000 * seconds, output_tokens=grown
    )


def table(cost: Cost, num_seconds: int) -> str:
    """Figures beside their budgets."""
    rows = [
        ("CPU of one core", f"{statistics.mean(cost.tick_ms) / 10:.2f} %", BUDGET_CPU_PERCENT),
        ("to the terminal", f"{cost.num_bytes / num_seconds / 1e3:.1f} KB/s", BUDGET_KB_PER_S),
        ("resident", f"{cost.rss_bytes / 1e6:.1f} MB", BUDGET_RSS_MB),
        ("median tick", f"{statistics.median(cost.tick_ms):.1f} ms", None),
        ("worst tick", f"{max(cost.tick_ms):.1f} ms", None),
    ]
    lines = [f"{'':18}{'measured':>12}{'budget':>10}"]
    lines += [
        f"{name:18}{figure:>12}{'' if budget is None else f'{budget:g}':>10}"
        for name, figure, budget in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="console_cost")
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--page", default="1", help="the key of the page to look at")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    cost = asyncio.run(measure(width, height, options.seconds, options.page))
    print(f"console at {options.size}, 1 frame a second, {options.seconds} s")
    print(table(cost, options.seconds))


if __name__ == "__main__":
    main()
