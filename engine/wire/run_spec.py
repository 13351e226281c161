"""Define what a request wants of each sequence, in one record that the API and the worker share.

Invariant: a sequence keeps one spec from submit to its end, wherever it runs.
"""

from __future__ import annotations

import msgspec

from engine.wire.cache_scope import CacheScope
from engine.wire.sampling import SamplingParams


class RunSpec(msgspec.Struct, frozen=True):
    """Say how a sequence's tokens are drawn, where its blocks are shared, and for which owner."""

    sampling: SamplingParams
    """What comes out, and how: limits, draws, grammar, log-probabilities."""
    scope: CacheScope | None = None
    """None: it neither finds cached blocks nor leaves its own."""
    owner: str = ""
    """Shares of the queue are divided fairly between owners."""
    prediction: list[int] = []
    """Expected output, which speculation guesses from."""
