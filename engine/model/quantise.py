"""Values to codes and scales: what a checkpoint that is not quantised is turned into at start.

Owns: how codes are chosen.
Invariant: no value is further from its code's than half a step of its group, but for those at the
ends of a group whose range was drawn in so that the others come nearer.
Never: decides which matrices, or to what form (engine.folder.panels_layout does).
"""

from __future__ import annotations

import torch

from engine.model.quantised_blocks import Parts

GROUP = 32
_DRAWN_IN = (1.0, 0.95, 0.9, 0.85)
"""Shares of a group's range that are tried for 4 bits; the one that errs least is taken."""


def quantised(values: torch.Tensor, form: str) -> Parts:
    """The nearest codes and scales of a form, `q8_0` or `q4_1`.

    Args:
        values: float32 [num_rows, depth], in whole groups.
        form: of engine.folder.panels.
    """
    groups = values.view(len(values), -1, GROUP)
    return _q8(groups) if form == "q8_0" else _q4(groups)


def _q8(groups: torch.Tensor) -> Parts:
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups * _inverse(scales)).round_().clamp_(-127, 127)
    return Parts(codes.to(torch.int8).flatten(1), scales.view(torch.uint8))


def _q4(groups: torch.Tensor) -> Parts:
    low, high = groups.aminmax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[torch.Tensor, ...] | None = None
    for share in _DRAWN_IN:
        minimums = (middle - reach * share).half()
        scales = (reach * (share * 2 / 15)).half()
        codes = ((groups - minimums) * _inverse(scales)).round_().clamp_(0, 15)
        errors = torch.addcmul(minimums.float(), codes, scales.float()).sub_(groups).square_()
        found = errors.sum(-1, keepdim=True), codes, scales, minimums
        if best is None:
            best = found
        else:
            is_better = found[0] < best[0]
            pairs = zip(found, best, strict=True)
            best = tuple(torch.where(is_better, new, old) for new, old in pairs)
    assert best is not None
    _, codes, scales, minimums = best
    stored = scales.view(torch.uint8), minimums.view(torch.uint8)
    return Parts(codes.to(torch.int8).flatten(1), *stored)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """float32; of 0, for a group of equal values, 0."""
    wide = scales.float()
    return torch.where(wide == 0, 0.0, 1 / wide)
