"""Choose the next token: adjust logits, filter, then pick greedily or by a repeatable draw.

The distribution is vLLM's: temperature, then min_p against the likeliest token, then top_k, then
the fewest likeliest tokens that together reach top_p. Each filter keeps the tokens
that are at least as likely as a border, so that equals stay or go together. A draw is Gumbel-max:
every token gets an exponential number of its own, by a hash of seed, output index and token id, and
the token with the largest ratio of probability to number wins. So a sequence draws the same tokens
in any batch, on any worker, after any recovery, and a rounding that swaps two near-equal tokens
changes a draw only if both are about to win it. A temperature below 1e-5 is greedy. Logits that are
not finite mean a broken model: NaN counts as impossible, infinity as the largest float32, and a
row with nothing possible yields token 0, or NO_TOKEN where a device chooses.

Owns: the noise of a draw, which Triton computes, too.
Invariant: log-probabilities are of the raw logits, before adjustments, temperature and filters.
Never: keeps random state, ends a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.logit_rules import is_adjusted
from engine.wire.sampling import SamplingParams, TokenLogprob

_GREEDY_BELOW = 1e-5
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's number for "never"
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15

FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - 2**32
"""The factors of the hash lowbias32; the second half of a draw's key is added between them."""
UNIFORM_STEP = 2.0**-31
LARGEST_UNIFORM = 1 - 2.0**-24
_LEAST_NOISE = UNIFORM_STEP / 2

NO_DRAW = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
NUM_DRAW_FIELDS = len(NO_DRAW)
"""Temperature (0: greedy), both halves of the key, top_p, min_p, top_k; engine.model.triton_ops
reads them by their places."""
NO_TOKEN = -1
"""What a device chooses where the token's logit is NaN or infinite: the model is broken."""


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    raw_logits: torch.Tensor | None = None,
) -> list[tuple[int, TokenLogprob | None]]:
    """Choose one token per row.

    Args:
        logits: [n, vocab_size] float32; not changed.
        params: one per row.
        output_indices: how many tokens each row's sequence has generated before.
        raw_logits: the model's own, which log-probabilities are of; None: `logits` are.
    """
    if not len(params):
        return []
    raw_logits = logits if raw_logits is None else raw_logits
    best = logits.argmax(-1)
    if not logits.gather(-1, best[:, None]).isfinite().all():
        logits, raw_logits = _without_nan(logits), _without_nan(raw_logits)
        best = logits.argmax(-1)
    token_ids = best.tolist()
    for row, (sampling, index) in enumerate(zip(params, output_indices, strict=True)):
        if sampling.temperature >= _GREEDY_BELOW and logits[row, token_ids[row]] > -torch.inf:
            token_ids[row] = _draw(
                logits[row], token_ids[row], sampling, key_of(sampling.seed, index)
            )
    return [
        (token_id, None if p.logprobs is None else logprobs(raw[None], [token_id], p.logprobs)[0])
        for raw, token_id, p in zip(raw_logits, token_ids, params, strict=True)
    ]


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
    """Draw the tokens [n] as `sample` does for plain parameters, on the logits' device alone.

    A token is NO_TOKEN where its logit is not finite: the host does not see the logits.

    Args:
        logits: [n, vocab_size] float32; not changed.
        draws: [n, NUM_DRAW_FIELDS] float64, each as draw_of() has it; None: all are greedy.
    """
    raw_logits, logits = logits, _without_nan(logits)
    best = logits.argmax(-1, keepdim=True)
    if draws is None:
        return _numbers_alone(best, raw_logits)
    temperature, first, second, top_p, min_p, top_k = draws[:, :, None].unbind(1)
    top = logits.gather(-1, best)
    is_drawn = (temperature > 0) & (top > -torch.inf)
    divisor = torch.where(is_drawn, temperature, 1.0)
    weights = ((logits - top).double() / divisor).float().exp()
    ordered = weights.sort(dim=-1, descending=True).values
    vocab_size = logits.shape[-1]
    kth = ordered.gather(-1, (top_k.long() - 1).clamp(0, vocab_size - 1))
    kth = torch.where((top_k > 0) & (top_k < vocab_size), kth, 0.0)
    border = torch.maximum(min_p.float(), kth)
    cumulative = ordered.masked_fill_(ordered < border, 0.0).cumsum(-1, dtype=torch.float64)
    nucleus = torch.searchsorted(cumulative, top_p * cumulative[:, -1:])
    last = ordered.gather(-1, nucleus.clamp_(max=vocab_size - 1))
    border = torch.where(top_p < 1, torch.maximum(border, last), border)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    numbers = noise(token_ids, first.int(), second.int())
    ratios = weights.masked_fill_(weights < border, 0.0).div_(numbers)
    return _numbers_alone(torch.where(is_drawn, ratios.argmax(-1, True), best), raw_logits)


