"""Filters and orders are pure: text and requests in, requests out."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tui import frames
from tui.filters import NUMBERS, WORDS, Filter, FilterError, parse
from tui.request_order import SORTS, RequestListing

REQUESTS = [
    *(frames.request(number) for number in range(1, 9)),
    frames.request(9, "queued"),
    frames.request(10, "prefilling", user=None),
    frames.finished(11),
]

words = st.sampled_from(["ana", "bo", "decod", "queued", "cmpl", "zz"])
numbers = st.builds(
    "{}{}{}".format,
    st.sampled_from(sorted(NUMBERS)),
    st.sampled_from(["<", "<=", ">", ">=", "="]),
    st.sampled_from(["0", "12", "1.5", "4k", "1M"]),
)
texts = st.builds("{}:{}".format, st.sampled_from(sorted(WORDS)), words)
conditions = st.builds("{}{}".format, st.sampled_from(["", "!"]), st.one_of(words, numbers, texts))
filters = st.lists(conditions, max_size=4).map(" ".join)


def passing(text: str) -> list[int]:
    parsed = parse(text)
    return [index for index, r in enumerate(REQUESTS) if parsed.admits(r)]


@given(filters)
def test_a_filter_reads_its_own_text_again(text):
    assert parse(parse(text).text) == parse(text)


@given(filters, filters)
def test_conditions_together_admit_what_each_admits(one, other):
    assert passing(f"{one} {other}") == sorted({*passing(one)} & {*passing(other)})


@given(conditions.filter(lambda text: not text.startswith("!")))
def test_a_condition_and_its_negation_divide_the_requests(text):
    assert sorted(passing(text) + passing(f"!{text}")) == list(range(len(REQUESTS)))


@given(st.text(max_size=20))
def test_any_text_is_a_filter_or_refused_as_one(text):
    with contextlib.suppress(FilterError):
        assert set(passing(text)) <= set(range(len(REQUESTS)))


def test_an_empty_filter_admits_everything():
    assert passing("") == list(range(len(REQUESTS)))
    assert parse("  ") == Filter()


def test_the_example_reads_as_it_looks():
    wanted = frames.request(1, "queued", user="ana", prompt_tokens=5000, ttft_ms=600.0)
    example = parse("user:ana state:queued in>4096 ttft>500 !bench")
    assert example.admits(wanted)
    for change in (
        {"user": "bo"},
        {"phase": "decoding"},
        {"prompt_tokens": 4096},
        {"ttft_ms": 500.0},
        {"ttft_ms": None},
        {"model": "Bench-1"},
    ):
        assert not example.admits(frames.msgspec.structs.replace(wanted, **change))


def test_a_number_that_is_not_reported_meets_no_comparison():
    unreported = frames.request(1, "queued")
    assert unreported.ttft_ms is None
    assert not any(parse(f"ttft{sign}0").admits(unreported) for sign in ("<", ">=", "="))
    assert parse("!ttft>0").admits(unreported)


@pytest.mark.parametrize(
    "text", ["!", "ttft>", "ttft>soon", "user>3", "in:3", "user:", "nobody:x", "in>-1", "in>1e9"]
)
def test_what_cannot_be_read_is_refused_with_a_reason(text):
    with pytest.raises(FilterError, match=r"\w{2,}"):
        parse(text)


def test_a_text_and_a_number_that_are_taken_for_each_other_are_named():
    with pytest.raises(FilterError, match="in is a number: in>500"):
        parse("in:3")
    with pytest.raises(FilterError, match="user is a text: user:"):
        parse("user>3")


@given(st.sampled_from(sorted(SORTS)), st.booleans(), st.permutations(REQUESTS))
def test_an_order_loses_nothing_and_puts_the_unreported_last(sort, is_reversed, requests):
    shown = RequestListing(sort, is_reversed).of(requests)
    assert sorted(r.id for r in shown) == sorted(r.id for r in requests)
    values = [SORTS[sort](request) for request in shown]
    known = [value for value in values if value is not None]
    assert values[: len(known)] == sorted(known, reverse=not is_reversed)


def test_sorting_is_stable():
    rows = [frames.request(number, ttft_ms=value) for number, value in enumerate((5.0, 9.0, 9.0))]
    assert [r.id for r in RequestListing("ttft").of(rows)] == [rows[1].id, rows[2].id, rows[0].id]


def test_sorting_goes_round():
    listing = RequestListing()
    seen = []
    for _ in SORTS:
        seen.append(listing.sort)
        listing = listing.sorted_by_next()
    assert seen == list(SORTS)
    assert listing == RequestListing()


def test_finished_requests_follow_the_live_ones_the_newest_first():
    live, ended = REQUESTS[:2], [frames.finished(20), frames.finished(30), REQUESTS[0]]
    shown = RequestListing().arranged(live, ended)
    assert [r.id for r in shown] == [live[1].id, live[0].id, ended[0].id, ended[1].id]
    assert shown[1].phase == "decoding"
    assert RequestListing(sort="in").arranged([], ended[:2])[0].prompt_tokens == max(
        r.prompt_tokens for r in ended[:2]
    )
