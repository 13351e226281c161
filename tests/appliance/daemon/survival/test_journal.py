"""The journal of a request: what one daemon records, another reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.daemon.survival import journal as journals
from appliance.daemon.survival.journal import Foreign, Journal
from engine.errors import Unavailable
from tests.journals import BATCH, HEAD, REQUEST

FIXTURE = Path(__file__).parents[3] / "fixtures" / "journal-of-version-0"
"""As the version before wrote it: its head has other fields after the first two."""


@pytest.fixture
def journal():
    made = Journal()
    yield made
    made.close()


def memfd(data: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


def bytes_of(journal: Journal) -> bytes:
    return os.pread(journal.fd, os.fstat(journal.fd).st_size, 0)


def left(data: bytes) -> Journal:
    """What the next daemon reads."""
    return Journal(memfd(data))


def test_the_next_daemon_replays_and_takes_what_this_one_did(journal):
    assert journal.replayed(lambda: "before it was admitted") == "before it was admitted"
    journal.open(HEAD, REQUEST)
    assert journal.replayed(max, 3, 4) == 4
    journal.took([])
    journal.took(BATCH)
    journal.flush()
    second = left(bytes_of(journal))
    assert (second.head, second.request) == (HEAD, b"".join(REQUEST))
    assert second.is_replay
    assert not journal.is_replay
    assert [second.replayed(min, 1, 2) for _ in range(3)] == ["before it was admitted", 4, 1]
    assert list(second.batches) == [[], BATCH]


def test_a_record_waits_in_memory_until_bytes_depend_on_it(journal):
    journal.open(HEAD, [b"request"])
    size = len(bytes_of(journal))
    journal.took(BATCH)
    assert len(bytes_of(journal)) == size
    journal.flush()
    assert len(bytes_of(journal)) > size


def test_a_whole_reply_records_its_batches_before_its_bytes(journal):
    journal.open(HEAD, [b"request"])
    for _ in range(journals.MAX_UNWRITTEN):
        journal.took(BATCH)
    assert len(left(bytes_of(journal)).batches) == journals.MAX_UNWRITTEN


def test_a_complete_reply_is_known_to_be_complete(journal):
    journal.open(HEAD, [b"request"])
    assert not left(bytes_of(journal)).is_complete
    journal.complete()
    assert left(bytes_of(journal)).is_complete


def test_deaths_and_tokens_are_counted(journal):
    journal.open(HEAD, [b"request"])
    journal.took(BATCH)
    journal.flush()
    assert journal.num_tokens is None  # of a request that was not left
    second = left(bytes_of(journal))
    assert (second.num_deaths, second.num_tokens) == (1, 2)
    second.take_up(HEAD.model)
    third = left(bytes_of(second))
    assert (third.num_deaths, third.num_tokens) == (2, 2)


def test_a_torn_last_record_is_dropped_wherever_it_is_torn(journal):
    journal.open(HEAD, [b"request"])
    whole = len(bytes_of(journal))
    journal.took(BATCH)
    journal.flush()
    data = bytes_of(journal)
    for size in range(whole, len(data)):
        second = left(data[:size])
        assert not second.batches
        second.took(BATCH)
        second.flush()
        assert bytes_of(second) == data
        second.close()
    assert len(left(data).batches) == 1


def test_nothing_of_a_torn_record_is_left_behind_a_shorter_one(journal):
    journal.open(HEAD, [b"request"])
    untorn = left(bytes_of(journal))
    journal.took(BATCH)
    journal.flush()
    torn = left(bytes_of(journal)[:-1])
    for each in (torn, untorn):
        each.took([])
        each.flush()
    assert bytes_of(torn) == bytes_of(untorn)


def test_a_record_that_is_written_in_part_cuts_the_journal(journal, monkeypatch):
    journal.open(HEAD, [b"request"])
    journal.took(BATCH)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        journal.flush()
    assert journal.is_cut
    size = len(bytes_of(journal))
    journal.took(BATCH)
    journal.flush()
    assert len(bytes_of(journal)) == size
    assert journal.is_cut


@pytest.mark.parametrize("data", [b"", b"\x05", b"\x03\0\0\0\x01abc", b"\x01\0\0\0\x04\xc1"])
def test_a_damaged_journal_is_foreign(data):
    with pytest.raises(Foreign):
        left(data)


def test_a_damaged_record_leaves_the_bytes_that_end_its_stream(journal):
    journal.open(HEAD, [b"request"])
    with pytest.raises(Foreign) as found:
        left(bytes_of(journal) + b"\x01\0\0\0\x04\xc1")
    assert found.value.failure == HEAD.failure


def test_another_versions_journal_tells_how_to_end_its_stream():
    with pytest.raises(Foreign) as found:
        left(FIXTURE.read_bytes())
    assert found.value.failure.startswith(b"data: ")


def test_a_request_that_kills_daemons_is_taken_up_twice(journal):
    journal.open(HEAD, [b"request"])
    data = bytes_of(journal)
    for _ in range(journals.MAX_TAKE_UPS):
        taken = left(data)
        taken.take_up("tiny")
        data = bytes_of(taken)
    with pytest.raises(Unavailable) as found:
        left(data).take_up("tiny")
    assert found.value.code == "daemon_died"
    progressing = left(data)
    progressing.took([])  # a wait that ended without tokens is no progress
    progressing.flush()
    with pytest.raises(Unavailable):
        left(bytes_of(progressing)).take_up("tiny")
    progressing.took(BATCH)
    progressing.flush()
    left(bytes_of(progressing)).take_up("tiny")


def test_another_model_takes_no_request_up(journal):
    journal.open(HEAD, [b"request"])
    with pytest.raises(Unavailable) as found:
        left(bytes_of(journal)).take_up("large")
    assert found.value.code == "daemon_died"


def test_a_closed_journal_records_nothing_and_still_gives_values(journal):
    journal.open(HEAD, [b"request"])
    journal.close()
    assert journal.replayed(max, 1, 2) == 2
    journal.took(BATCH)
    journal.flush()
    assert journal.fd == -1
