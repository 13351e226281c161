"""How much memory and time a process may take for what it reads; each has its own process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from engine.reader.__main__ import _report

SCRIPT = """
import resource, sys
from engine.checkpoint import model_file
from engine.reader.limits import SPARE_BYTES, limit_memory, limit_memory_of_text

MB = 1 << 20
assert SPARE_BYTES == 64 * MB
def fits(num_bytes):
    try:
        bytearray(num_bytes)
    except MemoryError:
        return False
    return True
"""
CASES = {
    "nothing read": "limit_memory(4); print(fits(56 * MB), fits(72 * MB))",
    "four bytes for each that is read": (
        "limit_memory(4); model_file._on_read(16 * MB); print(fits(116 * MB), fits(136 * MB))"
    ),
    "a text": "limit_memory_of_text(64 << 10); print(fits(116 * MB), fits(136 * MB))",
    "a text after another": (
        "limit_memory_of_text(MB); limit_memory_of_text(0); print(fits(56 * MB), fits(72 * MB))"
    ),
    "less than was given": (
        "resource.setrlimit(resource.RLIMIT_AS, (600 * MB, 600 * MB)); limit_memory(4);"
        "model_file._on_read(1 << 30); print(fits(16 * MB), fits(600 * MB))"
    ),
    "a text with less than was given": (
        "resource.setrlimit(resource.RLIMIT_AS, (600 * MB, 600 * MB)); limit_memory_of_text(MB);"
        "print(fits(16 * MB), fits(600 * MB))"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_fits_is_bounded_by_what_was_read(case):
    command = [sys.executable, "-c", SCRIPT + case]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["True", "False"], ended.stderr


SPIN = """
import socket
import engine.reader.__main__ as reader
from engine.reader.jobs import JOBS
from engine.text.answers import How

def spin(*_):
    while True:
        pass

JOBS["encode"], reader.TEXT_CPU_S = spin, 0.05
job, other = socket.socketpair()
other.sendall(reader.marshal.dumps(("encode", ("a", False))))
other.shutdown(socket.SHUT_WR)
"""


CHAT = """
import os, socket, sys, time
import engine.reader.__main__ as reader
from engine.reader.jobs import JOBS
from engine.text.answers import How, receive_answer

def spin(cpu_s, _messages):
    while time.process_time() - begun_s < cpu_s:
        pass
    return "done"

JOBS["render"], begun_s = spin, time.process_time()
reader.FORK_CPU_S, reader.MAX_CHAT_CPU_S = 0.05, 2.0
reader.CHAT_CPU_S_PER_BYTE = float(sys.argv[3])
job, other = socket.socketpair()
other.sendall(reader.marshal.dumps(("render", (float(sys.argv[1]), "a" * int(sys.argv[2])))))
other.shutdown(socket.SHUT_WR)
reader._limited(job, How.FORKED)
print(receive_answer(other)[1].decode())
"""


@pytest.mark.parametrize(
    ("cpu_s", "num_bytes", "s_per_byte", "told"),
    [("0.5", 10_000, 1e-4, "done"), ("0.5", 100, 1e-4, ""), ("inf", 100, 1000.0, "")],
    ids=["a long chat", "a short chat", "an endless loop"],
)
def test_a_slow_chat_may_compute_by_its_length_but_not_without_end(
    cpu_s, num_bytes, s_per_byte, told
):
    command = [sys.executable, "-c", CHAT, cpu_s, str(num_bytes), str(s_per_byte)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == told, ended.stderr
    assert ended.returncode == (0 if told else -signal.SIGPROF)


@pytest.mark.parametrize("kind", ["TEXT", "LONG_TEXT"])
def test_a_text_that_computes_without_end_ends_its_process_at_the_limit(kind):
    command = [sys.executable, "-c", f"{SPIN}reader._limited(job, How.{kind})"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGPROF, ended.stderr


def test_an_error_is_printed_without_the_text_that_it_is_of(capsys):
    try:
        int("a secret")
    except ValueError as error:
        _report(error)
    said = capsys.readouterr().err
    assert "ValueError" in said
    assert "secret" not in said
