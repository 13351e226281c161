"""The kernels of every level choose the tokens of torch, and leave rows as they were."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import load_kernels
from engine.wire.sampling import SamplingParams
from engine.worker.model.draw_rows import (
    RowDraw,
    draw_by_kernels,
    rate_by_kernels,
    rate_by_torch,
    sample_by_kernels,
)
from engine.worker.model.sampler import NO_TOKEN
from tests.engine.draws import drawn, draws_tensor
from tests.equal_draws import SIZES, large_rows, num_unequal, plain_rows, random_rows, ruled_rows
from tests.levels import LEVELS, each_level


@pytest.mark.parametrize(
    ("rows_of", "num_rows"), [(plain_rows, 12_000), (ruled_rows, 2000), (large_rows, 18)]
)
def test_every_level_draws_the_tokens_of_torch(rows_of, num_rows):
    assert num_unequal(rows_of, num_rows, seed=1) == dict.fromkeys(LEVELS, 0)


@each_level
@pytest.mark.parametrize("threads", [1, 3])
def test_what_no_token_comes_of_is_told_apart(level, threads):
    kernels, _ = load_kernels(level)
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf] * 2])
    p = SamplingParams(max_tokens=1, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [RowDraw(row, p, 0) for row in logits]
        assert draw_by_kernels(kernels, rows)[1:] == [1, NO_TOKEN, NO_TOKEN]
        assert sample_by_kernels(kernels, logits, None).tolist() == [1, 1, NO_TOKEN, NO_TOKEN]
        draws = draws_tensor([p] * 4, [0] * 4)
        assert sample_by_kernels(kernels, logits, draws).tolist() == drawn(logits, [p] * 4, [0] * 4)
    finally:
        torch.set_num_threads(before)


@each_level
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_logprobs_are_torchs(level, seed):
    kernels, _ = load_kernels(level)
    rng = Random(seed)
    vocab_size = rng.choice(SIZES)
    logits = random_rows(rng, 5, vocab_size)
    token_ids = [rng.randrange(vocab_size) for _ in logits]
    counts = [rng.choice([0, 1, 5, 64, 70, 4000]) for _ in logits]
    rated = rate_by_kernels(kernels, [*logits], token_ids, counts)
    for row, token_id, own, expected in zip(
        logits, token_ids, rated, rate_by_torch([*logits], token_ids, counts), strict=True
    ):
        assert own.logprob == pytest.approx(expected.logprob, rel=1e-6, abs=1e-5)
        assert own.top_logprobs == pytest.approx(expected.top_logprobs, rel=1e-6, abs=1e-5)
        assert len({*own.top_ids}) == len(own.top_ids)
        seen = row.nan_to_num(nan=-math.inf)
        assert own.rank == 1 + int((seen > seen[token_id]).sum())
        assert (
            seen[own.top_ids].tolist()
            == seen.sort(descending=True).values[: len(own.top_ids)].tolist()
        )
