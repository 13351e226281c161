"""Draws follow the stated distribution and depend on seed, position and token alone."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.wire.sampling import SamplingParams
from engine.worker.model.sampler import NO_TOKEN, key_of, logprobs, noise, sample_rows
from tests.engine.draws import drawn, draws_tensor

FLOAT_MAX = torch.finfo(torch.float32).max
GOLDEN_NOISE = (0.7987861633300781, 1.8395558595657349, 1.0318806171417236)


def params(**changes):
    return SamplingParams(**({"max_tokens": 8, "seed": 0} | changes))


def random_logits(num_rows, vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def reference(logits, p):
    """The distribution in float64, slowly: token ids, likeliest first, and probabilities."""
    ids = sorted(range(len(logits)), key=lambda i: -logits[i])
    scaled = [float(logits[i]) / p.temperature for i in ids]
    weights = [math.exp(s - scaled[0]) for s in scaled]
    kept = [(i, w) for i, w in zip(ids, weights, strict=True) if w >= p.min_p]
    if p.top_k:
        kept = kept[: p.top_k]
    total, nucleus, mass = sum(w for _, w in kept), [], 0.0
    for token, weight in kept:
        if nucleus and mass >= p.top_p * total:
            break
        nucleus.append((token, weight))
        mass += weight
    return [token for token, _ in nucleus], [weight / mass for _, weight in nucleus]


def reference_noise(seed, index, token):
    """An exponential number in float64, by integers without end."""
    first, second = (half % 2**32 for half in key_of(seed, index))
    bits = token ^ first
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
    bits = ((bits ^ bits >> 15) + second) % 2**32 * 0x846CA68B % 2**32
    bits = (bits ^ bits >> 16) % 2**31
    return -math.log1p(-min((bits + 0.5) / 2**31, 1 - 2**-24))


def reference_draw(logits, p, index):
    """Tokens by their chance to win this draw, of those in the reference's distribution."""
    ids, probabilities = reference(logits, p)
    races = [
        (q / reference_noise(p.seed, index, i), i) for i, q in zip(ids, probabilities, strict=True)
    ]
    return sorted(races, reverse=True)


def is_clear(logits, p, races):
    """True if float32 cannot choose another token: at the end, or at the edge of a filter."""
    if len(races) > 1 and races[0][0] < races[1][0] * 1.0001:
        return False
    kept = [i for _, i in races]
    for factor in (0.9999, 1.0001):
        moved = [p.top_p * factor if p.top_p < 1 else 1.0, p.min_p * factor]
        changed = params(
            temperature=p.temperature, top_k=p.top_k, top_p=min(moved[0], 1.0), min_p=moved[1]
        )
        if set(reference(logits, changed)[0]) != set(kept):
            return False
    return True


SETTINGS = {
    "vocab_size": st.sampled_from([1, 2, 50, 700]),
    "logits_seed": st.integers(0, 10_000),
    "temperature": st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 1, 2, 40, 300, 1000]),
    "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    "min_p": st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    "seed": st.integers(0, 2**63 - 1),
    "index": st.integers(0, 100_000),
}


@given(**SETTINGS)
def test_a_draw_is_the_references_draw(vocab_size, logits_seed, seed, index, **filters):
    p, logits = params(seed=seed, **filters), random_logits(1, vocab_size, logits_seed)
    races = reference_draw(logits[0].tolist(), p, index)
    assume(is_clear(logits[0].tolist(), p, races))
    assert drawn(logits, [p], [index]) == [races[0][1]]


def test_a_wide_nucleus_is_drawn_from_whole():
    p, logits = params(temperature=5.0, top_p=0.7, seed=9), random_logits(1, 1000)
    assert len(reference(logits[0].tolist(), p)[0]) > 500
    for index in range(100):
        races = reference_draw(logits[0].tolist(), p, index)
        assert drawn(logits, [p], [index]) == [races[0][1]]


def test_swapping_near_equal_tokens_changes_hardly_any_draw():
    """Noise of 3e-5, as between two orders of float32 sums, reorders a third of these pairs."""
    num_draws, vocab_size = 20_000, 64
    logits = torch.arange(vocab_size) * 2e-5
    noisy = logits + torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 3e-5
    assert (noisy.argsort() != logits.argsort()).float().mean() > 0.5
    draws = draws_tensor([params(seed=4)] * num_draws, range(num_draws))
    first, second = (sample_rows(one.expand(num_draws, -1), draws) for one in (logits, noisy))
    assert (first != second).sum() <= 8  # two or three are expected


