"""The keeper: exit codes and signals pass through it, descriptors outlive a crash, nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.daemons import is_alive
from tests.waiting import wait_until

DAEMON = """
import os, resource, signal, socket, subprocess, sys, time
from appliance.daemon.survival import keeper

keeper.WATCHDOG_S = float(os.environ.get("WATCHDOG_S", "60"))
if "NUM_FDS" in os.environ:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["NUM_FDS"]),) * 2)
def end_replies(kept):
    from appliance.daemon.survival.kept_replies import end_kept
    end_kept(kept)
keeper.keep_daemon(end_replies)
from appliance.daemon.survival.keeper_channel import notify

signal.signal(signal.SIGTERM, signal.SIG_DFL)
folder, *lives = sys.argv[1:]
with open(f"{folder}/said", "a+") as said:
    def say(*words):
        print(*words, file=said, flush=True)
    said.seek(0)
    action = lives[said.read().count("pid ")]
    say("pid", os.getpid(), action)
    number = action.rpartition("=")[2]
    if action.startswith("exit"):
        sys.exit(int(number))
    if action.startswith("ready"):
        notify(READY=1)
    if action.startswith(("kill", "ready")):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), int(number))
    if action.startswith("leave"):  # a worker that would outlive it, and holds a lock
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        say("left", left.pid)
        os.dup(left.stdin.fileno())
        notify(READY=1)
        os.kill(os.getpid(), int(number))
    if action == "listen":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/s")
        listener.listen()
        refused = socket.socket(socket.AF_UNIX)
        notify(listener.fileno(), FDSTORE=1, FDNAME="mine")
        notify(refused.fileno(), FDSTORE=1, FDNAME="taken back")
        notify(FDSTOREREMOVE=1, FDNAME="taken back")
        if not os.fork():  # not the daemon
            notify(refused.fileno(), FDSTORE=1, FDNAME="of another")
            os._exit(0)
        os.wait()
        notify(READY=1)
        say("listening")
        os.kill(os.getpid(), signal.SIGKILL)
    if action.startswith("end"):  # the keeper's end is wanted, and the daemon's own a restart
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        os.kill(os.getppid(), int(number))
        time.sleep(600)
    if action == "reply":  # it dies, and the keeper's end is wanted
        notify(0, FDSTORE=1, FDNAME="r-0")
        notify(READY=1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "drain":  # SIGTERM ends it until it can take one
        time.sleep(0.2)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        say("draining")
        notify(STATUS="loading")
        time.sleep(600)
    if action == "store":
        given = [socket.socketpair() for _ in range(96)]
        for one, other in given:
            notify(one.fileno(), other.fileno(), one.fileno(), FDSTORE=1, FDNAME="a")
        notify(READY=1)
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "take back":
        one, other = socket.socketpair()
        notify(other.fileno(), FDSTORE=1, FDNAME="a")
        other.close()
        notify(FDSTOREREMOVE=1, FDNAME="a")
        one.settimeout(30)
        say("received", len(one.recv(1)))
    if action == "too many":
        del os.environ["FDSTORE"]  # what the keeper said that it can keep
        notify(*[0] * 60, FDSTORE=1, FDNAME="too many")
        notify(0, FDSTORE=1, FDNAME="one")
        notify(READY=1)
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stream":
        from appliance.daemon.survival import reply_file
        from appliance.daemon.survival.journal import VERSION, Head, Journal
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/s")
        listener.listen()
        say("listening")
        client, journal = listener.accept()[0], Journal()
        head = Head(VERSION, b"event: error\\n\\n", b"", "a model", (0, 0, 7, (0, 4)))
        journal.open(head, [b"POST / HTTP/1.1\\r\\n\\r\\n"], "one")
        reply, begun = os.memfd_create(reply_file.FD_NAME), b"HTTP/1.1 200 OK\\r\\n\\r\\ndata\\n\\n"
        os.write(reply, begun)
        client.sendall(begun)
        notify(client.fileno(), reply, journal.fd, FDSTORE=1, FDNAME="r-0")
        notify(READY=1)
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "count":
        say("count", os.environ["LISTEN_FDS"], *set(os.environ["LISTEN_FDNAMES"].split(":")))
    if action == "silent":
        notify(READY=1)
        time.sleep(600)
    if action == "orphan":
        if not os.fork():
            if not (orphan := os.fork()):
                os._exit(0)
            say("orphan", orphan)
            os._exit(0)
        os.wait()
        while True:
            notify(STATUS="busy")
            time.sleep(0.05)
    if action == "answer":
        names = os.environ["LISTEN_FDNAMES"]
        say("given", os.environ["LISTEN_FDS"], names, os.environ["LISTEN_PID"] == str(os.getpid()))
        socket.socket(fileno=3).accept()[0].sendall(b"late")
    if action == "signals":
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, lambda number, _: say("got", signal.Signals(number).name))
        say("waiting")
        while "got SIGTERM" not in open(f"{folder}/said").read():
            time.sleep(0.01)
