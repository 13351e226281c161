"""One value, one line, however a client cuts its lines."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from appliance.json.lines import encode_line

TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("\u0085\u2028\u2029\v\f\x1c\x1e\r\n"),
    )
)


@given(st.dictionaries(TEXTS, TEXTS))
def test_no_text_makes_a_second_line(value):
    line = encode_line(value).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == value
