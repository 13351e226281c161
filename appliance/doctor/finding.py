"""Describe one finding of doctor.

Owns: the record.
Invariant: what is not good has a hint, a command where there is one.
Never: looks at anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    verdict: str
    """`ok`; `note`: it serves, slower or with less to show; `bad`: it does not serve."""
    found: str
    hint: str = ""
