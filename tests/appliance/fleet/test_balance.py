"""One worker or two on one device: what is timed for it, and what follows."""

import pytest

from appliance.fleet.placer import PairTimes, is_two_better, pair_times, programme
from engine.wire.messages import RehearsedStep


def made(steps, elapsed_ms):
    return [
        RehearsedStep(s.num_sequences, s.num_tokens, s.num_before, elapsed_ms(s)) for s in steps[:9]
    ]


def test_what_is_timed_is_each_kind_alone_and_beside_the_other():
    alone, beside = programme("p", "d", 4096, 131072)
    assert list(alone) == ["d"]
    assert {step.num_tokens for step in alone["d"]} == {1, 4096}
    assert {step.num_tokens for step in beside["p"]} == {4096}
    assert {step.num_tokens for step in beside["d"]} == {1}
    by_turn = [
        {"d": made(alone["d"], lambda s: 200.0 if s.num_tokens > 1 else 10.0)},
        {"p": made(beside["p"], lambda s: 230.0), "d": made(beside["d"], lambda s: 17.0)},
    ]
    times = pair_times(by_turn)
    assert times == PairTimes(4096, 8, 200.0, 10.0, 230.0, 17.0)
    assert pair_times(by_turn[:1]) is None
    assert pair_times([by_turn[0], {"p": by_turn[1]["p"], "d": []}]) is None


@pytest.mark.parametrize(
    ("beside_prompt_ms", "beside_decode_ms", "is_better"),
    [
        (222.0, 14.0, True),  # they compute at once
        (205.0, 160.0, False),  # a token waits nearly as long as for one worker's step
        (400.0, 20.0, False),  # they take turns, and prompts take twice as long
        (210.0, 210.0, False),
    ],
)
def test_two_are_better_where_tokens_wait_less_and_prompts_hardly_more(
    beside_prompt_ms, beside_decode_ms, is_better
):
    times = PairTimes(4096, 8, 200.0, 10.0, beside_prompt_ms, beside_decode_ms)
    found, why = is_two_better(times)
    assert found == is_better
    assert "210 ms in one worker" in why
