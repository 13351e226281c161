"""Send framed messages between the daemon and a worker over one socket pair.

A frame is a 4-byte little-endian length, a CRC-32 of length and body, and a msgpack body, one
tagged struct of engine.wire.messages.
Invariant: messages arrive whole and in order; after the peer's death all its messages are read
before ChannelClosed; bytes that are no message, or differ from what was sent, end the channel.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.errors import ChannelClosed, ChannelGarbled
from engine.wire.messages import Command, Report
from engine.wire.not_json import NOT_JSON

Expected = TypeVar("Expected", bound=Command)
Message = TypeVar("Message")

_HEAD = struct.Struct("<II")
"""A body's length, and the CRC of both."""
_LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 64 << 20
"""Many times the longest prompt; a greater length is garbage, not to be waited for."""
_RECEIVE_BYTES = 1 << 18


def _crc(length: int, body: bytes | bytearray) -> int:
    return zlib.crc32(body, zlib.crc32(length.to_bytes(_LENGTH_BYTES, "little")))


def frame(body: bytes) -> bytes:
    """Return what is sent of a message's body."""
    return _HEAD.pack(len(body), _crc(len(body), body)) + body


def _length_and_crc(head: bytes | bytearray) -> tuple[int, int]:
    length, crc = _HEAD.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ChannelGarbled(f"received a message of {length} bytes")
    return length, crc


def _decoded(
    decode: Callable[[bytes | bytearray], Message], body: bytes | bytearray, crc: int
) -> Message:
    if crc != _crc(len(body), body):
        raise ChannelGarbled(f"received a damaged message of {len(body)} bytes")
    try:
        return decode(body)
    except NOT_JSON as error:
        raise ChannelGarbled(f"received bytes that are no message: {error}") from error


class WorkerChannel:
    """The worker's end: sends block; receives may wait or not."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._is_sending = threading.Lock()
        self._buffer = bytearray()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._unread: list[Command] = []
        """Commands that arrived together with an expected one."""

    def expect(self, kind: type[Expected]) -> Expected:
        """Wait for the next command, which must be of this kind.

        Raises:
            ChannelClosed: the daemon closed the channel.
            TypeError: it is of another kind, which is a bug.
        """
        command, *self._unread = self.receive(wait=True)
        if not isinstance(command, kind):
            raise TypeError(f"expected {kind.__name__}, got {type(command).__name__}")
        return command

    def send(self, report: Report) -> None:
        """Send one report from any thread; wait while the daemon is slow to read.

        Raises:
            ChannelClosed: the daemon closed the channel, or another thread has closed this end.
        """
        try:
            with self._is_sending:
                self._socket.sendall(frame(self._encode(report)))
        except OSError as error:
            raise ChannelClosed("the daemon closed the channel") from error

    def receive(self, *, wait: bool) -> list[Command]:
        """Return all commands that have arrived; with `wait`, at least one.

        Raises:
            ChannelClosed: the daemon closed the channel and all its commands have been returned.
            ChannelGarbled: what came is no command.
        """
        commands, self._unread = [*self._unread, *self._take_frames()], []
        while select.select([self._socket], [], [], None if wait and not commands else 0)[0]:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                if commands:
                    break  # the next call finds the end again
                raise ChannelClosed("the daemon closed the channel")
            self._buffer += data
            commands += self._take_frames()
        return commands

    def has_commands(self) -> bool:
        """Say whether a command waits to be received, or the daemon closed the channel."""
        return bool(self._unread or select.select([self._socket], [], [], 0)[0])

    def _take_frames(self) -> list[Command]:
        commands: list[Command] = []
        start = 0
        while len(self._buffer) - start >= _HEAD.size:
            body = start + _HEAD.size
            length, crc = _length_and_crc(self._buffer[start:body])
            end = body + length
            if len(self._buffer) < end:
                break
            commands.append(_decoded(self._decode, self._buffer[body:end], crc))
            start = end
        del self._buffer[:start]
        return commands


class DaemonChannel:
    """The daemon's end, on its loop: sends never wait, receives are awaited one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent: list[bytes] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Report).decode

    @classmethod
    async def open(cls, sock: socket.socket) -> DaemonChannel:
        """Take over the daemon's end of a socketpair."""
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, command: Command) -> None:
        """Queue one command for sending, together with later ones of this turn of the loop.

        So sequences admitted together arrive together, and share a step. If the worker has died,
        the command is lost: receive reports the death, and the reaping that follows ends the
        command.
        """
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(self._encode(command)))

    def _flush(self) -> None:
        if self._unsent and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    async def receive(self) -> Report:
        """Wait for the worker's next message.

        Raises:
            ChannelClosed: the worker closed the channel and all its reports have been returned.
            ChannelGarbled: what came is no report.
        """
        try:
            length, crc = _length_and_crc(await self._reader.readexactly(_HEAD.size))
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError) as error:
            raise ChannelClosed("the worker closed the channel") from error
        report: Report = _decoded(self._decode, body, crc)
        return report

    def close(self) -> None:
        """Close this end; the worker sees it at its next receive and exits."""
        self._flush()
        self._writer.close()
