"""What models write in calls becomes JSON that a reply can carry."""

from __future__ import annotations

import json

import pytest

from appliance.api.formats.call_readers import as_json, inner, python_as_json, quoted

HALVES = ['"\\ud800"', '{"a": "x\\udfff"}', "['\\udc80']", "{'\\ud801': 1}", "\ud800", "a\udfffb"]


@pytest.mark.parametrize("text", HALVES)
@pytest.mark.parametrize("read", [lambda text: as_json(text, set()), python_as_json, quoted])
def test_half_a_pair_of_surrogates_can_be_sent(text, read):
    written = read(text)
    written.encode()
    json.loads(written)
    json.loads(f'"{inner(text)}"')


def test_a_whole_pair_is_the_character_that_it_is():
    assert as_json('"\\ud83d\\ude00"', set()) == '"\U0001f600"'
