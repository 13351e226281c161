"""Judge results of a device by float32 on the host, and say how far off is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.worker.model.attention import MAX_CODE
from engine.worker.model.layers import soft_cap


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a value may be off: by a share of itself, and one of its row's root mean square."""

    of_value: float
    of_row: float


_UNIT = {
    torch.float32: 2.0**-23,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.int8: 1 / MAX_CODE,
}
"""The last place of a value, relative to it, at most; of codes, to the largest value of a head."""
TOLERANCES = {
    # weights of keys are rounded before their sum, by all kernels: 0.1 units of the row
    "attention": Tolerance(0.55, 1.3),
    # scores are rounded, too, by the twin in torch
    "bent attention": Tolerance(1.0, 6.0),
    "norm": Tolerance(1.6, 0.1),
    "norm_rows": Tolerance(1.6, 0.1),
    "gated": Tolerance(1.6, 0.1),
    # what turns may cancel: then it is off by units of what it was
    "place": Tolerance(1.1, 2.5),
    # half a code of a head's largest value, which is within five times the root mean square
    "codes": Tolerance(0.6, 2.5),
    "product": Tolerance(0.55, 1.0),
    # states and sums are float32; torch computes chunks, the kernel token by token
    "recurrent": Tolerance(0.6, 1.5),
    "record": Tolerance(1.0, 10.0),
    # rounded between its matrices, and once for each expert that is added
    "mixture": Tolerance(1.5, 4.0),
    # the same kernels with the same inputs; a library may cut sums in another way, in each layer
    "replay": Tolerance(2.0, 8.0),
}
"""Each operation's, in units of the dtype; float32 gets 100 times as much for other orders."""
_OTHER_ORDER = 100.0


def difference(
    operation: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype
) -> str | None:
    """Describe the rows that are wrong, and by how much; None: all are right.

    Args:
        actual: of the device, [num_rows, ...].
        expected: float32 of the host, as large.
        dtype: that the device computed in, or of the pool.
    """
    rows, wanted = actual.cpu().float().flatten(1), expected.flatten(1)
    tolerance, unit = TOLERANCES[operation], _UNIT[dtype]
    if dtype == torch.float32:
        unit *= _OTHER_ORDER
    size = wanted.square().mean(1, keepdim=True).sqrt()
    allowed = (wanted.abs() * tolerance.of_value + size * tolerance.of_row) * unit
    off = (rows - wanted).abs()
    is_wrong = ~(off <= allowed).all(1)  # a NaN is not
    if not is_wrong.any():
        return None
    wrong = is_wrong.nonzero()[:, 0].tolist()
    largest = torch.where(off.isnan(), torch.inf, off)[is_wrong].max().item()
    by = "hold NaN or infinity" if math.isinf(largest) else f"differ by {largest:.2g}"
    which = f"row {wrong[0]}" if len(wrong) == 1 else f"rows {wrong[0]}..{wrong[-1]}"
    return f"{which} of {len(rows)} {by}"


def judged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from a sequence's last tokens to all of it, in float32.

    q is [num_queries, num_heads, head_dim]; keys and values are [num_keys, num_kv_heads, head_dim].
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    grouped = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores = (grouped @ keys.permute(1, 2, 0)).mul_(scale).view(num_heads, num_queries, num_keys)
    if softcap is not None:
        soft_cap(scores, softcap)
    ends = torch.arange(num_keys - num_queries, num_keys)[:, None]
    places = torch.arange(num_keys)
    is_hidden = places > ends
    if window is not None:
        is_hidden |= places <= ends - window
    scores.masked_fill_(is_hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, num_queries, 1)), -1)
    weights = scores.softmax(-1)[..., :num_keys].reshape(num_kv_heads, -1, num_keys)
    out = weights @ values.transpose(0, 1)
    return out.view(num_heads, num_queries, head_dim).transpose(0, 1)


def seeded(seed: int) -> torch.Generator:
    """Seed torch's own generator: to make another takes parts of torch that no start imports."""
    return torch.default_generator.manual_seed(seed)


def poison(like: Sequence[torch.Tensor]) -> None:
    """Leave NaN in memory that the next results will lie in: unwritten rows show."""
    for each in like:
        if each.is_floating_point():
            torch.full_like(each, torch.nan)
