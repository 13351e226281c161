"""The prose of sources and pages gets no harder to read."""

from tests import language


def test_no_room_has_a_fault():
    faults = [f"{one.place}: {one.rule}: {one.text}" for one in language.faults()]
    assert not faults, "\n".join(faults)


def rules(source):
    return [fault.rule for fault in language._of_source("room/file.py", source)]


SOURCES = {
    'def f():\n    """The part that is computed."""\n': ["fragment"],
    'SIZE = 1\n"""Of a block, in all its layers."""\n': ["fragment"],
    "x = 1  # as for those that wait\n": ["pointer"],
    "# users who wait for a model whose files are missing\n": [],
    'def f():\n    """Find the longest cached prefix."""\n': [],
    "# " + "-" * 98 + "\n": ["pasted"],
    "# a worker that nobody waits for\n": ["person"],
    'say("' + "word " * 16 + '")\n': ["long"],
    'say("' + "word " * 15 + '")\n': [],
}


def test_faults_are_found():
    assert {source: rules(source) for source in SOURCES} == SOURCES
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
