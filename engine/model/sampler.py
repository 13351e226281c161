"""The next token: greedy, or a draw that depends on (seed, output index) and nothing else.

The distribution is vLLM's: temperature, then min_p against the likeliest token, then top_k (ties
with the k-th are kept), then the smallest set of likeliest tokens whose probability reaches top_p.
A draw inverts its cumulative distribution, likeliest token first, at one uniform number: the
splitmix64 hash of the hashed seed and the output index. So a sequence draws the same tokens in
any batch, on any worker, after any recovery. A temperature below 1e-5 is greedy. Logits that are
not finite mean a broken model: NaN counts as impossible, infinity as the largest float32, and a
row with nothing possible yields token 0.
Owns: what SamplingParams say about the distribution. Called by: engine.workers.runner.
Invariant: log-probabilities are of the raw logits, before adjustments, temperature and filters.
Never: keeps random state, ends a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sequence import SamplingParams, TokenLogprob

_GREEDY_BELOW = 1e-5
_MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's number for "never"
_PREFIX_TOKENS = 256  # sorted first; most draws end among them, and sorting all costs milliseconds
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


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
    return [
        TokenLogprob(*row)
        for row in zip(chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]


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
        ordered, token_ids = weights.topk(num_sorted)
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


def _filtered_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities relative to the likeliest token, 0 where min_p or top_k forbid."""
    scaled = ((logits - logits.max()).double() / params.temperature).float()
    weights = scaled.exp()
    threshold = params.min_p
    if 0 < params.top_k < len(weights):
        threshold = max(threshold, float(weights.topk(params.top_k).values[-1]))
    return weights.masked_fill_(weights < threshold, 0.0) if threshold > 0 else weights
