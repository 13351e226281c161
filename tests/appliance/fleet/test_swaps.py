"""Who comes in when, while models are swapped: no daemon, a swap is a line in a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.fleet import swaps
from appliance.fleet.failed_models import FailedModels
from appliance.fleet.swaps import IncomingRequest, Swap, SwapLimits, Swaps
from appliance.observe.frame.protocol import RequestFrame, ResidentFrame
from engine.errors import PenstockError, QueueFull, RequestError, Unavailable


class House:
    """Requests that come in, stay, and end."""

    def __init__(
        self,
        min_stay_s: float = 0.0,
        max_waiting: int = 100,
        max_wait_s: float = 0.0,
        resident: tuple[str, ...] = (),
    ) -> None:
        self.resident = resident
        """Models that are loaded and not served, or may be."""
        self.max_wait_s = max_wait_s
        self.refused: list[tuple[str | None, str | None]] = []
        """Ids of requests that waited, and codes that were told, of those that did not come in."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.served: list[str] = []
        """Models in the order in which they were served."""
        self.broken: set[str] = set()
        """Models whose files are bad."""
        self.dying: set[str] = set()
        """Models whose workers die."""
        self.changed: set[str] = set()
        """Models whose files have changed since they failed."""
        self.now_s = 0.0
        """The clock of failed models."""
        self.num_live = self.num_prepared = 0
        self.swaps = Swaps(
            "a",
            ["a", "b", "c"],
            prepare=self._prepare,
            idle=self.idle,
            limits=lambda: SwapLimits(min_stay_s, max_waiting, 1000, self.max_wait_s),
            refused=self._note_refused,
            residents=self,
            failed=FailedModels(self._has_changed, lambda: self.now_s),
        )
        self.running = asyncio.create_task(self.swaps.run())

    def frames(self) -> list[ResidentFrame]:
        return [ResidentFrame(name, 1, None) for name in self.resident]

    def keep_loaded(self, name: str, keep_s: float) -> None:
        self.kept = name, keep_s

    def served_expires_at(self, name: str) -> str | None:
        return None

    async def unload(self, name: str, why: str) -> bool:
        return name in self.resident

    async def _has_changed(self, name: str) -> bool:
        return name in self.changed

    def _note_refused(
        self, asker: IncomingRequest, waited: RequestFrame | None, error: RequestError | None
    ) -> None:
        self.refused.append((waited and asker.owner, error and error.code))

    async def _prepare(self, name: str) -> Swap:
        self.num_prepared += 1
        if name in self.broken:
            raise PenstockError("no such folder")
        return partial(self._swap, name)

    async def _swap(self, name: str) -> str | None:
        assert self.num_live == 0, "a model was taken down under a request"
        await asyncio.sleep(0)
        assert self.num_live == 0
        if name in self.dying:
            return "its worker died"
        self.served.append(name)
        return None

    async def request(
        self,
        name: str,
        end: asyncio.Event | None = None,
        *,
        owner: str = "ana",
        num_bytes: int = 10,
        gone: asyncio.Future[None] | None = None,
    ) -> str:
        """Come in, live for a while, end; the model that served it, empty if its client left."""
        if not await self.swaps.enter(name, IncomingRequest(owner, num_bytes, arrived_ns=1), gone):
            return ""
        with self.swaps:
            await asyncio.sleep(0)  # it is read and tokenized
            self.num_live += 1
            self.idle.clear()
            served = self.swaps.current
        await (asyncio.sleep(0) if end is None else end.wait())
        assert self.swaps.current == served
        self.num_live -= 1
        if not self.num_live:
            self.idle.set()
        return served


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("not in 1000 turns of the loop")


async def test_a_request_for_another_waits_until_the_first_ones_end() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    third = asyncio.create_task(house.request("a"))  # it may not hold up the swap
    await asyncio.sleep(0.01)
    assert (house.served, second.done(), third.done()) == ([], False, False)
    end.set()
    assert [await first, await second, await third] == ["a", "b", "a"]
    assert house.served == ["b", "a"]


async def test_a_model_stays_for_a_while_so_that_two_users_do_not_thrash() -> None:
    house = House(min_stay_s=0.5)
    assert await house.request("a") == "a"
    swapped = asyncio.create_task(house.request("b"))
    for _ in range(5):
        assert await house.request("a") == "a"  # meanwhile it serves its own
    assert await swapped == "b"
    assert house.served == ["b"]


