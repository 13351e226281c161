"""Replies through a memfd: what was sent is counted, and what a dead daemon wrote is compared."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket

import pytest

from appliance.daemon.survival import journal as journals
from appliance.daemon.survival.journal import Differs, Head, Journal
from appliance.daemon.survival.reply_file import HIGH_BYTES, NoRoom, ReplyFile

HEAD = b"HTTP/1.1 200 OK\r\ndate: today\r\n\r\n"
LATER_HEAD = b"HTTP/1.1 200 OK\r\ndate: tomorrow, and longer\r\n\r\n"
BODY = b"5\r\nfirst\r\n6\r\nsecond\r\n"
FAILURE = b"7\r\nfailure\r\n0\r\n\r\n"
PING = b"4\r\nping\r\n"


class Reply:
    """A reply file, and its client's end."""

    def __init__(self, fd: int = -1, journal: Journal | None = None) -> None:
        self.client, self.ours = socket.socketpair()
        for each in (self.client, self.ours):
            each.setblocking(False)
        self.calls: list[str] = []
        pause, resume = (lambda: self.calls.append("pause")), (lambda: self.calls.append("resume"))
        self.file = ReplyFile(self.ours, journal or Journal(), pause, resume, fd)
        self.kept_fd = os.dup(self.file.fd)  # as the keeper has it

    async def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await asyncio.get_running_loop().sock_recv(self.client, size - len(data))
        return data

    def read_now(self) -> bytes:
        try:
            return self.client.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.file.close()
        self.client.close()
        self.ours.close()


def left_journal(*pings: int) -> Journal:
    """As a dead daemon left it."""
    journal = Journal()
    journal.open(Head(journals.VERSION, FAILURE, PING, "tiny", None), [b"request"])
    for each in pings:
        journal.ping_at(each)
    return Journal(journal.fd)


def left_reply(*written: bytes, num_sent: int = 0, pings: tuple[int, ...] = ()) -> Reply:
    """A reply of a dead daemon, from which a client has got some bytes."""
    fd = os.memfd_create("test")
    os.write(fd, b"".join(written))
    os.lseek(fd, num_sent, os.SEEK_SET)
    return Reply(fd, left_journal(*pings))


async def test_the_files_offset_counts_what_a_slow_client_was_sent():
    reply = Reply()
    data, num_fds = os.urandom(3 << 20), len(os.listdir("/proc/self/fd"))
    reply.file.write(data[:10])
    assert reply.read_now() == data[:10]
    reply.file.write(data[10:])
    assert reply.file.num_unsent > HIGH_BYTES
    assert reply.calls == ["pause"]
    ended = asyncio.Event()
    reply.file.when_sent(ended.set)
    assert await reply.read(1 << 20) == data[10 : 10 + (1 << 20)]
    assert not ended.is_set()
    num_sent = os.lseek(reply.kept_fd, 0, os.SEEK_CUR)
    assert num_sent + reply.file.num_unsent == len(data)
    assert await reply.read(len(data) - 10 - (1 << 20)) == data[10 + (1 << 20) :]
    await asyncio.wait_for(ended.wait(), 60)
    assert reply.calls == ["pause", "resume"]
    assert os.lseek(reply.kept_fd, 0, os.SEEK_CUR) == len(data)
    assert len(os.listdir("/proc/self/fd")) == num_fds
    reply.close()


async def test_a_reply_that_waits_for_its_client_goes_on_when_the_file_is_given_up():
    reply = Reply()
    reply.file.write(bytes(3 << 20))
    assert reply.calls == ["pause"]
    reply.file.close()
    assert reply.calls == ["pause", "resume"]
    reply.close()


async def test_the_next_daemon_sends_the_rest_and_writes_each_byte_once():
    reply = left_reply(HEAD, BODY[:13], num_sent=len(HEAD) + 4)
    assert reply.read_now() == BODY[4:13]
    reply.file.write(LATER_HEAD)
    for byte in BODY:
        reply.file.write(bytes([byte]))
    assert reply.read_now() == BODY[13:]
    size = os.fstat(reply.kept_fd).st_size
    assert os.pread(reply.kept_fd, size, 0) == HEAD + BODY
    reply.close()


async def test_pings_between_two_daemons_are_no_part_of_the_comparison():
    first, second = len(HEAD), len(HEAD + PING + BODY[:10])
    written = (HEAD, PING, BODY[:10], PING)
    pings = (first, second, second + len(PING))  # the daemon died before the last one was written
    reply = left_reply(*written, num_sent=sum(map(len, written)), pings=pings)
    reply.file.write(LATER_HEAD)
    reply.file.write(BODY)
    assert reply.read_now() == BODY[10:]
    reply.close()


async def test_another_byte_ends_the_stream_with_an_error_and_drops_what_follows():
    reply = left_reply(HEAD, BODY, num_sent=len(HEAD + BODY))
    reply.file.write(HEAD)
    with pytest.raises(Differs):
        reply.file.write(BODY.replace(b"second", b"others"))
    reply.file.write(b"more")
    assert reply.read_now() == FAILURE
    reply.close()


async def test_another_status_ends_the_stream_with_an_error():
    reply = left_reply(HEAD, BODY, num_sent=len(HEAD + BODY))
    reply.file.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
    reply.file.write(b"{}")
    assert reply.read_now() == FAILURE
    reply.close()


async def test_a_reply_that_had_not_begun_may_become_an_error():
    reply = left_reply()
    reply.file.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}")
    assert reply.read_now().endswith(b"{}")
    reply.close()


@pytest.mark.parametrize("is_cut", [True, False])
async def test_what_has_no_room_in_file_or_journal_is_handed_back(is_cut):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    reply = Reply(fd)
    reply.file.write(HEAD)
    assert reply.read_now() == HEAD
    reply.file._journal.is_cut = is_cut
    if not is_cut:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(NoRoom) as raised:
        reply.file.write(BODY)
    assert raised.value.rest == BODY
    assert reply.read_now() == b""
    reply.close()


async def test_a_client_that_left_leaves_nothing_unsent():
    reply = Reply()
    reply.client.close()
    reply.file.write(b"x" * 100)
    assert not reply.file.num_unsent
    ended: list[bool] = []
    reply.file.when_sent(lambda: ended.append(True))
    assert ended
    reply.close()
