import asyncio
import socket
import threading

import msgspec
import pytest

from engine.errors import ChannelClosed, ChannelGarbled
from engine.wire.channel import DaemonChannel, WorkerChannel, frame
from engine.wire.messages import Admit, LoadingProgress, Release, WeightsComplete
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def admit(num_tokens):
    return Admit(
        seq_id=1,
        generation=1,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_table=[1],
        spec=RunSpec(SamplingParams(max_tokens=1, seed=0)),
        until_output=1,
    )


async def test_large_and_small_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    daemon, worker = await DaemonChannel.open(ours), WorkerChannel(theirs)
    sent = [admit(200_000), Release(1, 1), admit(3), *[Release(i, 1) for i in range(1000)]]
    for command in sent:
        daemon.send(command)
    received = []
    while len(received) < len(sent):
        received += await asyncio.to_thread(worker.receive, wait=True)
    assert received == sent
    daemon.close()


def test_receive_without_waiting_returns_nothing_when_nothing_has_come(pair):
    _, theirs = pair
    assert WorkerChannel(theirs).receive(wait=False) == []


async def test_a_command_that_came_with_an_expected_one_is_received_once(pair):
    ours, theirs = pair
    daemon, worker = await DaemonChannel.open(ours), WorkerChannel(theirs)
    for command in (Release(1, 1), Release(2, 1)):
        daemon.send(command)
    await asyncio.sleep(0)
    assert await asyncio.to_thread(worker.expect, Release) == Release(1, 1)
    assert await asyncio.to_thread(worker.receive, wait=True) == [Release(2, 1)]
    assert worker.receive(wait=False) == []
    daemon.close()


async def test_everything_a_dead_worker_sent_is_read_before_the_end(pair):
    ours, theirs = pair
    daemon, worker = await DaemonChannel.open(ours), WorkerChannel(theirs)
    for i in range(3):
        worker.send(LoadingProgress(i, 3))
    theirs.close()
    assert [(await daemon.receive()).loaded_bytes for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ChannelClosed):
        await daemon.receive()
    daemon.send(WeightsComplete())  # to a dead worker: lost, not an error
    daemon.close()


async def test_a_frame_cut_by_death_is_the_end(pair):
    ours, theirs = pair
    daemon = await DaemonChannel.open(ours)
    theirs.sendall(frame(b"a whole one")[:-4])
    theirs.close()
    with pytest.raises(ChannelClosed):
        await daemon.receive()
    daemon.close()


GARBAGE = {
    "a length beyond all messages": b"\xff" * 9,
    "no msgpack": frame(b"\xc1\xc1"),
    "no message": frame(b"\x07"),
    "text that is no UTF-8": frame(b"\xa2\xff\xff"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_ends_a_channel_at_either_end(pair, garbage):
    ours, theirs = pair
    daemon, worker = await DaemonChannel.open(ours), WorkerChannel(theirs)
    worker.send(LoadingProgress(1, 1))
    theirs.sendall(garbage)
    assert await daemon.receive() == LoadingProgress(1, 1)
    with pytest.raises(ChannelGarbled):
        await daemon.receive()
    ours.send(garbage)
    with pytest.raises(ChannelGarbled):
        worker.receive(wait=True)
    daemon.close()


async def test_no_flipped_bit_of_a_message_is_believed():
    """Many would be another message: a quarter of these is one without the checksum."""
    body = msgspec.msgpack.encode(Release(1, 7))
    whole = frame(body)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(damaged))
        reader.feed_eof()
        with pytest.raises(ChannelClosed):  # of which ChannelGarbled is one
            await DaemonChannel(reader, None).receive()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(damaged)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(ChannelClosed):
                WorkerChannel(theirs).receive(wait=True)


async def test_worker_sees_the_end_after_the_last_command(pair):
    ours, theirs = pair
    daemon, worker = await DaemonChannel.open(ours), WorkerChannel(theirs)
    daemon.send(WeightsComplete())
    await asyncio.sleep(0)
    daemon.close()
    await asyncio.sleep(0.01)
    assert worker.receive(wait=True) == [WeightsComplete()]
    with pytest.raises(ChannelClosed):
        worker.receive(wait=False)
    with pytest.raises(ChannelClosed):
        worker.send(LoadingProgress(1, 1))


def test_a_waiting_receive_wakes_up_for_a_command(pair):
    ours, theirs = pair
    worker = WorkerChannel(theirs)
    received = []
    thread = threading.Thread(target=lambda: received.extend(worker.receive(wait=True)))
    thread.start()
    body = msgspec.msgpack.encode(WeightsComplete())
    ours.sendall(frame(body))
    thread.join(120)
    assert received == [WeightsComplete()]


def test_a_thread_that_sends_on_an_end_that_another_has_closed_is_told_as_of_a_dead_daemon(pair):
    _, theirs = pair
    worker = WorkerChannel(theirs)
    theirs.close()
    with pytest.raises(ChannelClosed):
        worker.send(LoadingProgress(0, 1))