async def test_an_idle_model_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(min_stay_s=1e6)
    async with asyncio.timeout(120):
        assert await house.request("b") == "b", "nobody has asked for the first one"
        monkeypatch.setattr(swaps, "IDLE_S", 0.05)
        assert await house.request("c") == "c"
    assert house.served == ["b", "c"]


async def test_a_model_in_use_stays_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    house, end = House(min_stay_s=1e6), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: len(house.swaps.requests(0)) == 1)
    await asyncio.sleep(0.01)
    assert house.swaps.next is None
    (shown,) = house.swaps.requests(0)
    assert (shown.waits_for or "").startswith("model b, ")
    monkeypatch.setattr(swaps, "IDLE_S", 0.05)
    end.set()
    assert [await first, await second] == ["a", "b"]


async def test_who_waits_is_shown_with_what_for_and_can_be_cancelled() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(
        house.swaps.enter("b", IncomingRequest("ann", 5, "r2", arrived_ns=0))
    )
    await until(lambda: house.swaps.next == "b")
    third = asyncio.create_task(
        house.swaps.enter("a", IncomingRequest("bob", 5, "r3", arrived_ns=10**9))
    )
    await until(lambda: len(house.swaps.requests(0)) == 2)
    shown = house.swaps.requests(3 * 10**9)
    assert [(each.id, each.user, each.model, each.phase) for each in shown] == [
        ("r2", "ann", "b", "queued"),
        ("r3", "bob", "a", "queued"),
    ]
    assert [each.age_ms for each in shown] == [3000.0, 2000.0]
    waits = [(each.waits_for.partition(",")[0], each.waits_for[-1]) for each in shown]
    assert waits == [("model b", "a"), ("model a", "b")]
    assert house.swaps.owner_of("r2") == "ann"
    assert house.swaps.cancel("r2", "root")
    assert not house.swaps.cancel("r2", "root")
    with pytest.raises(RequestError, match="cancelled by root"):
        await second
    end.set()
    await first
    assert await third
    assert house.swaps.requests(0) == []
    assert house.served == []


async def test_a_model_is_said_to_be_loaded_when_the_last_reply_of_the_other_has_ended() -> None:
    house, end, waited = House(), asyncio.Event(), set()

    async def swap(name: str) -> None:
        waited.update(each.waits_for for each in house.swaps.requests(0))

    house._swap = swap
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    end.set()
    assert [await first, await second] == ["a", "b"]
    assert waited == {"model b, now loading"}


async def test_nobody_waits_longer_than_a_queue_lets_them() -> None:
    house, end = House(max_wait_s=0.05), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    with pytest.raises(Unavailable, match=r"0\.05 s .*max_queue_wait") as late:
        await house.request("b", owner="ben")
    assert (late.value.code, late.value.retry_after_ms) == ("queue_timeout", 50)
    assert house.swaps.frame().num_waiting == 0
    house.max_wait_s = 0.0
    end.set()
    assert [await first, await house.request("c")] == ["a", "c"]
    assert (house.served, house.refused) == (["c"], [("ben", "queue_timeout")])


async def test_without_a_name_it_is_whatever_is_served_or_comes() -> None:
    house = House()
    assert await house.request("") == "a"
    assert await house.request("b") == "b"
    assert await house.request("") == "b"
    assert house.served == ["b"]


async def test_what_cannot_be_served_is_an_error_for_those_who_asked_and_for_nobody_else() -> None:
    house = House()
    house.broken.add("b")
    with pytest.raises(Unavailable, match="no such folder") as first:
        await house.request("b")
    assert (first.value.code, first.value.retry_after_ms) == ("swap_failed", 30_000)
    assert [await house.request("a"), await house.request("c")] == ["a", "c"]
    house.broken.clear()
    with pytest.raises(Unavailable, match="no such folder"):
        await house.request("b")  # its files are not looked at again so soon
    assert house.num_prepared == 2


async def test_a_model_that_dies_at_its_start_is_left_alone_for_a_while() -> None:
    house = House()
    house.dying.add("b")
    with pytest.raises(Unavailable, match="its worker died") as first:
        await house.request("b")
    assert (first.value.code, first.value.retry_after_ms) == ("swap_failed", 60_000)
    assert [await house.request("a"), await house.request("c")] == ["a", "c"]
    with pytest.raises(Unavailable, match="its worker died"):
        await house.request("b")  # at once: c stays
    assert (house.served, house.swaps.current) == (["c"], "c")


