import pytest

from appliance.configuration.wanted_workers import ONE_OF_EACH, parse_place
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "available", "expected"),
    [
        ("auto", [0, 1, 2], {"prefill": (0, 1), "decode": (2,)}),
        ("auto", [5], {"prefill": (5,), "decode": (5,)}),
        ("2x1", [0, 1, 2, 3], {"prefill0": (0, 1), "prefill1": (2,), "decode": (3,)}),
        ("1x2 forced", [0, 1], {"prefill": (0,), "decode0": (1,), "decode1": (1,)}),
        ("2x1 forced", [0, 1], {"prefill0": (0,), "prefill1": (0,), "decode": (1,)}),
        ("1x2 forced", [3], {"prefill": (3,), "decode0": (3,), "decode1": (3,)}),
        ("3x1 forced", [0, 1, 2], {"prefill0": (0,), "prefill1": (1,), "prefill2": (0,),
                                   "decode": (2,)}),
        ("prefill=0-1,4 decode=7", [0, 1, 4, 7], {"prefill0": (0, 1), "prefill1": (4,),
                                                  "decode": (7,)}),
        ("prefill=0,0 decode=0 forced", [0], {"prefill0": (0,), "prefill1": (0,), "decode": (0,)}),
    ],
)  # fmt: skip
def test_workers_get_the_cores_that_are_said(text, available, expected):
    assert parse_place(text).cores(available) == expected


@pytest.mark.parametrize(
    ("text", "available"),
    [("2x1", [0, 1]), ("prefill=0 decode=0", [0, 1]), ("prefill=0 decode=3", [0, 1])],
)
def test_cores_that_are_not_there_or_have_two_workers_are_refused(text, available):
    with pytest.raises(ConfigError) as refused:
        parse_place(text).cores(available)
    assert refused.value.where == "place"


@pytest.mark.parametrize(
    "text", ["", "0x1", "prefill=0", "prefill=0 decode=", "prefill=2-1 decode=0", "forced",
             "2x1 forced again", "prefill=0 prefill=1 decode=2", 3]
)  # fmt: skip
def test_what_says_nothing_is_refused(text):
    with pytest.raises(ValueError, match="2x1"):
        parse_place(text)


def test_one_of_each_is_what_nobody_says():
    assert parse_place("auto") == parse_place("1x1") == ONE_OF_EACH
    assert str(parse_place("2x1")) == "2x1"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("prefill=cuda:0 decode=cuda:1", ["cuda:0", "cuda:1"]),
        ("prefill=gpu0/mig1,gpu3 decode=4-5", ["gpu0/mig1", "gpu3"]),
        ("prefill=0 decode=MIG-71ac-5eed,GPU-9", ["MIG-71ac-5eed", "GPU-9"]),
    ],
)
def test_gpus_are_named_beside_cores(text, names):
    wanted = parse_place(text)
    assert wanted.gpu_names == names
    assert set(wanted.cores([0, 4, 5])) == {
        name
        for role, spots in zip(wanted.names, (wanted.prefill, wanted.decode), strict=True)
        for name, spot in zip(role, spots, strict=True)
        if not isinstance(spot, str)
    }


@pytest.mark.parametrize(
    "text", ["prefill=cuda decode=0", "prefill=cuda:x decode=0", "prefill=gpu decode=0"]
)
def test_names_that_no_gpu_can_have_are_refused(text):
    with pytest.raises(ValueError, match="cuda:0"):
        parse_place(text)


def test_cores_of_a_workers_processes_are_named_apart():
    wanted = parse_place("prefill=0-1+2-3,4+5 decode=6+7")
    assert wanted.cores(list(range(8))) == {
        "prefill0": (0, 1, 2, 3),
        "prefill1": (4, 5),
        "decode": (6, 7),
    }
    assert (wanted.width, wanted.ranks("prefill0")) == (2, ((0, 1), (2, 3)))
    assert (ONE_OF_EACH.width, ONE_OF_EACH.ranks("decode")) == (1, ())
    alone = parse_place("colocated=0+1+2+3")
    assert (alone.width, alone.colocated_cores([0, 1, 2, 3])) == (4, (0, 1, 2, 3))
    assert alone.ranks("colocated") == ((0,), (1,), (2,), (3,))
    assert ONE_OF_EACH.colocated_cores([3, 5]) == (3, 5)
    unlike = parse_place("prefill=0+1 decode=2-3")
    assert (unlike.width, unlike.widths) == (2, [2, 1])
    assert (unlike.ranks("prefill"), unlike.ranks("decode")) == (((0,), (1,)), ((2, 3),))


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("prefill=cuda:0+1 decode=cuda:2+3", "GPU"),
        ("prefill=gpu0+gpu1 decode=gpu2", "GPU"),
        ("prefill=0+cuda:0 decode=1+2", "cores alone"),
        ("prefill=gpu0+1 decode=1+2", "cores alone"),
        ("prefill=0-1+2 decode=3+4", "as many cores"),
        ("prefill=0+1 decode=cuda:0", "cores for all"),
        ("prefill=0+ decode=1+2", "2x1"),
        ("colocated=0,1", "2x1"),
        ("colocated=cuda:0", "2x1"),
    ],
)
def test_groups_that_cannot_be_are_refused_with_what_would_do(text, about):
    with pytest.raises(ValueError, match=about):
        parse_place(text)
