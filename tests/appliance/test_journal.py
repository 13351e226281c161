"""Lines on stderr have a priority where the journal reads them, and only there."""

import logging
import os

from appliance.journal import is_journal, lines


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
    assert lines("a\nb", logging.ERROR, to_journal=False) == "penstock: a\nb"