async def test_a_model_that_keeps_failing_is_tried_ever_less_often_until_it_is_served() -> None:
    house = House()
    house.dying.add("b")
    rests_s = []
    for _ in range(8):
        with pytest.raises(Unavailable, match="its worker died") as caught:
            await house.request("b")
        rests_s.append(caught.value.retry_after_ms // 1000)
        house.now_s += rests_s[-1] - 1
        with pytest.raises(Unavailable, match="its worker died") as caught:
            await house.request("b")
        assert caught.value.retry_after_ms == 1000
        [told] = house.swaps.frame().failed
        assert (told.model, told.reason) == ("b", "its worker died")
        house.now_s += 1
    assert rests_s == [60, 120, 240, 480, 960, 1800, 1800, 1800]
    assert house.num_prepared == 8
    house.dying.clear()
    assert [await house.request("b"), await house.request("a")] == ["b", "a"]
    assert house.swaps.frame().failed == []
    house.dying.add("b")
    with pytest.raises(Unavailable) as caught:
        await house.request("b")
    assert caught.value.retry_after_ms == 60_000


async def test_a_failed_model_whose_files_have_changed_is_tried_at_once() -> None:
    house = House()
    house.dying.add("b")
    with pytest.raises(Unavailable, match="its worker died"):
        await house.request("b")
    house.dying.clear()
    house.changed.add("b")
    assert await house.request("b") == "b"


async def test_who_names_no_model_is_not_refused_with_those_of_one_that_fails() -> None:
    house, end = House(), asyncio.Event()
    house.dying.add("b")
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    third = asyncio.create_task(house.request(""))
    await asyncio.sleep(0)
    end.set()
    assert [await first, await third] == ["a", "a"]
    with pytest.raises(Unavailable):
        await second


async def test_only_so_many_wait_and_some_room_is_left_for_a_newcomer() -> None:
    house, end = House(max_waiting=4), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    waiting = [asyncio.create_task(house.request("b")) for _ in range(3)]
    await until(lambda: house.swaps.frame().num_waiting == 3)
    with pytest.raises(QueueFull) as caught:
        await house.request("b")
    assert caught.value.code == "user_quota"
    waiting.append(asyncio.create_task(house.request("c", owner="ben")))
    await until(lambda: house.swaps.frame().num_waiting == 4)
    with pytest.raises(QueueFull) as caught:
        await house.request("c", owner="eve")
    assert caught.value.code == "queue_full"
    end.set()
    assert [await first, *[await one for one in waiting]] == ["a", "b", "b", "b", "c"]
    assert house.swaps.frame().num_waiting == 0


async def test_bodies_that_wait_are_bounded_together() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b", num_bytes=800))
    await until(lambda: house.swaps.next == "b")
    with pytest.raises(QueueFull, match="bytes"):
        await house.request("b", owner="ben", num_bytes=300)
    end.set()
    assert [await first, await second] == ["a", "b"]


async def test_who_hangs_up_while_waiting_frees_its_place_and_holds_nobody_up() -> None:
    house, end = House(max_waiting=1), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = asyncio.create_task(house.request("b", gone=gone))
    await until(lambda: house.swaps.next == "b")
    with pytest.raises(QueueFull):
        await house.request("c", owner="ben")
    gone.set_result(None)
    assert await left == ""
    assert house.refused == [(None, "queue_full"), ("ana", None)]
    third = asyncio.create_task(house.request("c", owner="ben"))
    await asyncio.sleep(0)
    end.set()
    assert [await first, await third] == ["a", "c"]
    assert house.served == ["c"]


async def test_a_swap_that_nobody_waits_for_any_more_keeps_nobody_out() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    gone = asyncio.get_running_loop().create_future()
    second = asyncio.create_task(house.request("b", gone=gone))
    await until(lambda: house.swaps.next == "b")
    third = asyncio.create_task(house.request("a"))
    gone.set_result(None)
    await until(lambda: second.done() and third.done())  # while the first goes on
    assert (await second, await third) == ("", "a")
    assert (first.done(), house.swaps.next, house.served) == (False, None, [])
    end.set()
    assert await first == "a"


async def test_who_is_cancelled_while_waiting_holds_nobody_up() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    gone = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    gone.cancel()
    end.set()
    assert await first == "a"
    assert [await house.request("a"), await house.request("c")] == ["a", "c"]


async def test_a_drain_refuses_those_who_wait_and_a_resume_lets_them_come_again() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    house.swaps.close()
    with pytest.raises(Unavailable, match="draining"):
        await second
    end.set()
    assert await first == "a"
    house.swaps.open()
    assert await house.request("b") == "b"


def test_a_name_is_also_known_as_ollamas_clients_write_it() -> None:
    async def names() -> list[str]:
        swaps = House().swaps
        return [swaps.name_of(name) for name in ("b", "b:latest", "c:7b", "", "claude-x")]

    assert asyncio.run(names()) == ["b", "b", "", "a", ""]


async def test_an_alias_means_the_first_model_whichever_is_served() -> None:
    house = House()
    house.swaps = Swaps(
        "a",
        ["a", "b"],
        prepare=house._prepare,
        idle=house.idle,
        limits=house.swaps._limits,
        aliases=["gpt-*"],
    )
    asked = ("gpt-4:latest", "gpt-4", "b", "", "claude", "a")
    assert [house.swaps.name_of(each) for each in asked] == ["a", "a", "b", "a", "", "a"]


async def test_who_names_no_model_gets_the_first_whatever_others_have_swapped_in() -> None:
    house = House()
    assert await house.request("b") == "b"
    assert await house.request(house.swaps.name_of("")) == "a"


async def test_at_the_end_nobody_is_left_waiting() -> None:
    house, end = House(), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    house.running.cancel()
    house.swaps.close()
    with pytest.raises(Unavailable, match="draining"):
        await second
    with pytest.raises(Unavailable, match="draining"):
        await house.request("a")
    end.set()
    assert await first == "a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=30))
def test_everybody_who_stays_is_served_by_the_model_they_named(
    asked: list[tuple[str, int, bool]],
) -> None:
    async def play() -> None:
        house, tasks, leaving = House(), [], []
        for name, num_turns, leaves in asked:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            tasks.append(asyncio.create_task(house.request(name, gone=gone)))
            leaving += [gone] if leaves else []
            for _ in range(num_turns):
                await asyncio.sleep(0)
            for one in leaving[:-1]:
                one.set_result(None)
            leaving = leaving[-1:]
        served = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        for got, (name, _, leaves) in zip(served, asked, strict=True):
            assert got == name or (leaves and not got)
        assert len(house.served) <= len(asked)
        assert await asyncio.wait_for(house.request("b"), 120) == "b"  # nobody has kept a place
        house.running.cancel()

    asyncio.run(play())


async def test_a_busy_model_makes_place_for_a_loaded_one_without_a_minimum_stay() -> None:
    house, end = House(min_stay_s=3600, resident=("b",)), asyncio.Event()
    first = asyncio.create_task(house.request("a", end))
    await until(lambda: house.num_live == 1)
    second = asyncio.create_task(house.request("b"))
    await until(lambda: house.swaps.next == "b")
    end.set()
    assert [await first, await second] == ["a", "b"]


async def test_the_first_model_comes_back_once_the_served_one_has_had_its_time() -> None:
    house, end = House(), asyncio.Event()
    house.swaps.go_home()
    assert await house.request("b") == "b"
    house.swaps.keep_loaded(0.0)
    assert (house.kept, house.swaps.stays("b")) == (("b", 0.0), False)
    running = asyncio.create_task(house.request("b", end))
    await until(lambda: house.num_live == 1)
    house.swaps.go_home()
    await until(lambda: house.swaps.next == "a")
    assert house.swaps.current == "b", "its last reply has not ended"
    end.set()
    await until(lambda: house.swaps.current == "a")
    assert (await running, house.served, house.swaps.stays("a")) == ("b", ["b", "a"], True)


async def test_a_first_model_that_fails_to_come_back_is_left_alone() -> None:
    house = House()
    assert await house.request("b") == "b"
    house.broken.add("a")
    house.swaps.go_home()
    await until(lambda: house.num_prepared == 2)
    for _ in range(100):
        house.swaps.go_home()
        await asyncio.sleep(0)
    assert (house.num_prepared, house.swaps.current) == (2, "b")
