"""No stream stands still for a prompt, whatever dies, stalls, starves and comes back meanwhile.

Time is what steps take by one law, which the router has measured or not. A stream's tokens come
one a step, so its gap is the step's time; beside a prompt this may be its target, or twice what the
step takes without the prompt.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.scheduler import recovery
from engine.scheduler.routing import elastic, roles_in_force, worker_routes
from engine.scheduler.routing.elastic import Slo
from engine.scheduler.routing.roles_in_force import MAX_GAP_RATIO
from engine.scheduler.routing.step_times import place_of
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import MeasuredStep, Stepped
from tests.worlds.router_world import World, expected_tokens

ARMS = ("alias", "elastic", "gpu", "2x2 elastic", "elastic peer", "2x1 peer", "1x2 shm")
STEP_TOKENS, LEAST = 8, 2
NUM_WALKS, NUM_ACTIONS = 4, 400
INACCURACY = 1.3
"""Of times read between measured sizes."""


def step_ms(num_prompt_tokens, batch):
    """What a step takes when nothing starves it."""
    return 10 + 3 * num_prompt_tokens + 0.5 * batch


def know(roles):
    """Let the router measure steps of all sizes."""
    shapes = [(1, size) for size in (1, 2, 4, 8, 16)] + [(size, 1) for size in (2, 4, 8, 16)]
    for name in roles.topology.names:
        for num_cores in range(1, len(roles.cores.all) + 1):
            steps = [
                MeasuredStep(
                    count, size, before, step_ms(0 if size == 1 else size, count * (size == 1))
                )
                for count, size in shapes
                for before in (0, 256)
            ]
            roles.measured(place_of(name, num_cores), steps * 3)


class StreamWorld(World):
    """A world that watches each step with streams in it, and each placement."""

    def __init__(self, arm, *, is_known, itl_ms):
        super().__init__(arm, num_blocks=129, num_slots=6)
        self.seen = Counter()
        roles, self.is_known, self.itl_ms = self.router.roles, is_known, itl_ms
        roles.slo = Slo(itl_ms=itl_ms)
        if is_known:
            know(roles)
        self.route, roles.route = roles.route, self.watched_route
        self.late = set()
        """Workers that got a stream in the middle of a step."""

    def watched_route(self, sequence, candidates, running, now_ns, hits):
        running, topology = list(running), self.topology
        choice = self.route(sequence, candidates, running, now_ns, hits)
        worker, lives = choice.pair.prefill, self.router.roles.ready_workers
        prefills = set(topology.playing("prefill"))
        num_left = sequence.num_tokens - hits.get(topology.pool_of(worker), 0)
        streams = [s for s in running if s.stages[-1].worker == worker and s.output_token_ids]
        if num_left > STEP_TOKENS and streams and worker not in prefills and lives & prefills:
            assert choice.spares_streams, (
                "a long prompt joins streams although a prefill worker lives"
            )
            chunk = choice.max_chunk_tokens or STEP_TOKENS
            most_ms = self.itl_ms or MAX_GAP_RATIO * step_ms(0, len(streams))
            assert step_ms(chunk, len(streams)) <= INACCURACY * most_ms
            self.seen["prompts beside streams, by prediction"] += 1
        return choice

    def step(self, worker):
        """One step, whose streams must not have waited for a prompt."""
        streams = {
            r.seq_id for r in worker.running.values() if r.is_decoding and r.num_output_tokens
        }
        limits = {
            r.seq_id: r.max_chunk_beside for r in worker.running.values() if not r.is_decoding
        }
        super().step(worker)
        last = worker.outbox[-1] if worker.has_stepped else None
        entries = last.entries if isinstance(last, Stepped) else []
        scheduled = [entry for entry in entries if entry.num_scheduled_tokens]
        if not any(entry.seq_id in streams for entry in scheduled):
            return
        num_tokens = sum(e.num_scheduled_tokens for e in scheduled if not e.is_decoding)
        batch = sum(e.num_scheduled_tokens for e in scheduled if e.is_decoding)
        limits = [limits[e.seq_id] for e in scheduled if not e.is_decoding]
        limits = [limit for limit in limits if limit is not None]
        self.seen["steps with streams"] += 1
        if not num_tokens:
            return
        self.seen["steps with streams and prompts"] += 1
        usual_ms = step_ms(0, batch)
        if limits:
            assert num_tokens <= max(min(limits), LEAST)
            if self.is_known and num_tokens > LEAST:
                assert step_ms(num_tokens, batch) <= INACCURACY * MAX_GAP_RATIO * usual_ms
        if not self.is_known:
            assert limits or num_tokens <= LEAST, "nothing joins streams on a guess"


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks that are shorter than the steps of fake workers."""
    monkeypatch.setattr(roles_in_force, "LEAST_CHUNK_BESIDE", LEAST)
    for module in (elastic, recovery, worker_routes):
        monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", LEAST)