def _numbers_alone(token_ids: torch.Tensor, raw_logits: torch.Tensor) -> torch.Tensor:
    """Tokens [n] of [n, 1], NO_TOKEN where the logit is no number."""
    return torch.where(raw_logits.gather(-1, token_ids).isfinite(), token_ids, NO_TOKEN)[:, 0]


def logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int
) -> list[TokenLogprob]:
    """Compute log-probabilities of one token per row, and of the row's likeliest.

    Args:
        logits: [n, vocab_size] float32, the model's own.
        token_ids: one per row.
        num_alternatives: how many of the likeliest to report.
    """
    rows = logits.log_softmax(-1).nan_to_num_(nan=_MIN_LOGPROB).clamp_(min=_MIN_LOGPROB)
    chosen = rows.gather(-1, torch.tensor(token_ids, device=rows.device)[:, None])[:, 0]
    values, ids = rows.topk(min(num_alternatives, rows.shape[-1]))
    ranks = (rows > chosen[:, None]).sum(-1) + 1
    columns = (chosen, ids, values, ranks)
    return [TokenLogprob(*row) for row in zip(*(one.tolist() for one in columns), strict=True)]


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
    return uniform.neg_().log1p_().neg_()


def _signed(half: int) -> int:
    return half - (1 << 32) if half >> 31 else half


def _mix(value: int) -> int:
    """Scramble 64 bits by the finalizer of splitmix64, which is a bijection."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    top = torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)


def _draw(logits: torch.Tensor, best: int, params: SamplingParams, key: tuple[int, int]) -> int:
    """Find the winner among the tokens that the filters keep."""
    weights = (logits - logits[best]).double().div_(params.temperature).float().exp_()
    border = params.min_p
    if 0 < params.top_k < len(weights):
        border = max(border, float(weights.topk(params.top_k).values[-1]))
    if params.top_p < 1:
        border = max(border, _nucleus_border(weights, border, params.top_p))
    elif border == 0:  # what is below this loses to the likeliest, whatever its noise
        numbers = noise(torch.tensor([best], dtype=torch.int32), *key)
        border = _LEAST_NOISE / float(numbers) / 2
    token_ids = (weights >= border).nonzero()[:, 0]
    ratios = weights[token_ids].div_(noise(token_ids.int(), *key))
    return int(token_ids[ratios.argmax()])


def _nucleus_border(weights: torch.Tensor, border: float, top_p: float) -> float:
    """Find the weight at which the likeliest tokens reach a share of the mass above a border."""
    kept = weights.masked_select(weights >= border) if border > 0 else weights
    mass = float(kept.sum(dtype=torch.float64))
    # all below this together weigh less than what may be left out: few are left to be sorted
    candidates = kept.masked_select(kept >= 0.999 * (1 - top_p) * mass / len(kept))
    ordered = candidates.sort(descending=True).values
    place = int(torch.searchsorted(ordered.cumsum(0, dtype=torch.float64), top_p * mass))
    return float(ordered[min(place, len(ordered) - 1)])
