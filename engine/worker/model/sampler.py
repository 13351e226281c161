"""Choose the next token: filter, then pick greedily or by a repeatable draw.

The distribution is vLLM's: temperature, then min_p against the likeliest token, then top_k, then
the fewest likeliest tokens that together reach top_p. Each filter keeps the tokens
that are at least as likely as a border, so that equals stay or go together. A draw is Gumbel-max:
every token gets an exponential number of its own, by a hash of seed, output index and token id, and
the token with the largest ratio of probability to number wins. So a sequence draws the same tokens
in any batch, on any worker, after any recovery, and a rounding that swaps two near-equal tokens
changes a draw only if both are about to win it. A temperature below 1e-5 is greedy. Logits that are
not finite mean a broken model: NaN counts as impossible, infinity as the largest float32, and a
row whose token has no finite logit yields NO_TOKEN.

Every operation here is rounded as IEEE 754 says, none is fused with another, and what is summed are
whole numbers: engine/kernels/draws.c, which takes no sort and fewer passes, draws the same tokens.

Triton computes the noise of a draw, too.

Invariant: log-probabilities are of the raw logits, before adjustments, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.wire.sampling import SamplingParams, TokenLogprob
from engine.worker.model.logit_rules import is_adjusted

_GREEDY_BELOW = 1e-5
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's number for "never"
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15

FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - 2**32
"""The factors of the hash lowbias32; the second half of a draw's key is added between them."""
UNIFORM_STEP = 2.0**-31
LARGEST_UNIFORM = 1 - 2.0**-24
_LEAST_EXPONENT = -87.0
"""What is less likely than its exponential, relative to the likeliest token, is impossible."""
_ROUNDER = 1.5 * 2.0**23
"""Added to a small float32, and taken away again: leaves the nearest integer."""
_MASS_STEPS = 2.0**40
"""Masses are counted in as many parts of the likeliest token's."""

_LOGARITHM = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
    2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
    6.666666666666735130e-01,
)  # fmt: skip
"""The coefficients of fdlibm, the last ones first."""

NO_DRAW = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
NUM_DRAW_FIELDS = len(NO_DRAW)
"""Temperature (0: greedy), both halves of the key, top_p, min_p, top_k; the kernels read them by
their places."""
NO_TOKEN = -1
"""What is chosen where the token's logit is NaN or infinite."""


def is_plain(params: SamplingParams) -> bool:
    """Tell if `sample_rows` yields all that is reported of the next token."""
    return params.logprobs is None and not is_adjusted(params)


def draw_of(params: SamplingParams, index: int) -> tuple[float, ...]:
    """Describe one row to `sample_rows` in NUM_DRAW_FIELDS numbers."""
    if params.temperature < _GREEDY_BELOW:
        return NO_DRAW
    first, second = key_of(params.seed, index)
    filters = params.top_p, params.min_p, float(params.top_k)
    return params.temperature, float(first), float(second), *filters


