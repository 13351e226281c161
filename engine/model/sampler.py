"""Choose the next token: adjust logits, filter, then pick greedily or by a repeatable draw.

The distribution is vLLM's: temperature, then min_p against the likeliest token, then top_k (ties
with the k-th are kept), then the smallest set of likeliest tokens whose probability reaches top_p.
A draw inverts its cumulative distribution, likeliest token first, at one uniform number: the
splitmix64 hash of the hashed seed and the output index. So a sequence draws the same tokens in
any batch, on any worker, after any recovery. A temperature below 1e-5 is greedy. Logits that are
not finite mean a broken model: NaN counts as impossible, infinity as the largest float32, and a
row with nothing possible yields token 0, or NO_TOKEN where a device chooses.

Owns: SamplingParams' fields that look at tokens rather than at the distribution; what
SamplingParams say about the distribution.
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
_PREFIX_TOKENS = 256  # sorted first; most draws end among them, and sorting all costs milliseconds
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15

NO_DRAW = (0.0, 0.0, 1.0, 0.0, 0.0)
NUM_DRAW_FIELDS = len(NO_DRAW)
"""Temperature (0: greedy), uniform number, top_p, min_p, top_k; engine.model.triton_ops reads
them by their places."""
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
            token_ids[row] = _draw(logits[row], sampling, uniform(sampling.seed, index))
    return [
        (token_id, None if p.logprobs is None else logprobs(raw[None], [token_id], p.logprobs)[0])
        for raw, token_id, p in zip(raw_logits, token_ids, params, strict=True)
    ]


def is_plain(params: SamplingParams) -> bool:
    """True if `sample_rows` yields all that there is to tell of its next token."""
    return params.logprobs is None and not is_adjusted(params)


def draw_of(params: SamplingParams, index: int) -> tuple[float, ...]:
    """What `sample_rows` is told of one row: NUM_DRAW_FIELDS numbers."""
    if params.temperature < _GREEDY_BELOW:
        return NO_DRAW
    u = uniform(params.seed, index)
    return params.temperature, u, params.top_p, params.min_p, float(params.top_k)


def sample_rows(logits: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """The tokens [n] that `sample` draws for plain parameters, without a look from the host.

    A token of which the logit is no finite number is NO_TOKEN: nobody else sees the logits.

    Args:
        logits: [n, vocab_size] float32; not changed.
        draws: [n, NUM_DRAW_FIELDS] float64, each as draw_of() has it; None: all are greedy.
    """
    raw_logits, logits = logits, _without_nan(logits)
    best = logits.argmax(-1, keepdim=True)
    if draws is None:
        return _numbers_alone(best, raw_logits)
    temperature, u, top_p, min_p, top_k = draws[:, :, None].unbind(1)
    top = logits.gather(-1, best)
    is_drawn = (temperature > 0) & (top > -torch.inf)
    divisor = torch.where(is_drawn, temperature, 1.0)
    weights = ((logits - top).double() / divisor).float().exp()
    ordered, token_ids = weights.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    kth = ordered.gather(-1, (top_k.long() - 1).clamp(0, vocab_size - 1))
    kth = torch.where((top_k > 0) & (top_k < vocab_size), kth, 0.0)
    ordered = ordered.masked_fill(ordered < torch.maximum(min_p.float(), kth), 0.0)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    mass = cumulative[:, -1:]
    nucleus = torch.searchsorted(cumulative, top_p * mass).clamp_(max=vocab_size - 1)
    kept = torch.where(top_p < 1, cumulative.gather(-1, nucleus), mass)
    place = torch.searchsorted(cumulative, u * kept, right=True)
    last = (ordered > 0).sum(-1, keepdim=True) - 1  # u * kept may be rounded up to the very end
    drawn = token_ids.gather(-1, torch.minimum(place, last).clamp_(min=0))
    return _numbers_alone(torch.where(is_drawn, drawn, best), raw_logits)


def _numbers_alone(token_ids: torch.Tensor, raw_logits: torch.Tensor) -> torch.Tensor:
    """Tokens [n] of [n, 1], NO_TOKEN where the logit is no number."""
    return torch.where(raw_logits.gather(-1, token_ids).isfinite(), token_ids, NO_TOKEN)[:, 0]


def logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int
) -> list[TokenLogprob]:
    """Log-probabilities of one token per row, and of the row's likeliest.

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


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) for one output position, in steps of 2**-53."""
    return (_mix(_mix(seed) + (index + 1) * _GOLDEN_64) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """The splitmix64 finalizer: a bijection of 64-bit numbers that looks random."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    top = torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)


def _draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """Invert the filtered distribution at u; every filter keeps a prefix of the sorted tokens."""
    weights = _filtered_weights(logits, params)
    mass = float(weights.sum(dtype=torch.float64))
    vocab_size = len(weights)
    for num_sorted in (min(_PREFIX_TOKENS, vocab_size), vocab_size):
        ordered, token_ids = _largest(weights, num_sorted)
        cumulative = ordered.cumsum(0, dtype=torch.float64)
        kept = mass
        if params.top_p < 1:
            last = int(torch.searchsorted(cumulative, params.top_p * mass))
            kept = float(cumulative[last]) if last < num_sorted else mass
            if last >= num_sorted < vocab_size:
                continue  # the nucleus is wider than what has been sorted
        place = int(torch.searchsorted(cumulative, u * kept, right=True))
        if place < num_sorted:
            return int(token_ids[place])
    return int(token_ids[int((ordered > 0).sum()) - 1])  # u * kept rounded up to the very end


def _largest(weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest and their places; on a device ties are in the order of `sample_rows`."""
    if weights.device.type == "cpu":
        return weights.topk(count)
    values, places = weights.sort(descending=True, stable=True)
    return values[:count], places[:count]


def _filtered_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities relative to the likeliest token, 0 where min_p or top_k forbid."""
    scaled = ((logits - logits.max()).double() / params.temperature).float()
    weights = scaled.exp()
    threshold = params.min_p
    if 0 < params.top_k < len(weights):
        threshold = max(threshold, float(weights.topk(params.top_k).values[-1]))
    return weights.masked_fill_(weights < threshold, 0.0) if threshold > 0 else weights
