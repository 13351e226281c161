"""Draws on the device are the draws of the sampler that sorts; by Triton's interpreter."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.model.sampler import NO_TOKEN, draw_of, sample, sample_rows, uniform
from tests.engine.kernel_cases import check_draws, sample_on
from tests.engine.model.test_sampler import noise, params, reference


@settings(deadline=None, max_examples=25)
@given(
    vocab_size=st.sampled_from([1, 2, 50, 700]),
    logits_seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    index=st.integers(0, 100_000),
)
def test_a_draw_is_the_references_draw(
    vocab_size, logits_seed, temperature, top_k, top_p, min_p, seed, index
):
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = noise(1, vocab_size, logits_seed)
    (drawn,) = sample_on("cpu", logits, [p], [index])
    if temperature < 1e-5:
        assert drawn == int(logits.argmax())
        return
    ids, probabilities = reference(logits[0].tolist(), p)
    u, borders = uniform(seed, index), torch.tensor(probabilities).cumsum(0)
    assume(len(ids) == 1 or (borders[:-1] - u).abs().min() > 1e-4)
    assert drawn == ids[min(int((borders <= u).sum()), len(ids) - 1)]


def test_rows_of_a_batch_draw_as_they_do_alone():
    check_draws("cpu", num_rows=6, vocab_size=300)


def test_a_vocabulary_of_several_tiles_is_searched_to_its_end():
    check_draws("cpu", num_rows=5, vocab_size=20_000)


def test_equal_logits_are_drawn_in_the_order_of_their_ids():
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, 2.0, 1.0]]).log_softmax(-1)
    probabilities = logits[0, [1, 3, 4, 5, 0, 2]].exp().cumsum(0)
    expected = [1, 3, 4, 5, 0, 2]
    for index in range(24):
        (drawn,) = sample_on("cpu", logits, [params(temperature=1.0, seed=4)], [index])
        assert drawn == expected[int((probabilities <= uniform(4, index)).sum())]


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
    draws = torch.tensor([draw_of(p, 3)], dtype=torch.float64)
    assert sample_rows(logits, draws).tolist() == [chosen]
    assert sample_rows(logits).tolist() == [chosen]
    assert chosen in (NO_TOKEN, sample(logits, [p], [3])[0][0])