@pytest.mark.parametrize(
    "p",
    [
        params(),
        params(temperature=0.7),
        params(temperature=1.5, top_k=5),
        params(top_p=0.8),
        params(min_p=0.2),
        params(temperature=2.0, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_many_draws_pass_a_chi_square_test(p):
    num_draws, vocab_size = 4000, 20
    logits = random_logits(1, vocab_size, seed=5)
    rows = logits.expand(num_draws, -1)
    tokens = drawn(rows, [p] * num_draws, range(num_draws))
    ids, probabilities = reference(logits[0].tolist(), p)
    assert set(tokens) <= set(ids)
    expected = torch.tensor(probabilities) * num_draws
    observed = torch.tensor([tokens.count(i) for i in ids])
    is_common = expected >= 5
    statistic = ((observed - expected) ** 2 / expected)[is_common].sum()
    freedom = max(int(is_common.sum()) - 1, 1)
    # mean and deviation of chi-square are freedom and sqrt(2 freedom)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_noise_is_exponential_along_seeds_positions_and_tokens():
    tokens = torch.arange(10_000, dtype=torch.int32)
    first, second = (
        torch.tensor(halves, dtype=torch.int32)
        for halves in zip(*(key_of(7 + i // 100, i % 100) for i in range(10_000)), strict=True)
    )
    for numbers in (
        noise(tokens, *key_of(7, 0)),
        noise(tokens * 64, *key_of(2**62, 5)),
        noise(torch.full_like(tokens, 11), first, second),
        noise(tokens, first, second),
    ):
        counts = torch.histc((-numbers).exp(), bins=20, min=0, max=1)
        assert ((counts - 500) ** 2 / 500).sum() < 45  # 19 degrees of freedom, p = 0.0007
        assert numbers.min() > 0
        assert numbers.isfinite().all()


def test_noise_of_one_draw_tells_nothing_of_the_next():
    tokens = torch.arange(20_000, dtype=torch.int32)
    draws = torch.stack([noise(tokens, *key_of(3, index)) for index in range(8)])
    correlations = torch.corrcoef(torch.cat([draws, draws[:1].roll(1, -1)])) - torch.eye(9)
    assert correlations.abs().max() < 0.03  # four deviations


def test_the_hash_never_changes():
    """Sequences resumed by a newer version must go on as they began."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)  # splitmix64 of 0
    for index, key in enumerate(published):
        assert [half % 2**32 for half in key_of(0, index)] == [key % 2**32, key >> 32]
    numbers = noise(torch.tensor([0, 1, 151_935], dtype=torch.int32), *key_of(2**63 - 1, 4095))
    assert numbers.tolist() == pytest.approx(GOLDEN_NOISE, rel=1e-6)
    for token, number in zip((0, 1, 151_935), GOLDEN_NOISE, strict=True):
        assert reference_noise(2**63 - 1, 4095, token) == pytest.approx(number, rel=1e-6)


@given(st.permutations(range(6)))
def test_a_row_draws_the_same_in_any_batch(order):
    logits = random_logits(6, 400)
    rows = [params(seed=i, temperature=0.5 + i / 4, top_p=0.95) for i in range(6)]
    alone = [drawn(logits[i : i + 1], [rows[i]], [3 * i])[0] for i in range(6)]
    batch = drawn(logits[list(order)], [rows[i] for i in order], [3 * i for i in order])
    assert batch == [alone[i] for i in order]


def test_seeds_and_positions_differ():
    logits = torch.zeros(1, 1000)
    tokens = {drawn(logits, [params(seed=s)], [i])[0] for s in range(10) for i in range(10)}
    assert len(tokens) > 80


def test_zero_and_tiny_temperatures_are_greedy():
    logits = random_logits(3, 50)
    rows = [params(temperature=t) for t in (0.0, 1e-9, 0.0)]
    assert drawn(logits, rows, [0, 0, 0]) == logits.argmax(-1).tolist()


def test_low_temperatures_stay_finite():
    logits = random_logits(1, 50) * 1e6
    assert drawn(logits, [params(temperature=1e-5)], [0]) == [int(logits.argmax())]


def test_a_nucleus_keeps_ties_with_its_last_token():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, -5.0]])
    rows = [params(seed=s, top_p=0.85, temperature=2.0) for s in range(200)]
    tokens = {*drawn(logits.expand(200, -1), rows, [0] * 200)}
    assert tokens == {0, 1, 2, 3}


def test_top_k_keeps_ties_with_the_last_kept():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, -5.0]])
    rows = [params(seed=s, top_k=2) for s in range(200)]
    tokens = {*drawn(logits.expand(200, -1), rows, [0] * 200)}
    assert tokens == {0, 1, 2, 3}


@given(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 9))
def test_logprobs_are_of_the_logits(seed, num_alternatives, token):
    logits = random_logits(1, 10, seed)
    (logprob,) = logprobs(logits, [token], [num_alternatives])
    expected = logits[0].double().log_softmax(-1)
    assert logprob.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert len(logprob.top_ids) == min(num_alternatives, 10)
    best = expected.sort(descending=True)
    assert logprob.top_ids == best.indices[:num_alternatives].tolist()
    assert logprob.top_logprobs == pytest.approx(best.values[:num_alternatives].tolist(), abs=1e-5)


def test_ranks_count_the_likelier():
    rows = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 4.0, 3.0, 2.0]])
    assert [one.rank for one in logprobs(rows, [2, 3], [1, 1])] == [3, 4]
    assert [one.rank for one in logprobs(rows, [3, 0], [0, 0])] == [1, 1]


def test_each_row_has_as_many_alternatives_as_are_asked_of_it():
    results = logprobs(random_logits(3, 30), [4, 5, 6], [0, 2, 40])
    assert [len(each.top_ids) for each in results] == [0, 2, 30]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_a_token_and_finite_logprobs(temperature):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [nan, 1.0, 0.5, -inf],
            [0.0, inf, 1.0, nan],
            [-inf, -inf, -inf, -inf],
            [nan, nan, nan, nan],
            [0.0, FLOAT_MAX, -FLOAT_MAX, 0.0],
        ]
    )
    rows = [params(temperature=temperature, top_k=1)] * 5
    assert drawn(logits, rows, [0] * 5) == [1, NO_TOKEN, NO_TOKEN, NO_TOKEN, 1]
    results = logprobs(logits, [1, 1, 0, 0, 1], [4] * 5)
    numbers = [x for r in results for x in (r.logprob, *r.top_logprobs)]
    assert all(math.isfinite(x) for x in numbers)
