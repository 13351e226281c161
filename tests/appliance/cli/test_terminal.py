"""Rows in five formats: what was put in comes out, and nothing in it is obeyed by anyone."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli import fact_pages, listings, tables, terminal
from appliance.cli.tables import Format, Listing, Range, TableColumn, WordWrap, csv_cell, flat, one
from appliance.observe.frame import figures
from engine.errors import PenstockError

COLUMNS = (
    TableColumn("NAME", "name"),
    TableColumn("N", "n", figures.count),
    TableColumn("X", "x", is_wide=True),
)
rows = st.lists(
    st.fixed_dictionaries(
        {"name": st.none() | st.text(), "n": st.none() | st.integers(), "x": st.text()}
    ),
    max_size=5,
)


@given(rows, st.sampled_from(Format))
def test_no_format_lets_a_character_through_that_a_terminal_obeys(listed, form):
    shown = Listing("v", COLUMNS, form).render(listed)
    assert all(char == "\n" or char.isprintable() for char in shown)
    shown.encode()


@given(rows)
def test_json_and_ndjson_hold_the_rows_as_they_are(listed):
    document = json.loads(Listing("v", COLUMNS, Format.JSON).render(listed))
    assert document == {"schema": "penstock.v/1", "data": listed}
    lines = Listing("v", COLUMNS, Format.NDJSON).render(listed).splitlines()
    assert [json.loads(line) for line in lines] == listed


@given(rows)
def test_csv_has_a_line_and_every_column_for_each_row(listed):
    shown = Listing("v", COLUMNS, Format.CSV).render(listed)
    assert shown.count("\n") == len(listed) + 1
    read = list(csv.reader(io.StringIO(shown)))
    assert read[0] == ["name", "n", "x"]
    assert [line[1] for line in read[1:]] == [
        "" if row["n"] is None else str(row["n"]) for row in listed
    ]


@given(st.text())
def test_a_spreadsheet_takes_no_text_for_a_formula(value):
    assert str(csv_cell(value)).lstrip()[:1] not in ("=", "+", "-", "@")


def test_numbers_in_csv_stay_numbers():
    assert [csv_cell(value) for value in (-1, 0.5, None, True)] == [-1, 0.5, None, True]


@given(rows.filter(bool))
def test_columns_of_a_table_begin_where_their_titles_do(listed):
    header, *lines = Listing("v", COLUMNS, Format.WIDE).render(listed).split("\n")
    start = header.index("X")
    for line, row in zip(lines, listed, strict=False):
        assert line[start:] == tables.word(row["x"]).rstrip()


def test_a_followed_table_has_one_header_and_columns_that_only_widen():
    listing = Listing("v", COLUMNS, Format.TABLE)
    assert listing.render([{"name": "ann", "n": 1}]) == "NAME  N\nann   1\n"
    assert listing.render([{"name": "beatrice", "n": 2}]) == "beatrice  2\n"
    assert listing.render([{"name": "al", "n": 30}]) == "al        30\n"


NARROW = (
    TableColumn("WHEN", "when", short=figures.day_and_time),
    TableColumn("ID", "id", short=figures.short_id),
    TableColumn("USER", "user", rank=2),
    TableColumn("N", "n", figures.count, rank=1),
)
CALL = {"when": "2026-11-22T14:02:11.004Z", "id": "chatcmpl-3f9a21c0d7e2b1a4", "n": 7}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        (None, "2026-11-22T14:02:11.004Z  chatcmpl-3f9a21c0d7e2b1a4  ann   7"),
        (60, "2026-11-22T14:02:11.004Z  chatcmpl-3f9a21c0d7e2b1a4  ann   7"),
        (59, "11-22 14:02:11  3f9a21c0  ann   7"),
        (32, "11-22 14:02:11  3f9a21c0  7"),
        (26, "11-22 14:02:11  3f9a21c0"),
        (3, "11-22 14:02:11  3f9a21c0"),
    ],
)
def test_a_table_shortens_to_its_terminal_before_it_leaves_columns_out(room, line):
    listing = Listing("v", NARROW, Format.TABLE, room=room)
    assert listing.render([{**CALL, "user": "ann"}]).splitlines()[1] == line
    later = listing.render([{**CALL, "user": "bea"}]).splitlines()
    assert later == [line.replace("ann", "bea")]
    wide = Listing("v", NARROW, Format.WIDE, room=room).render([{**CALL, "user": "ann"}])
    assert CALL["id"] in wide


def test_the_log_fits_eighty_columns():
    rows = [{**LOG_ROW, "id": f"chatcmpl-{number:032x}"} for number in range(3)]
    shown = Listing("log", listings.LOG, Format.TABLE, room=80).render(rows)
    assert max(map(len, shown.splitlines())) <= 80
    assert "E2E" in shown.splitlines()[0]


LOG_ROW = {
    "received_at": "2026-11-22T14:02:11.004Z", "user": "uid:1000", "prompt_tokens": 12_345,
    "completion_tokens": 1_234, "queue_ms": 123.4, "prefill_ms": 123.4, "ttft_ms": 1234.0,
    "handoff_ms": 12.3, "tpot_ms": 12.3, "e2e_ms": 123_456.0, "transport": "alias",
    "finish_reason": "tool_calls",
}  # fmt: skip


def test_an_empty_list_is_a_header_and_an_empty_document():
    assert Listing("v", COLUMNS, Format.TABLE).render([]) == "NAME  N\n"
    assert json.loads(Listing("v", COLUMNS, Format.JSON).render([]))["data"] == []
    assert Listing("v", COLUMNS, Format.NDJSON).render([]) == ""


def test_one_thing_is_keys_and_values_in_csv():
    content = {"a": {"b": [1, None]}, "c": "=x"}
    assert flat(content) == {"a.b.0": 1, "a.b.1": None, "c": "=x"}
    assert one("v", content, Format.CSV) == "key,value\na.b.0,1\na.b.1,\nc,'=x\n"


def test_what_the_stages_leave_of_the_whole_is_shown():
    frame = {"queue_ms": 10.0, "prefill_ms": 20.0, "e2e_ms": 42.5}
    sums = fact_pages.waterfall(frame, width=80, bar="#")[-3:]
    assert [line.split()[-1] for line in sums] == ["30ms", "42.5ms", "12.5ms"]


def test_a_long_fact_of_a_request_goes_on_below_itself() -> None:
    frame = {"id": "cmpl-1", "route": "move", "route_reason": "cheapest: max ITL 4 ms"}
    lines = fact_pages.request_page(frame, width=60, bar="#", room=60).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("route "))
    assert lines[at + 1].startswith(" " * 13)
    assert all(len(line) <= 60 for line in lines)
    words = " ".join(fact_pages.request_page(frame, width=60, bar="#").split())
    assert " ".join(" ".join(lines).split()) == words


def streamed(text: str, width: int, cuts: list[int] | None = None) -> list[str]:
    """The lines of a terminal that a text was streamed to, piece by piece."""
    wrap, lines = WordWrap(), [""]
    bounds = [0, *sorted(cuts or range(len(text))), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    for token in re.findall(
        r"\x1b\[\d+D|\x1b\[K|[^\x1b]", "".join(wrap.of(p, width) for p in pieces)
    ):
        if token == "\n":
            lines.append("")
        elif token.endswith("D"):
            lines[-1] = lines[-1][: -int(token[2:-1])]
        elif token != "\x1b[K":
            lines[-1] += token
    return lines


def test_an_open_range_does_not_take_its_least() -> None:
    allowed = Range(0, 1, is_open=True)
    assert allowed.refusal(0)
    assert not allowed.refusal(1)
    assert not Range(0, 1).refusal(0)


def test_words_that_do_not_fit_go_to_the_next_line_whole() -> None:
    text = "a reply of several words\nand more"
    assert streamed(text, 11) == ["a reply of", "several ", "words", "and more"]
    assert streamed("一二三四五", 7) == ["一二三", "四五"]


def test_code_and_words_longer_than_a_line_are_left_as_they_are() -> None:
    code = "```py\nprint('this is a long line')\n```\n    and an indented one"
    assert streamed(code, 10) == code.split("\n")
    assert streamed(f"see {'x' * 30} now", 10) == ["see ", "x" * 30, "now"]


@given(st.text("ab \n`", max_size=60), st.integers(4, 20), st.lists(st.integers(0, 60), max_size=9))
def test_streaming_loses_nothing_but_spaces_at_the_edge(
    text: str, width: int, cuts: list[int]
) -> None:
    shown = streamed(text, width, cuts)
    assert "".join("".join(shown).split()) == "".join(text.split())
    assert streamed(text, width) == shown


@pytest.mark.parametrize(
    ("hint", "on_path", "is_told"),
    [
        ("`penstock pull o/m`", "bin", False),
        ("`penstock pull o/m`", "", True),
        ("start 'penstock serve'", "", True),
        ("see penstock.toml", "", False),
    ],
)
def test_a_hint_with_a_command_that_is_not_on_the_path_says_where_it_is(
    hint, on_path, is_told, tmp_path, monkeypatch, capsys
) -> None:
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / on_path) if on_path else "")
    monkeypatch.setattr("sys.argv", [str(program), "show"])
    terminal.report(PenstockError("it failed", hint=hint))
    shown = capsys.readouterr().err
    assert (f"{program} " in shown) == is_told
    assert len(shown.splitlines()) == 2


def test_a_wait_is_told_like_every_line_of_the_programs_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PAUSE_WITHOUT_TERMINAL_S", 0.0)
    terminal.ProgressLine().wait("loading the model")
    assert capsys.readouterr().err.startswith("penstock: ")
