"""Compute plainly what fast code is compared with."""

import torch


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one sequence without paging in float64; every backend must agree."""
    num_queries, num_keys, num_groups = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(num_groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    for i in range(num_queries):
        position = num_keys - num_queries + i
        scores[:, i, position + 1 :] = -torch.inf
        if window is not None:
            scores[:, i, : max(0, position - window + 1)] = -torch.inf
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :num_keys]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