"""


class Kept:
    """A daemon of the script above, and what its lives said."""

    def __init__(self, folder: Path, *lives: str, **more: str) -> None:
        self._said = folder / "said"
        script = folder / "daemon.py"
        script.write_text(DAEMON)
        environ = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "LISTEN_PID")}
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), *lives],
            env={**environ, **more, "PYTHONPATH": str(Path(__file__).parents[4])},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def said(self) -> list[str]:
        return self._said.read_text().splitlines() if self._said.exists() else []

    def wait_for(self, *words: str) -> list[str]:
        """Wait until a line begins with these; return the rest of it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in self.said():
                if line.split()[: len(words)] == list(words):
                    return line.split()[len(words) :]
            time.sleep(0.01)
        raise AssertionError((words, self.said()))

    def wait(self) -> int:
        self.stderr = self.process.communicate(timeout=60)[1].decode()
        return self.process.returncode

    def lives(self) -> list[str]:
        return [line.split()[2] for line in self.said() if line.startswith("pid ")]


@pytest.fixture
def keep(tmp_path):
    made: list[Kept] = []

    def start(*lives: str, **more: str) -> Kept:
        made.append(Kept(tmp_path, *lives, **more))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize(
    ("action", "code"), [("exit=78", 78), ("kill=9", -9), ("kill=15", -15), ("ready=2", -2)]
)
def test_an_exit_passes_through_and_so_does_the_death_of_a_daemon_that_was_never_ready(
    keep, action, code
):
    kept = keep(action)
    assert kept.wait() == code
    assert kept.lives() == [action]


def test_a_crash_loop_ends_and_the_last_exit_code_too(keep):
    kept = keep("ready=9", "kill=11", "ready=6", *["kill=9"] * 5)
    assert kept.wait() == -signal.SIGKILL
    assert len(kept.lives()) == 8
    assert kept.stderr.count("starting it again") == 7
    (kept._said).unlink()
    again = keep("ready=9", "exit=3")
    assert again.wait() == 3


def test_a_daemon_that_a_real_time_signal_ends_is_started_again(keep):
    kept = keep("ready=40", "exit=3")
    assert kept.wait() == 3
    assert "SIGRTMIN+6" in kept.stderr


def test_a_daemon_is_started_again_though_nothing_reads_the_keepers_lines(keep):
    kept = keep("ready=9", "exit=3")
    kept.process.stderr.close()
    kept.process.stderr = None
    assert kept.process.wait(timeout=60) == 3
    assert kept.lives() == ["ready=9", "exit=3"]


def test_a_daemon_that_asks_for_the_next_one_gets_it_and_a_failed_start_is_told(keep):
    kept = keep("exit=75", "ready=9", "exit=78")
    assert kept.wait() == 78
    assert kept.lives() == ["exit=75", "ready=9", "exit=78"]
    assert "ended with 78" in kept.stderr


def test_an_end_that_crosses_a_restart_is_clean(keep):
    kept = keep("end=15")
    assert kept.wait() == 0
    assert kept.lives() == ["end=15"]


def test_an_end_while_replies_wait_is_told_to_the_next_daemon_once_it_can_take_it(keep):
    kept = keep("reply", "drain")
    assert kept.wait() == 0
    assert "draining" in kept.said()
    assert kept.lives() == ["reply", "drain"]


