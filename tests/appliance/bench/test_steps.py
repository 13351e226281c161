"""Which steps are taken for what."""

from __future__ import annotations

import pytest

from appliance.bench.steps import Kind, MeasuredSteps, StepCase, kind_of
from engine.wire.messages import SequenceStep, Stepped


def entry(num_scheduled: int, num_computed: int = 100) -> SequenceStep:
    return SequenceStep(
        seq_id=1,
        generation=0,
        num_computed_tokens=num_computed,
        token_ids=[],
        logprobs=[],
        finish_reason=None,
        released=None,
        num_scheduled_tokens=num_scheduled,
        admitted_ns=0,
    )


def test_a_chunk_of_one_prompt_is_a_prefill_step_at_its_context() -> None:
    step = Stepped(0, 5, 60, 0, [entry(60, 160), entry(0)])
    assert kind_of(step, StepCase(8, 160)) == Kind("prefill", 1, 60, 100)


def test_a_step_of_the_whole_batch_is_a_decode_step() -> None:
    step = Stepped(0, 5, 0, 3, [entry(1)] * 3)
    assert kind_of(step, StepCase(3, 128)) == Kind("decode", 3, 3, 128)


@pytest.mark.parametrize(
    "step",
    [
        Stepped(0, 5, 60, 1, [entry(60), entry(1)]),
        Stepped(0, 5, 0, 2, [entry(1)] * 2),
        Stepped(0, 5, 120, 0, [entry(60)] * 2),
        Stepped(0, 5, 0, 0, [entry(0)]),
    ],
)
def test_mixtures_and_parts_of_a_batch_are_not_taken(step: Stepped) -> None:
    assert kind_of(step, StepCase(3, 128)) is None


def test_a_row_has_the_quantiles_and_the_rate() -> None:
    row = MeasuredSteps("decode", 8, 8, 128, [4.0, 2.0, 8.0]).row()
    assert (row["ms_p50"], row["ms_min"], row["ms_max"], row["steps"]) == (4, 2, 8, 3)
    assert row["tokens_per_s"] == 2000


def test_a_case_is_a_batch_and_a_context() -> None:
    assert StepCase.parse("8x128") == (8, 128)
    for wrong in ("8", "0x5", "x", "8x", "axb"):
        with pytest.raises(ValueError, match=r"."):
            StepCase.parse(wrong)
