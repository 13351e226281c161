"""The prose of sources and pages gets no harder to read."""

import pytest

from tests import language
from tests.language import Fault

COUNTS, ALLOWED = language.counts(), language.allowances()


@pytest.mark.parametrize("room", sorted({*COUNTS, *ALLOWED}))
def test_a_room_has_no_more_faults_than_it_may(room):
    allowed = ALLOWED.get(room, {})
    over = {r: n for r, n in COUNTS.get(room, {}).items() if n > allowed.get(r, 0)}
    assert not over, f"`python -m tests.language {room}` lists them; {allowed} are allowed"


def rules(source):
    return [fault.rule for fault in language._of_source("room/file.py", source)]


def test_faults_are_found():
    assert rules('def f():\n    """The part that is computed."""\n') == ["fragment"]
    assert rules('SIZE = 1\n"""Of a block, in all its layers."""\n') == ["fragment"]
    assert rules("x = 1  # as for those that wait\n") == ["pointer"]
    assert rules("# users who wait for a model whose files are missing\n") == []
    assert rules('def f():\n    """Find the longest cached prefix."""\n') == []
    assert rules("# " + "-" * 98 + "\n") == ["pasted"]
    assert rules("# a worker that nobody waits for\n") == ["person"]
    assert rules('say("' + "word " * 16 + '")\n') == ["long"]
    assert rules('say("' + "word " * 15 + '")\n') == []
    assert "banned" in rules("x = 1  # too near to call\n")


def test_a_sentence_in_an_assert_is_found():
    source = "assert error.what == 'the queue is full of prompts'\nassert x == 'a short text'\n"
    source += "with raises(E, match='the disk of the cache is full'):\n    pass\n"
    source += "assert path == '/run/a/socket/of/the/daemon.sock'\n"
    assert [fault.rule for fault in language._of_test("tests/test_x.py", source)] == ["wording"] * 2


def test_a_page_is_read_without_its_commands():
    text = "Plain words.\n```sh\nwho is nobody\n```\nand `whoever`"
    assert list(language._of_page("docs/x.md", text)) == []
    assert [fault.rule for fault in language._of_page("x", "whoever")] == ["banned", "person"]


def test_lowering_never_raises(tmp_path, monkeypatch):
    file = tmp_path / "allowance.toml"
    file.write_text('"a" = { person = 1 }\n')
    monkeypatch.setattr(language, "ALLOWANCE", file)
    many = [Fault("a", "person", "", "")] * 3 + [Fault("b", "long", "", "")]
    monkeypatch.setattr(language, "faults", lambda: iter(many))
    language.lower()
    assert language.allowances() == {"a": {"person": 1}, "b": {"long": 1}}
