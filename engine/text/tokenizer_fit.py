"""Say where a tokenizer does not fit the weights, which is no reason to refuse them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.text.tokenizer import Tokenizer

MISFIT_CODE = "tokenizer.misfit"
"""The code of events about it."""
_LEAST_SHARE = 0.5
"""Weights are padded to a multiple of something, never so far."""
_MAX_SHOWN = 3


def misfits(
    tokenizer: Tokenizer, rows: int, unknown_ends: Mapping[str, tuple[int, ...]] | None = None
) -> list[str]:
    """List what differs, a sentence each; empty: nothing.

    Args:
        rows: of the model's embedding.
        unknown_ends: end tokens that no step can draw, by file.
    """
    known = tokenizer.vocab_size
    told = []
    if known < rows * _LEAST_SHARE:
        told.append(f"the tokenizer has {known} of the model's {rows} tokens; is it this model's?")
    if known > rows:
        beyond = sorted((one, text) for text, one in tokenizer.ids().items() if one >= rows)
        shown = ", ".join(f"{text!r} is {one}" for one, text in beyond[:_MAX_SHOWN])
        more = ", ..." if len(beyond) > _MAX_SHOWN else ""
        told.append(
            f"{len(beyond)} of the tokenizer's tokens are beyond the model's {rows}, and refused: "
            f"{shown}{more}"
        )
    for place, ids in (unknown_ends or {}).items():
        if outside := [one for one in ids if one >= rows]:
            listed = ", ".join(map(str, outside))
            told.append(
                f"{place}: end token {listed} is beyond the model's {rows}, and never comes"
            )
    return told
