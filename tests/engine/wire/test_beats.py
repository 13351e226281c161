"""A worker's beats are seen by who mapped the same memory, also after the descriptor is closed."""

import os
import subprocess
import sys

from engine.wire.beats import Beats, new_fd

BEATS_TWICE = """
import sys
from engine.wire.beats import Beats
beats = Beats(int(sys.argv[1]))
beats.beat(), beats.beat()
"""


def test_another_process_counts_in_the_same_memory():
    fd = new_fd()
    beats = Beats(fd)
    assert beats.count == 0
    subprocess.run([sys.executable, "-c", BEATS_TWICE, str(fd)], pass_fds=[fd], check=True)
    os.close(fd)
    assert beats.count == 2


def test_waits_for_the_disk_add_up_beside_the_beats():
    fd = new_fd()
    beats, reader = Beats(fd), Beats(fd)
    os.close(fd)
    beats.waited(5)
    beats.beat()
    beats.waited(7)
    assert (reader.count, reader.waited_ns) == (1, 12)
