"""Run the command in forks of a process that has imported it: hundreds of tests start it.

usage: python -m tests.appliance.cli_zygote FD, with a Unix socket of packets as FD. A packet names
arguments, environment and folder, and carries stdin, stdout, stderr and a socket for the outcome.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType

from appliance.cli import main
from appliance.cli.main import VERBS

MAX_PACKET_BYTES = 1 << 20
LATE = ("chat", "models", "run")
"""Files that import huggingface_hub, which reads the environment when it is imported."""


def serve(requests: socket.socket) -> None:
    """Fork for each packet; returns in the fork, with its streams and settings in place."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are nobody's to wait for
    while True:
        packet, fds, _, _ = socket.recv_fds(requests, MAX_PACKET_BYTES, 4)
        if not packet:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(json.loads(packet), *fds)
            return
        for fd in fds:
            os.close(fd)


def become(asked: MappingProxyType, stdin: int, stdout: int, stderr: int, outcome: int) -> None:
    """Fork once more: the child goes on as the command, the parent tells how it ended."""
    pid = os.fork()
    if pid:
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        with suppress(OSError), socket.socket(fileno=outcome) as teller:
            teller.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            teller.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for fd, stream in enumerate((stdin, stdout, stderr)):
        os.dup2(stream, fd)
        os.close(stream)
    os.close(outcome)
    os.environ.clear()
    os.environ.update(asked["environ"])
    if asked["cwd"] is not None:
        os.chdir(asked["cwd"])
    sys.argv[1:] = asked["arguments"]


if __name__ == "__main__":
    for file in {place.partition(".")[0] for place in VERBS.values()}.difference(LATE):
        import_module(f"appliance.cli.{file}")
    sys.argv[0] = str(import_module("appliance.cli").__path__[0]) + "/__main__.py"
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    main()
