"""How many workers do what, and on which devices."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import GpuLink, Inventory
from appliance.fleet.worker_counts import divide


class CountingInventory(Inventory):
    """Counts how often it is asked for a link."""

    num_asked = 0

    def link(self, one: Gpu, other: Gpu) -> GpuLink:
        type(self).num_asked += 1
        return super().link(one, other)


def divided_boards(num_boards: int, num_instances: int) -> CountingInventory:
    gpus = tuple(
        Gpu(f"gpu{board}/mig{i}", "MIG", f"MIG-{board}-{i}", 10 << 30)
        for board in range(num_boards)
        for i in range(num_instances)
    )
    boards = [f"gpu{board}" for board in range(num_boards)]
    CountingInventory.num_asked = 0
    links = tuple(
        GpuLink(one, other, 18, level=10 if int(one[3:]) // 4 == int(other[3:]) // 4 else 50)
        for one, other in itertools.combinations(boards, 2)
    )
    return CountingInventory(gpus, links)


@pytest.mark.parametrize("num_workers", [56, 40, 2])
def test_instances_of_eight_boards_are_divided_at_once(num_workers: int) -> None:
    machine = divided_boards(8, 7)
    started_s = time.thread_time()
    prefill, decode = divide(machine.gpus, num_workers // 2, num_workers // 2, machine)
    assert time.thread_time() - started_s < 30  # comparing all ways would take years
    assert machine.num_asked <= 8 * 8
    assert len({gpu.uuid for gpu in (*prefill, *decode)}) == num_workers
    for board in {gpu.board for gpu in (*prefill, *decode)}:
        counts = [sum(gpu.board == board for gpu in role) for role in (prefill, decode)]
        assert abs(counts[0] - counts[1]) <= 1, "who hands over has somebody on its board"


@settings(deadline=None)
@given(st.data())
def test_no_other_division_of_a_few_gpus_has_better_links(data: st.DataObject) -> None:
    boards = [f"gpu{i}" for i in range(data.draw(st.integers(2, 4)))]
    gpus: list[Gpu] = []
    for board in boards:
        count = data.draw(st.sampled_from([1, 1, 2]))
        parts = [Gpu(f"{board}/mig{i}", "MIG", f"MIG-{board}{i}", 1) for i in range(count)]
        gpus += parts if count > 1 else [Gpu(board, "GPU", f"GPU-{board}", 1)]
    links = tuple(
        GpuLink(
            a, b, data.draw(st.integers(0, 2)), None, data.draw(st.sampled_from([10, 50])), True
        )
        for a, b in itertools.combinations(boards, 2)
    )
    machine, count = Inventory(tuple(gpus), links), data.draw(st.integers(2, len(gpus)))
    num_prefill = data.draw(st.integers(1, count - 1))

    def worth(pairs: Iterable[tuple[Gpu, Gpu]]) -> tuple[int, int, int]:
        found = [machine.link(*pair) for pair in pairs]
        paths = [-(link.level or 0) for link in found if not link.num_nvlinks]
        reach = sum(bool(link.can_reach) for link in found)
        return reach, sum(link.num_nvlinks for link in found), sum(paths)

    prefill, decode = divide(gpus, num_prefill, count - num_prefill, machine)
    pairs = worth(itertools.combinations((*prefill, *decode), 2))
    assert pairs == max(
        worth(itertools.combinations(some, 2)) for some in itertools.combinations(gpus, count)
    )
    assert worth(itertools.product(prefill, decode)) == max(
        worth(itertools.product(some, [gpu for gpu in (*prefill, *decode) if gpu not in some]))
        for some in itertools.combinations((*prefill, *decode), num_prefill)
    )
