"""What doctor finds on a machine, with the machine's answers in its place."""

from __future__ import annotations

import pytest

from appliance.doctor import checks


@pytest.mark.parametrize(("hard", "verdict"), [(200, "note"), (1 << 20, "ok")])
def test_connections_are_held_against_the_hard_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, hard: int, verdict: str
) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (64, hard))
    assert checks._open_files(1000).verdict == verdict
