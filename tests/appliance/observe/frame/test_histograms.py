"""Which bucket a value counts in."""

from __future__ import annotations

from appliance.observe.frame.histograms import Histogram


def test_a_value_at_an_edge_is_within_it_and_one_beyond_all_only_in_the_total() -> None:
    histogram = Histogram((1, 2), (2, 5))
    for value in (1, 2, 2.5, 6):
        histogram.observe(value)
    assert histogram.up_to((1, 2, 5)) == [1, 2, 3]
    assert histogram.up_to((2, 5)) == [2, 3]
    assert (histogram.total, histogram.sum) == (4, 11.5)
