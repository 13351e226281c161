"""Whatever repeats is written a few times, and then counted."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from appliance.daemon.process.repeated_lines import MAX_KINDS, MOST_ALIKE, PERIOD_S, RepeatedLines


class Log:
    """A logger of its own, its lines, and the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.handler = RepeatedLines(self.stream, lambda: self.now_s)
        self.logger = logging.Logger("a test")
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.handler.close()


def test_lines_that_differ_in_numbers_and_ids_are_counted_and_said_once_a_period(log: Log) -> None:
    for number in range(118):
        log.logger.warning("request cmpl-%xa1 is not logged: %d bytes free", number, number)
        log.logger.info("%s", f"worker decode{number} has other words")
    assert len(log.lines) == 2 * MOST_ALIKE
    log.handler.say_counts()
    assert len(log.lines) == 2 * MOST_ALIKE
    log.now_s = PERIOD_S
    log.handler.say_counts()
    log.handler.say_counts()
    counts = log.lines[2 * MOST_ALIKE :]
    assert len(counts) == 2
    assert all(f" {118 - MOST_ALIKE} more" in line for line in counts)
    assert "117 bytes free" in counts[0]
    log.logger.warning("request cmpl-9 is not logged: 0 bytes free")
    assert len(log.lines) == 2 * MOST_ALIKE + 3


def test_what_differs_is_written_and_the_end_leaves_no_count_out(log: Log) -> None:
    log.logger.error("%s", "prefill died")
    for _ in range(MOST_ALIKE + 2):
        log.logger.warning("decode died")
    log.logger.error("decode died")
    assert len(log.lines) == MOST_ALIKE + 2
    log.handler.close()
    assert log.lines[-1].startswith("decode died (")


def test_a_crowd_of_kinds_is_forgotten_with_its_counts_said(log: Log) -> None:
    for _ in range(MOST_ALIKE + 1):
        log.logger.warning("first")
    for number in range(MAX_KINDS):
        log.logger.warning("kind %s", "x" * (number + 1))
    assert sum("first" in line for line in log.lines) == MOST_ALIKE + 1
    assert len(log.handler._kinds) <= MAX_KINDS
