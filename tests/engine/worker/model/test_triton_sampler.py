"""Draws on the device are the draws of the sampler on the host; by Triton's interpreter."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.worker.model.sampler import NO_TOKEN, sample_rows
from tests.engine.draws import drawn as drawn_by_torch
from tests.engine.kernel_cases import check_draws, sample_on
from tests.engine.worker.model.test_sampler import (
    SETTINGS,
    is_clear,
    params,
    random_logits,
    reference_draw,
)


@settings(deadline=None, max_examples=25)
@given(**SETTINGS | {"temperature": st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0])})
def test_a_draw_is_the_references_draw(vocab_size, logits_seed, seed, index, **filters):
    p, logits = params(seed=seed, **filters), random_logits(1, vocab_size, logits_seed)
    (drawn,) = sample_on("cpu", logits, [p], [index])
    if p.temperature < 1e-5:
        assert drawn == int(logits.argmax())
        return
    races = reference_draw(logits[0].tolist(), p, index)
    assume(is_clear(logits[0].tolist(), p, races))
    assert drawn == races[0][1]


def test_rows_of_a_batch_draw_as_they_do_alone():
    check_draws("cpu", num_rows=6, vocab_size=300)


def test_a_vocabulary_of_several_tiles_is_searched_to_its_end():
    check_draws("cpu", num_rows=5, vocab_size=20_000)


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ([torch.nan, 1.0, -torch.inf], 1),
        ([torch.inf, 1.0, 2.0], NO_TOKEN),
        ([-torch.inf] * 3, NO_TOKEN),
        ([torch.nan] * 3, NO_TOKEN),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # a difference of the largest floats
def test_of_a_broken_models_logits_only_numbers_yield_a_token(row, chosen, temperature):
    p, logits = params(temperature=temperature, top_p=0.9, top_k=2), torch.tensor([row])
    assert sample_on("cpu", logits, [p], [3]) == [chosen]
    assert drawn_by_torch(logits, [p], [3]) == [chosen]
    assert sample_rows(logits).tolist() == [chosen]
