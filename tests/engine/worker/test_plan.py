from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.wire.prompt_order import AGEING_TOKENS_PER_S
from engine.worker.plan import is_chunk, plan


@dataclass(eq=False)
class Fake:
    num_tokens: int
    num_computed_tokens: int
    admitted_ns: int = 0
    max_chunk_beside: int | None = None

    @property
    def is_decoding(self):
        return self.num_tokens == self.num_computed_tokens + 1


def test_decoding_sequences_get_one_token_each_and_prompts_the_budget():
    decoding = [Fake(10, 9), Fake(20, 19)]
    prompt = Fake(1000, 100)
    assert plan([*decoding, prompt], 512, 0) == [
        (decoding[0], 1),
        (decoding[1], 1),
        (prompt, 512),
    ]


def test_prompts_that_fit_go_together_shortest_first():
    long, short = Fake(400, 0), Fake(100, 0)
    assert plan([long, short], 512, 0) == [(short, 100), (long, 400)]


def test_a_short_prompt_does_not_wait_for_a_chunk_of_a_long_one():
    long, short = Fake(2000, 0), Fake(100, 0)
    assert plan([long, short], 512, 0) == [(short, 100)]
    assert plan([long], 512, 0) == [(long, 512)]


def test_an_old_long_prompt_goes_before_a_new_short_one():
    second_ns = 10**9
    old = Fake(2000, 0, admitted_ns=0)
    waited_s = 1900 / AGEING_TOKENS_PER_S + 1
    now_ns = int(waited_s * second_ns)
    new = Fake(100, 0, admitted_ns=now_ns)
    assert plan([new, old], 512, now_ns)[0][0] is old


def test_a_short_prompt_waits_for_one_chunk_of_an_old_long_one_at_most():
    now_ns = 100 * 10**9
    old, new = Fake(5000, 0), Fake(100, 0, admitted_ns=now_ns)
    assert plan([new, old], 512, now_ns) == [(old, 512)]
    assert plan([new, old], 512, now_ns, is_after_chunk=True) == [(new, 100)]
    assert plan([old], 512, now_ns, is_after_chunk=True) == [(old, 512)]
    assert is_chunk([(old, 512)])
    assert not is_chunk([(new, 100), (Fake(10, 9), 1)])


def test_many_decoding_sequences_do_not_starve_prompts():
    prompt = Fake(1000, 0)
    planned = plan([*(Fake(2, 1) for _ in range(600)), prompt], 512, 0)
    assert planned[-1] == (prompt, 512)


def test_a_prompt_that_must_spare_others_has_short_chunks_beside_those_that_decode():
    stream, prompt, short = Fake(10, 9), Fake(1000, 0, max_chunk_beside=16), Fake(300, 0)
    assert plan([stream, prompt], 512, 0) == [(stream, 1), (prompt, 16)]
    assert plan([stream, prompt, short], 512, 0) == [(stream, 1), (short, 16)], "all together"
    assert plan([prompt], 512, 0) == [(prompt, 512)]
    done = Fake(10, 9, max_chunk_beside=8)
    assert plan([done, Fake(1000, 0)], 512, 0)[1][1] == 512, "it is no prompt any more"


sequences = st.lists(
    st.builds(
        lambda computed, remaining, admitted, beside: Fake(
            computed + remaining, computed, admitted, beside
        ),
        st.integers(0, 500),
        st.integers(0, 500),
        st.integers(0, 10**10),
        st.one_of(st.none(), st.integers(1, 700)),
    ),
    max_size=30,
)


@given(sequences, st.integers(1, 600), st.integers(10**10, 10**11), st.booleans())
def test_a_plan_is_within_bounds_and_wastes_nothing(
    running, max_num_batched_tokens, now_ns, after_chunk
):
    planned = plan(running, max_num_batched_tokens, now_ns, is_after_chunk=after_chunk)
    assert len({id(s) for s, _ in planned}) == len(planned)
    for sequence, num_new_tokens in planned:
        assert 1 <= num_new_tokens <= sequence.num_tokens - sequence.num_computed_tokens
    runnable = [s for s in running if s.num_tokens > s.num_computed_tokens]
    assert bool(planned) == bool(runnable)
    singles = [s for s in runnable if s.num_tokens - s.num_computed_tokens == 1]
    assert {id(s) for s in singles} <= {id(s) for s, _ in planned}
    num_tokens = sum(n for _, n in planned)
    assert num_tokens - len(singles) <= max_num_batched_tokens
    prompts = [(s, n) for s, n in planned if s.num_tokens - s.num_computed_tokens > 1]
    if any(n < s.num_tokens - s.num_computed_tokens for s, n in prompts):
        assert len(prompts) == 1  # a chunk goes alone
