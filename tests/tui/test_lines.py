from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tui.lines import (
    SPARK_LEVELS,
    STATE_CELLS,
    Run,
    Tone,
    clip,
    fit,
    fold,
    gauge,
    pad,
    pairs,
    sparkline,
    state_bar,
    text_of,
    to_ascii,
    width_of,
)

samples = st.lists(st.none() | st.floats(min_value=0, max_value=1e9), max_size=70)
counts = st.dictionaries(st.sampled_from(list(STATE_CELLS)), st.integers(0, 10**6))


@given(st.lists(st.text()), st.integers(0, 50), st.booleans())
def test_a_fitted_line_has_exactly_its_width_and_is_printable(texts, width, is_ascii):
    line = fit([Run(text) for text in texts], width, is_ascii=is_ascii)
    assert width_of(line) == width
    assert text_of(line).isprintable()
    assert text_of(line).isascii() or not is_ascii


def test_fitting_keeps_the_tones():
    assert fit([Run("ab", Tone.BAD), Run("cd", Tone.GOOD)], 3) == [
        Run("ab", Tone.BAD),
        Run("…", Tone.GOOD),
    ]


def test_a_line_is_cut_once():
    assert text_of(fit([Run("a b"), Run("cd")], 3)) == "a b"
    assert text_of(fit([Run("in a file"), Run(" more")], 5)) == "in a…"
    assert text_of(fit([Run("in  a file"), Run(" more")], 5)) == "in…  "


def test_a_cut_between_words_is_preferred_where_it_leaves_half_of_the_room():
    assert clip("from 256 tokens a step", 20) == "from 256 tokens a…"
    assert clip("an immeasurable word", 10) == "an immeas…"


@given(st.lists(st.text("ab ", max_size=30), max_size=6), st.integers(1, 40), st.integers(0, 5))
def test_a_folded_line_keeps_all_of_its_words_and_their_tones(texts, width, indent):
    tones = [Tone.BAD, Tone.GOOD] * 3
    line = [Run(text, tone) for text, tone in zip(texts, tones, strict=False)]
    rows = fold(line, width, indent)
    letters = [(c, r.tone) for r in line for c in r.text if c != " "]
    assert [(c, run.tone) for row in rows for run in row for c in run.text if c != " "] == letters
    if width > indent:
        assert all(len(text_of(row).rstrip()) <= width for row in rows)


def test_a_line_is_folded_between_words_and_goes_on_indented():
    rows = fold([Run("12:00 "), Run("SSD cache in /tmp: 0 blocks", Tone.BAD)], 20, 6)
    assert [text_of(row) for row in rows] == ["12:00 SSD cache in", "      /tmp: 0 blocks"]
    assert rows[1] == [Run("      "), Run("/tmp: 0 blocks", Tone.BAD)]
    assert fold([Run("short")], 20, 6) == [[Run("short")]]


def test_every_character_of_the_console_has_an_ascii_stand_in():
    drawn = SPARK_LEVELS + "".join(STATE_CELLS.values()) + "…│●▲■"
    assert "?" not in to_ascii(drawn)


def test_block_states_stay_apart_in_ascii():
    assert len({to_ascii(cell) for cell in STATE_CELLS.values()}) == len(STATE_CELLS)


@given(samples, st.integers(0, 80))
def test_a_sparkline_has_exactly_its_width(values, width):
    assert len(sparkline(values, width)) == width


def test_a_sparkline_tells_absent_zero_small_and_highest_apart():
    assert sparkline([None, 0.0, 0.001, 8.0], 5) == "  ▁▂█"


def test_a_sparkline_shows_the_newest_samples_at_the_right():
    assert sparkline([8.0, 0.0, 8.0], 2) == "▁█"


def test_a_gauge_is_clamped_and_empty_when_not_reported():
    assert gauge(1.7, 4) == "████"
    assert gauge(-1.0, 4) == "░░░░"
    assert gauge(None, 4) == "░░░░"


@given(counts, st.integers(0, 90))
def test_a_state_bar_has_exactly_its_width(num_by_state, width):
    assert len(state_bar(num_by_state, width)) == width


@given(counts, st.integers(len(STATE_CELLS), 90))
def test_every_state_that_has_blocks_gets_a_cell(num_by_state, width):
    bar = state_bar(num_by_state, width)
    for state, num in num_by_state.items():
        if num:
            assert STATE_CELLS[state] in bar


@given(counts, st.integers(1, 90))
def test_a_state_without_blocks_gets_no_cell(num_by_state, width):
    bar = state_bar(num_by_state, width)
    if any(num_by_state.values()):
        for state, cell in STATE_CELLS.items():
            if not num_by_state.get(state):
                assert cell not in bar


def test_a_state_bar_is_proportional():
    assert state_bar({"active": 50, "free": 50}, 10) == "█████░░░░░"


def test_pairs_stand_in_columns_and_never_touch():
    assert text_of(pairs(20, ("a", "1"), ("b", "2"))) == "a 1       b 2"
    assert text_of(pairs(20, ("step", "402.0 ms"), ("b", "2"))) == "step 402.0 ms b 2"


@given(st.text(), st.integers(min_value=0, max_value=40), st.booleans())
def test_padded_text_has_exactly_the_width_and_nothing_unprintable(text, width, right):
    padded = pad(text, width, right=right)
    assert cell_len(padded) == width
    assert padded.isprintable()


def test_a_cut_is_marked():
    assert clip("penstock", 5) == "pens…"
    assert clip("penstock", 8) == "penstock"
