"""Describe one finding of doctor.

Invariant: a finding that is not ok has a hint, with a command if possible.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: str
    """`ok`; `note`: it serves, but slower or with less information; `bad`: it does not serve."""
    found: str
    hint: str = ""
