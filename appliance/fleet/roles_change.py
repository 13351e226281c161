"""Change roles and latency targets while requests run.

Invariant: a change is made whole or refused whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import RequestError
from engine.scheduler.router import Router
from engine.scheduler.routing.elastic import Slo
from engine.scheduler.snapshot import RolesSnapshot


@dataclass(frozen=True, slots=True)
class RolesChange:
    """A wanted change; None leaves a part unchanged."""

    roles: str | None = None
    """`elastic`, `static` or `colocated`."""
    slo_ttft_ms: int | None = None
    """The TTFT target of elastic roles; 0: relative to undisturbed prefill."""
    slo_itl_ms: int | None = None


def change_roles(router: Router, change: RolesChange, now_ns: int) -> str:
    """Make a change; return its description, empty if nothing changed.

    Raises:
        RequestError: 409 `one_worker`.
    """
    now = router.roles_now()
    if change.roles not in (None, now.roles) and now.is_colocated:
        raise RequestError(
            "the daemon has one worker, started colocated",
            code="one_worker",
            param="roles",
            status=409,
            hint="start the daemon with --roles elastic to switch while it runs",
        )
    slo = now.slo
    router.set_targets(
        Slo(_target(change.slo_ttft_ms, slo.ttft_ms), _target(change.slo_itl_ms, slo.itl_ms))
    )
    if change.roles not in (None, now.roles):
        router.switch_roles(change.roles, now_ns)
    before, after = _standing(now), _standing(router.roles_now())
    return ", ".join(f"{name} {after[name]}" for name in after if after[name] != before[name])


def roles_frame(now: RolesSnapshot) -> dict[str, object]:
    """Show roles and targets; None is a target that is relative."""
    return {
        "roles": now.roles,
        "slo_ttft_ms": now.slo.ttft_ms,
        "slo_itl_ms": now.slo.itl_ms,
    }


def _target(wanted_ms: int | None, now_ms: int | None) -> int | None:
    return now_ms if wanted_ms is None else wanted_ms or None


def _standing(now: RolesSnapshot) -> dict[str, str]:
    slo = now.slo
    return {
        "roles": now.roles,
        "ttft target": "relative" if slo.ttft_ms is None else f"{slo.ttft_ms} ms",
        "gap target": "relative" if slo.itl_ms is None else f"{slo.itl_ms} ms",
    }