def sample_rows(logits: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Draw the tokens [n] on the logits' device alone, without a look at them from the host.

    Args:
        logits: [n, vocab_size] float32; not changed.
        draws: [n, NUM_DRAW_FIELDS] float64, each as draw_of() has it; None: all are greedy.
    """
    raw_logits, logits = logits, without_nan(logits)
    best = logits.argmax(-1, keepdim=True)
    if draws is None:
        return _numbers_alone(best, raw_logits)
    temperature, first, second, top_p, min_p, top_k = draws[:, :, None].unbind(1)
    top = logits.gather(-1, best)
    is_drawn = (temperature > 0) & (top > -torch.inf)
    divisor = torch.where(is_drawn, temperature, 1.0).float()
    weights = _weights((logits - top).mul_(torch.ones_like(divisor).div_(divisor)))
    ordered = weights.sort(dim=-1, descending=True).values
    vocab_size = logits.shape[-1]
    kth = ordered.gather(-1, (top_k.long() - 1).clamp(0, vocab_size - 1))
    kth = torch.where((top_k > 0) & (top_k < vocab_size), kth, 0.0)
    border = torch.maximum(min_p.float(), kth)
    last = _nucleus_border(ordered.masked_fill_(ordered < border, 0.0), top_p)
    border = torch.where(top_p < 1, torch.maximum(border, last), border)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    numbers = noise(token_ids, first.int(), second.int())
    ratios = weights.masked_fill_(weights < border, 0.0).div_(numbers)
    return _numbers_alone(torch.where(is_drawn, ratios.argmax(-1, True), best), raw_logits)


def _weights(exponents: torch.Tensor) -> torch.Tensor:
    """Raise e to each power up to 0: the steps of `exponential` in engine/kernels/simd.h."""
    x = exponents.clamp(min=_LEAST_EXPONENT)
    whole = (x * 1.44269504 + _ROUNDER).sub_(_ROUNDER)
    rest = (x - whole * 0.693359375).sub_(whole * -2.12194440e-4)
    total = torch.full_like(rest, 1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        total.mul_(rest).add_(coefficient)
    powers = whole.nan_to_num_(nan=0.0).int().add_(127).bitwise_left_shift_(23)
    total.mul_(powers.view(torch.float32))
    return total.masked_fill_(~(exponents >= _LEAST_EXPONENT), 0.0)


def _nucleus_border(ordered: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Find the weight [n, 1] at which the likeliest of falling weights reach a share of their mass.

    A mass is a whole number, so that the order in which masses are added changes no sum.
    """
    reached = (ordered.double() * _MASS_STEPS).round_().long().cumsum(-1)
    mass = reached[:, -1:]
    wanted = (top_p * mass.double()).ceil_().long().clamp_(min=1).minimum(mass)
    places = torch.searchsorted(reached, wanted).clamp_(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, places)


def _numbers_alone(token_ids: torch.Tensor, raw_logits: torch.Tensor) -> torch.Tensor:
    """Tokens [n] of [n, 1], NO_TOKEN where the logit is no number."""
    return torch.where(raw_logits.gather(-1, token_ids).isfinite(), token_ids, NO_TOKEN)[:, 0]


def logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]
) -> list[TokenLogprob]:
    """Compute log-probabilities of one token per row, and of the row's likeliest.

    Args:
        logits: [n, vocab_size] float32, the model's own.
        token_ids: one per row.
        num_alternatives: how many of the likeliest to report of each row.
    """
    rows = without_nan(logits).log_softmax(-1)
    rows = rows.nan_to_num_(nan=MIN_LOGPROB).clamp_(min=MIN_LOGPROB)
    chosen = rows.gather(-1, torch.tensor(token_ids, device=rows.device)[:, None])[:, 0]
    values, ids = rows.topk(min(max(num_alternatives), rows.shape[-1]))
    ranks = (rows > chosen[:, None]).sum(-1) + 1
    columns = (chosen.tolist(), ids.tolist(), values.tolist(), ranks.tolist(), num_alternatives)
    return [
        TokenLogprob(own, likeliest[:count], theirs[:count], rank)
        for own, likeliest, theirs, rank, count in zip(*columns, strict=True)
    ]


def key_of(seed: int, index: int) -> tuple[int, int]:
    """Hash an output position into two integers of 32 bits, with a sign."""
    key = _mix(_mix(seed) + (index + 1) * _GOLDEN_64)
    return _signed(key & _MASK_32), _signed(key >> 32)


def noise(
    token_ids: torch.Tensor, first: int | torch.Tensor, second: int | torch.Tensor
) -> torch.Tensor:
    """Make an exponential number for each token: float32, above 0 and finite.

    Args:
        token_ids: int32.
        first: half of the draw's key, int32 where it is a tensor.
    """
    bits = token_ids ^ first  # shifts of int32 keep the sign, which the masks take off
    bits = bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(FIRST_FACTOR)
    bits = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).add_(second)
    bits = bits.mul_(SECOND_FACTOR)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(UNIFORM_STEP).clamp_(max=LARGEST_UNIFORM)
    return _logarithm(1 - uniform.double()).neg_().float()


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    """Compute natural logarithms of float64 by the steps of engine/kernels/weights.h."""
    fraction, exponent = torch.frexp(x)
    is_low = fraction < 0.70710678118654752
    fraction, exponent = torch.where(is_low, 2 * fraction, fraction), exponent - is_low.int()
    f = fraction - 1
    s = f / (2 + f)
    z = s * s
    total = torch.full_like(z, _LOGARITHM[0])
    for coefficient in _LOGARITHM[1:]:
        total.mul_(z).add_(coefficient)
    half = 0.5 * f * f
    return exponent * 0.69314718055994531 - ((half - s * (half + z * total)) - f)


def _signed(half: int) -> int:
    return half - (1 << 32) if half >> 31 else half


def _mix(value: int) -> int:
    """Scramble 64 bits by the finalizer of splitmix64, which is a bijection."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def without_nan(logits: torch.Tensor) -> torch.Tensor:
    """Copy logits as draws see them: NaN is impossible, infinity the largest number."""
    top = torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)
