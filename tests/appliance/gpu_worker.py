"""A worker process without a GPU that starts as one with a GPU does; it computes nothing.

What it exports is its process id, and what it maps is what it calls its attention. It exits when it
is told of memory a second time.
"""

import argparse
import contextlib
import os
import socket
from pathlib import Path

from engine.errors import ChannelClosed
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    MapShared,
    PoolMade,
    Ready,
    Setup,
    SharedMemory,
    WeightsComplete,
    WeightsLoaded,
)

NUM_BLOCKS = 40


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int)
    parser.add_argument("--cpus")
    parser.add_argument("--sharing")
    parser.add_argument("--counters", type=Path)
    options = parser.parse_args()
    channel = WorkerChannel(socket.socket(fileno=options.channel_fd))
    me = str(os.getpid()).encode()
    if options.counters is not None:  # as torch counts the users of what it exports
        (options.counters / f"torch_{os.getpid()}_1_0").touch()
    setup = channel.expect(Setup)
    channel.send(WeightsLoaded())
    channel.expect(WeightsComplete)
    if setup.gpu.shares == "maps":
        memory = channel.expect(MapShared).memory
    else:
        assert setup.gpu.min_blocks in (2, NUM_BLOCKS)
        num_blocks = min(setup.pool.num_blocks, NUM_BLOCKS)
        memory = SharedMemory(me, me, num_blocks, b"")
        channel.send(PoolMade(num_blocks, memory))
    tokens = setup.max_num_batched_tokens
    channel.send(Ready(memory.pool.decode(), tokens, options.sharing))
    while not any(isinstance(command, MapShared) for command in channel.receive(wait=True)):
        pass


if __name__ == "__main__":
    with contextlib.suppress(ChannelClosed):
        main()
