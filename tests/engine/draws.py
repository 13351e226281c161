"""Draw rows of logits by the reference in torch."""

import torch

from engine.worker.model.sampler import draw_of, sample_rows


def draws_tensor(params, indices):
    """What sample_rows() is told of each row."""
    rows = [draw_of(p, index) for p, index in zip(params, indices, strict=True)]
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), -1)


def drawn(logits, params, indices):
    """One token per row."""
    return sample_rows(logits, draws_tensor(params, indices)).tolist()
