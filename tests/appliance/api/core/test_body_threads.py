"""How many pieces of work of each kind are in threads at once."""

from __future__ import annotations

import pytest

from appliance.api.core.body_threads import MAX_SMALL_BYTES, BodyThreads
from tests.appliance.api.core.test_fair_threads import Desk
from tests.worlds.daemon_parts import until

SIZES = pytest.mark.parametrize("num_bytes", [1, MAX_SMALL_BYTES + 1], ids=["small", "large"])


@SIZES
async def test_late_work_is_done_one_piece_at_a_time(num_bytes: int) -> None:
    desk = Desk()
    desk.turns = BodyThreads().of(num_bytes).late
    for what in ("a1", "b1", "c1"):
        await desk.ask(what)
    assert desk.turns.num_waiting == 2
    await desk.finish()
    assert desk.begun == ["a1", "b1", "c1"]


@SIZES
@pytest.mark.parametrize("kind", ["bodies", "grammars"])
async def test_one_caller_leaves_a_thread_to_others(num_bytes: int, kind: str) -> None:
    desk = Desk()
    desk.turns = getattr(BodyThreads().of(num_bytes), kind)
    for what in ("a1", "a2", "a3", "b1"):
        await desk.ask(what)
    assert desk.turns.num_waiting == 1
    await until(lambda: sorted(desk.begun) == ["a1", "a2", "b1"])
    await desk.finish()
    assert sorted(desk.begun) == ["a1", "a2", "a3", "b1"]
