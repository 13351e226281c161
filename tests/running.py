"""Run a Python program beside a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, whose first line has begun, until the `with` ends."""
    command = [sys.executable, "-c", f"print(flush=True)\n{program}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