def test_replies_that_no_daemon_continues_end_with_their_error(keep, tmp_path):
    kept = keep("stream", "exit=78")
    kept.wait_for("listening")
    with socket.socket(socket.AF_UNIX) as client, client.makefile("rb") as reply:
        client.connect(str(tmp_path / "s"))
        assert reply.read() == b"HTTP/1.1 200 OK\r\n\r\ndata\n\nevent: error\n\n"
    assert kept.wait() == 78


def test_a_burst_of_descriptors_is_kept_though_the_daemon_dies_at_once(keep):
    kept = keep("store", "count")
    assert kept.wait() == 0
    assert kept.wait_for("count") == [str(3 * 96), "a"]


def test_a_descriptor_that_is_taken_back_is_closed_in_the_keeper_too(keep):
    kept = keep("take back")
    assert kept.wait() == 0
    assert kept.wait_for("received") == ["0"]  # the end of the connection


def test_descriptors_beyond_the_keepers_limit_are_refused_whole_and_told(keep):
    kept = keep("too many", "count", NUM_FDS="50")
    assert kept.wait() == 0
    assert kept.wait_for("count") == ["1", "one"]
    assert "no descriptor left" in kept.stderr


def test_a_ready_daemon_that_stays_silent_is_ended_and_started_again(keep):
    kept = keep("silent", "exit=0", WATCHDOG_S="0.6")
    assert kept.wait() == 0
    assert "silent for 0.6 s" in kept.stderr
    assert kept.lives() == ["silent", "exit=0"]


def test_a_process_whose_parent_has_died_is_reaped_when_it_ends(keep):
    """Else each leaves an entry in the table of processes, which is full one day."""
    (orphan,) = keep("orphan").wait_for("orphan")
    wait_until(lambda: not Path(f"/proc/{orphan}").exists())


def test_a_client_waits_for_the_next_daemon_and_only_what_the_daemon_gave_is_kept(keep, tmp_path):
    kept = keep("listen", "answer")
    kept.wait_for("listening")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(tmp_path / "s"))
        assert client.recv(10) == b"late"
    assert kept.wait_for("given") == ["1", "mine", "True"]
    assert kept.wait() == 0


@pytest.mark.parametrize(("lives", "code"), [(("leave=9", "exit=0"), 0), (("leave=15",), -15)])
def test_what_a_dead_daemon_left_has_ended_before_the_next_one_or_the_keepers_end(
    keep, lives, code
):
    kept = keep(*lives)
    assert kept.wait() == code
    (pid,) = kept.wait_for("left")
    assert not is_alive(int(pid))


def test_a_signal_reaches_the_daemon_once_also_one_to_the_whole_group(keep):
    kept = keep("signals")
    kept.wait_for("waiting")
    kept.process.send_signal(signal.SIGHUP)
    kept.wait_for("got", "SIGHUP")
    os.killpg(kept.process.pid, signal.SIGINT)
    kept.wait_for("got", "SIGINT")
    kept.process.send_signal(signal.SIGTERM)
    assert kept.wait() == 0
    told = [line.split()[1] for line in kept.said() if line.startswith("got")]
    assert told == ["SIGHUP", "SIGINT", "SIGTERM"]


def test_ctrl_z_stops_the_daemon_too_and_it_goes_on_with_its_keeper(keep):
    kept = keep("signals")
    kept.wait_for("waiting")
    both = [psutil.Process(kept.process.pid), *psutil.Process(kept.process.pid).children()]
    kept.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: {each.status() for each in both} == {"stopped"})
    kept.process.send_signal(signal.SIGCONT)
    kept.process.send_signal(signal.SIGTERM)
    assert kept.wait() == 0


def test_the_daemon_does_not_outlive_its_keeper(keep):
    kept = keep("signals")
    kept.wait_for("waiting")
    (daemon,) = psutil.Process(kept.process.pid).children()
    kept.process.kill()
    wait_until(lambda: not is_alive(daemon.pid))


def test_a_service_managers_process_is_the_daemon_itself(tmp_path):
    environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "n")}
    script = "import os; from appliance.daemon.survival.keeper import keep_daemon; "
    script += "before = os.getpid(); keep_daemon(print); raise SystemExit(os.getpid() != before)"
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0
