"""Two worker processes over one GPU's memory: handoffs that move nothing, and deaths."""

import asyncio
import os
import signal

import pytest

from appliance.devices.gpu_list import Gpu
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.spread import GPU_STEP_TOKENS
from appliance.fleet.supervisor import Supervisor
from engine.wire.messages import Copied, Copy, GpuSpec, PoolMade, PoolSpec, Setup, Stepped
from tests.checkpoints import load_oracle
from tests.engine.gpu_worker import MAX_MARGIN, PROMPT, SERVED, admit, assert_like_the_oracle

START_S = 120


class Workers:
    """A prefill and a decode worker, as the daemon starts them; over one memory or with a ring."""

    def __init__(self, checkpoint, uuid, served=SERVED[0], staging=None):
        dtype, block_size = served
        gpu = Gpu("gpu0", "GPU", uuid, 0)
        self.reports, self.died = asyncio.Queue(), []
        workers = []
        all_shares = ("maps", "exports") if staging is None else (None, None)
        for name, shares in zip(("prefill", "decode"), all_shares, strict=True):
            plan = WorkerPlan(name, tuple(sorted(os.sched_getaffinity(0)))[:2], "kv", gpu, shares)
            setup = Setup(
                worker=name,
                model_dir=str(checkpoint.folder),
                dtype=dtype,
                block_size=block_size,
                pool=PoolSpec("kv", None, 200),
                other_pools=[] if staging is None else [staging],
                weights=None,
                cpus=list(plan.cpus),
                max_num_batched_tokens=GPU_STEP_TOKENS,
                max_model_len=64,
                gpu=GpuSpec(uuid, shares, is_shared=True),
            )
            workers.append((plan, setup))
        self.supervisor = Supervisor(
            workers,
            [] if staging is None else [staging.fd],
            on_report=lambda name, report: self.reports.put_nowait((name, report)),
            on_ready=lambda name: None,
            on_died=lambda name, about: self.died.append(name),
            on_lost=lambda name, about: self.died.append(f"{name} for good: {about}"),
        )

    async def __aenter__(self):
        self.supervisor.spawn_all()
        async with asyncio.timeout(START_S):
            await self.supervisor.run()
        return self

    async def __aexit__(self, *raised):
        await self.supervisor.stop()

    async def run(self, name, command):
        """Admit, and the tokens until it is released; also the last step's progress."""
        self.supervisor.send(name, command)
        tokens = []
        async with asyncio.timeout(START_S):
            while True:
                _, report = await self.reports.get()
                if isinstance(report, PoolMade | Copied):
                    continue
                assert isinstance(report, Stepped)
                for entry in report.entries:
                    tokens += entry.token_ids
                    if entry.released:
                        return tokens, entry.num_computed_tokens

    async def handed_over(self):
        """A sequence's tokens, prefilled by one and decoded by the other."""
        tokens, computed = await self.run("prefill", admit(until=1))
        rest, _ = await self.run("decode", admit(tokens, computed))
        return tokens + rest

    async def copied_over(self):
        """The same by way of the ring."""
        first = admit(until=1)
        tokens, computed = await self.run("prefill", first)
        out = [(first.block_table[0], 3), (first.block_table[1], 1)]
        await self.copy("prefill", Copy(1, "kv", "ring", out, None))
        moved = admit(tokens, computed, seq_id=2)
        back = [(3, moved.block_table[0]), (1, moved.block_table[1])]
        await self.copy("decode", Copy(2, "ring", "kv", back, None))
        rest, _ = await self.run("decode", moved)
        return tokens + rest

    async def copy(self, name, copy):
        """A copy, until all of it is there."""
        self.supervisor.send(name, copy)
        async with asyncio.timeout(START_S):
            while True:
                _, report = await self.reports.get()
                if isinstance(report, Copied) and report.is_last:
                    assert (report.num_pairs, report.error) == (2, None)
                    return

    async def back(self, *old_pids):
        async with asyncio.timeout(START_S):
            states = self.supervisor.workers.values()
            while not all(  # noqa: ASYNC110 - tests look on from outside
                w.state == "ready" and w.pid not in old_pids for w in states
            ):
                await asyncio.sleep(0.05)


def run(test):
    asyncio.run(test)


@pytest.mark.parametrize("served", SERVED)
def test_a_handoff_is_an_admit_and_the_tokens_are_transformers(checkpoint, uuid, served):
    async def test():
        async with Workers(checkpoint, uuid, served) as workers:
            for _ in range(20):
                tokens = await workers.handed_over()
                assert len(tokens) == 12
                oracle = load_oracle(checkpoint.folder)
                assert_like_the_oracle(oracle, PROMPT, tokens, MAX_MARGIN[served[0]])

    run(test())


@pytest.mark.parametrize("served", SERVED)
def test_a_handoff_by_way_of_the_host_is_the_same(checkpoint, uuid, served):
    fd, num_slots, (dtype, block_size) = os.memfd_create("ring"), 5, served
    os.ftruncate(fd, num_slots * checkpoint.config.kv_block_bytes(block_size, dtype))

    async def test():
        async with Workers(checkpoint, uuid, served, PoolSpec("ring", fd, num_slots)) as workers:
            tokens = await workers.copied_over()
            assert len(tokens) == 12
            oracle = load_oracle(checkpoint.folder)
            assert_like_the_oracle(oracle, PROMPT, tokens, MAX_MARGIN[served[0]])

    run(test())
    os.close(fd)


def test_a_killed_mapping_worker_loses_nothing(checkpoint, uuid):
    async def test():
        async with Workers(checkpoint, uuid) as workers:
            expected = await workers.handed_over()
            tokens, computed = await workers.run("prefill", admit(until=1))
            mapper = workers.supervisor.workers["prefill"].pid
            os.kill(mapper, signal.SIGKILL)
            # what it had computed is where it was, for the other worker and for its next life
            rest, _ = await workers.run("decode", admit(tokens, computed))
            assert tokens + rest == expected
            await workers.back(mapper)
            assert workers.died == ["prefill"]
            assert await workers.handed_over() == expected

    run(test())


def test_a_killed_exporting_worker_takes_the_other_along(checkpoint, uuid):
    async def test():
        async with Workers(checkpoint, uuid) as workers:
            expected = await workers.handed_over()
            pids = [worker.pid for worker in workers.supervisor.workers.values()]
            os.kill(workers.supervisor.workers["decode"].pid, signal.SIGKILL)
            await workers.back(*pids)
            assert workers.died == ["decode", "prefill"]
            assert await workers.handed_over() == expected

    run(test())
