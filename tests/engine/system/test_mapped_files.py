import os

import pytest

from engine.system.mapped_files import map_unchanged, resident_bytes


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    yield fd
    os.close(fd)


def test_what_is_written_to_a_mapping_does_not_reach_the_file(fd):
    before = os.pread(fd, 16, 0)
    memory = map_unchanged(fd, 8 << 20)
    memory[:16] = bytes(16)
    assert os.pread(fd, 16, 0) == before


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    path = tmp_path / "holes"
    path.touch()
    os.truncate(path, 1 << 42)
    fd = os.open(path, os.O_RDONLY)
    assert len(map_unchanged(fd, 1 << 42)) == 1 << 42
    os.close(fd)


def test_bytes_in_memory_are_those_that_some_process_has_read(fd):
    memory = map_unchanged(fd, 8 << 20)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(memory):
        pytest.skip("this file system keeps what it is told to drop")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel reads nothing ahead
    os.pread(fd, 4 << 20, 0)
    assert resident_bytes(memory) == 4 << 20