def wander(world, rng, num_actions):
    """Streams and long prompts come; workers die, stall, starve and return."""
    names, live, down, starved = list(world.workers), [], set(), set()
    for _ in range(num_actions):
        world.now_ns += rng.randrange(20_000_000)
        name, action = rng.choice(names), rng.random()
        worker = world.workers[name]
        if action < 0.05 and len(world.router.queue) < 12:
            is_stream = rng.random() < 0.5
            sequence = world.sequence(
                rng.randint(1, 6) if is_stream else rng.randint(9, 60),
                rng.randint(10, 60) if is_stream else rng.randint(1, 4),
            )
            world.submit(sequence)
            live.append(sequence)
        elif action < 0.055 and live:
            world.router.abort(rng.choice(live), FinishReason.ABORT, world.now_ns)
        elif action < 0.065 and name not in down:
            down |= world.kill(name)
        elif action < 0.10 and down:
            down -= world.revive(rng.choice(sorted(down)))
        elif action < 0.12:
            stalled = frozenset(n for n in names if n not in down and rng.random() < 0.3)
            world.router.set_stalled(stalled, world.now_ns)
        elif action < 0.14:
            starved = {n for n in names if rng.random() < 0.3}
        elif action < 0.145:
            worker.break_copies()
        elif name in down or (name in starved and rng.random() < 0.9):
            continue
        elif action < 0.4:
            world.receive(worker)
        elif action < 0.7:
            world.step(worker)
        elif action < 0.8:
            worker.copy(world.now_ns)
        elif worker.outbox:
            world.deliver(worker)
    world.router.set_stalled(frozenset(), world.now_ns)
    world.revive_all()
    world.run()
    world.assert_all_free()
    for sequence in live:
        tokens = world.emitted.get(sequence.seq_id, [])
        assert tokens == expected_tokens(sequence)[: len(tokens)]
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == sequence.sampling.max_tokens
    assert {s.seq_id for s in live} == set(world.ended), "no prompt waits for ever"


@pytest.mark.parametrize("arm", ARMS)
def test_no_stream_stands_still_for_a_prompt(arm, short_chunks):
    seen = Counter()

    @settings(
        max_examples=NUM_WALKS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
    @given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, None, 20, 60]))
    def walks(rng, is_known, itl_ms):
        world = StreamWorld(arm, is_known=is_known, itl_ms=itl_ms)
        wander(world, rng, NUM_ACTIONS)
        seen.update(world.seen)
        seen["walks"] += 1

    walks()
    print(arm, dict(seen))
    num_mixed = seen["steps with streams and prompts"]
    assert num_mixed > 0


class Handoffs(World):
    """A stream at `decode`, and a long prompt whose first handoffs fail."""

    def __init__(self, arm, num_failing, has_twin=False, **sizes):
        super().__init__(arm, **sizes)
        self.num_failing, self.num_prompt_tokens = num_failing, Counter()
        stream, self.prompt = self.sequence(4, 50), self.sequence(40, 4)
        self.twins = [self.sequence(prompt=self.prompt.prompt_token_ids, max_tokens=30)] * has_twin
        self.finish_first_tokens(stream)
        self.submit(*self.twins, self.prompt)

    def finish_first_tokens(self, stream):
        self.submit(stream)
        while stream.worker != "decode":
            self.tick()

    def deliver(self, worker):
        """Count the prompt's tokens by worker."""
        report = worker.outbox[0]
        for entry in report.entries if isinstance(report, Stepped) else ():
            if entry.seq_id == self.prompt.seq_id and not entry.is_decoding:
                self.num_prompt_tokens[worker.name] += entry.num_scheduled_tokens
        super().deliver(worker)

    def tick(self):
        """Break what is under way of the prompt before it can be copied."""
        is_coming = self.prompt.worker == "prefill" or self.prompt.phase == "handing_off"
        is_coming &= all(twin.worker == "decode" for twin in self.twins)
        if is_coming and self.prompt.num_failed_copies < self.num_failing:
            for worker in self.workers.values():
                self.receive(worker)
                worker.break_copies()
        super().tick()


@pytest.mark.parametrize("arm", ["peer", "shm", "gpu peer"])
@pytest.mark.parametrize("num_failing", [1, 2, 3])
def test_a_prompt_whose_copies_fail_goes_to_a_worker_of_prompts_again(
    arm, num_failing, short_chunks
):
    world = Handoffs(arm, num_failing)
    world.run()
    assert world.emitted[world.prompt.seq_id] == expected_tokens(world.prompt)
    assert world.prompt.num_failed_copies == num_failing
    on_decode = world.num_prompt_tokens["decode"]
    assert (on_decode > LEAST) == (num_failing == worker_routes.MAX_FAILED_COPIES)
    world.assert_all_free()


def test_a_twins_blocks_do_not_count_where_a_prompt_whose_copies_failed_has_its_own(short_chunks):
    world = Handoffs("peer", 1, has_twin=True, num_blocks=200)
    world.run()
    assert world.emitted[world.prompt.seq_id] == expected_tokens(world.prompt)
    assert world.prompt.num_failed_copies == 1
    assert world.num_prompt_tokens["decode"] <= LEAST
    world.assert_all_free()
