"""A reply that repeats itself is noticed; one that only has a refrain is not."""

import pytest

from appliance.cli.loops import LOOP_CHARS, repeats_itself


@pytest.mark.parametrize("piece", ["la République ", "x", "\n", "one\ntwo-three. " * 2])
@pytest.mark.parametrize("before", ["", "The capital is Paris. "])
def test_a_piece_again_and_again_is_noticed_once_it_is_long_enough(piece, before):
    times = LOOP_CHARS // len(piece)
    assert repeats_itself(before + piece * (times + 1))
    assert not repeats_itself(piece * (times - 1))


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{number}. a line that counts\n" for number in range(100)),
        ("a refrain of a song, " * 12 + "and a verse between. ") * 5,
        "word " * 1000 + "and an end",
        " ".join(f"{number * number:x}" for number in range(600)),
    ],
)
def test_a_reply_that_goes_on_is_none(text):
    assert not repeats_itself(text)
