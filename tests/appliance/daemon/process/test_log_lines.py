"""Lines on stderr have a priority where the journal reads them, and only there."""

from __future__ import annotations

import logging
import os

import pytest

from appliance.daemon.process import log_lines
from appliance.daemon.process.log_lines import is_journal, lines
from appliance.daemon.survival import keeper
from engine.errors import CheckpointError


@pytest.mark.parametrize("is_on_path", [True, False])
def test_a_program_off_the_path_is_named_by_its_own(tmp_path, monkeypatch, is_on_path):
    program = tmp_path / "penstock"
    program.touch(0o755)
    monkeypatch.setattr("sys.argv", [str(program), "serve"])
    monkeypatch.setenv("PATH", str(tmp_path if is_on_path else tmp_path / "other"))
    assert log_lines.own_command() == ("penstock" if is_on_path else str(program))


def test_the_journal_is_known_by_its_stream(tmp_path):
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(stream.fileno(), environ)
        assert not is_journal(stream.fileno(), {})
        with (tmp_path / "redirected").open("w") as other:
            assert not is_journal(other.fileno(), environ)


def test_every_line_of_a_message_has_its_priority_in_the_journal():
    assert lines("a\nb", logging.ERROR, to_journal=True) == "<3>a\n<3>b"
    assert lines("a", logging.WARNING, to_journal=True) == "<4>a"
    assert lines("a", logging.INFO, to_journal=True) == "<6>a"
    assert lines("a", logging.DEBUG, to_journal=True) == "<7>a"


def test_people_read_whose_line_it_is():
    assert lines("a\nb", logging.ERROR, to_journal=False) == "penstock: a\n    b"


HOSTILE = "tensor \x1b]52;c;AAAA\x07 \u202e\x9b\r\n<0>penstock: all is well\x00\x85"


@pytest.mark.parametrize("to_journal", [True, False])
def test_what_a_line_quotes_moves_no_cursor_and_forges_no_line(to_journal):
    told = lines(HOSTILE, logging.ERROR, to_journal=to_journal)
    first, second = told.split("\n")
    assert told.replace("\n", "").isprintable()
    assert second.startswith("<3>" if to_journal else "    ")
    assert first.startswith("<3>tensor" if to_journal else "penstock: tensor")


def test_so_it_is_with_exceptions_and_the_keepers_lines(capfd):
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "%s", (HOSTILE,), None)
    with pytest.raises(CheckpointError) as raised:
        raise CheckpointError(HOSTILE, where=HOSTILE)
    assert str(raised.value).isprintable()
    record.exc_info = (ValueError, ValueError(HOSTILE), None)
    keeper._tell(HOSTILE)
    for told in (log_lines.Formatter().format(record), capfd.readouterr().err):
        assert told.replace("\n", "").isprintable()
