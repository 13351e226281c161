"""Carry commands from a group's first process to another, and its reports back.

Invariant: messages arrive whole and in order; the end of one process is found by the other.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from engine.errors import WorkerFailed
from engine.wire.messages import Failed, LoadingProgress, Setup, WeightsLoaded


class StepInputs(msgspec.Struct, tag=True, frozen=True):
    """What one step computes: the fields of a StepBatch."""

    input_ids: list[int]
    positions: list[int]
    token_slots: list[int]
    query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    logit_rows: list[int]
    records: list[tuple[list[int], list[int]]]
    """Blocks to read and to write, of each sequence."""
    windows: list[tuple[list[int], list[list[int]]]]
    may_stop: bool
    """Whether the first process may end the step after any half of a layer."""


Command = Setup | StepInputs
Report = LoadingProgress | WeightsLoaded | Failed

encode = msgspec.msgpack.Encoder().encode
_command = msgspec.msgpack.Decoder(Command).decode
_report = msgspec.msgpack.Decoder(Report).decode


class Link:
    """A process's end of its link to the first of its group."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)

    def receive(self) -> Command:
        """Wait for the next command.

        Raises:
            EOFError: the first process has ended.
        """
        command: Command = _command(self._connection.recv_bytes())
        return command

    def send(self, report: Report) -> None:
        """Send one report.

        Raises:
            OSError: the first process has ended.
        """
        self._connection.send_bytes(encode(report))

    def progress(self, loaded_bytes: int, total_bytes: int) -> None:
        """Report bytes, as a sign of life."""
        self.send(LoadingProgress(loaded_bytes, total_bytes))


class FirstLink:
    """The first process's end of its link to another."""

    def __init__(self, fd: int, rank: int) -> None:
        self._connection, self._rank = Connection(fd), rank

    def send(self, encoded: bytes) -> None:
        """Send one encoded command.

        Raises:
            WorkerFailed: the other process has ended.
        """
        try:
            self._connection.send_bytes(encoded)
        except OSError as error:
            raise WorkerFailed(f"process {self._rank} of the group has ended") from error

    def receive(self) -> Report:
        """Wait for the next report.

        Raises:
            WorkerFailed: the other process has ended.
        """
        try:
            report: Report = _report(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerFailed(
                f"process {self._rank} of the group has ended",
                hint="see its output above; the kernel log shows out-of-memory kills",
            ) from error
        return report
