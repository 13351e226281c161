"""A request is described in words, and its time as bars that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame.latency import Stages
from appliance.observe.frame.request_facts import STAGES, request_facts, restored_from, waterfall

SSD = (
    "3 of 4 blocks from the SSD in 5.0 ms: predicted 4.0 ms to load, recomputing 9.0 ms; "
    "lost 0.0 ms"
)
DRAM = "10 of 10 blocks from DRAM in 1.0 ms: predicted 0.5 ms to load, recomputing not known"
UNLOADED = "4 blocks not loaded from DRAM: predicted 2.0 ms"


@pytest.mark.parametrize(
    ("reason", "tier"),
    [
        (SSD, "SSD"),
        (DRAM, "DRAM"),
        (f"{DRAM}; {SSD}; {SSD}", "DRAM and SSD"),
        (f"{SSD.replace('3 of 4', '0 of 4')}; {DRAM}", "DRAM"),
        (f"{UNLOADED}; {SSD}", "SSD"),
        (None, "SSD"),
    ],
)
def test_where_blocks_came_from_is_read_from_the_words_that_are_logged(reason, tier):
    assert restored_from(reason) == tier


REQUEST = {
    "id": "chatcmpl-1", "phase": "decoding", "prompt_tokens": 1204, "output_tokens": 3,
    "max_tokens": 64, "cached_tokens": 512, "restored_tokens": 128, "workers": "prefill0,decode1",
    "links": "peer", "route": "move", "route_reason": "it is free", "preemptions": 1,
    "prefill_j": 1.5, "transport": "peer", "handoff_bytes": 2048,
    "restore_reason": "8 of 8 blocks from DRAM in 1.0 ms",
}  # fmt: skip


def test_facts_of_a_request_in_words():
    facts = request_facts(REQUEST)
    parts = ["384 from the pool", "128 from DRAM", "692 computed"]
    assert facts["in"] == f"1,204 tok ({', '.join(parts)})"
    assert facts["out"] == "3 of 64 tok"
    assert facts["worker"] == "prefill0, then decode1 (by peer)"
    assert facts["route"].endswith("; it is free")
    assert facts["preempted"].startswith("once: ")
    assert facts["energy"] == "1.5 J = prefill 1.5 J + decode -"
    assert facts["moved"] == "2.0 KiB by peer"
    assert "error" not in facts


def test_a_request_for_vectors_has_no_output_tokens():
    asked = {"max_tokens": None, "output_tokens": None, "num_sequences": 3}
    facts = request_facts({**REQUEST, **asked, "finish_reason": "computed"})
    assert (facts["state"], facts["out"]) == ("done", "results for 3 texts")


def test_facts_of_a_request_that_a_daemon_tells_little_of():
    told = request_facts({})
    assert set(told.values()) >= {"-"}
    assert "energy" not in told, "no device reports any"


stage_ms = st.none() | st.floats(0, 1e7)
stages_ms = st.fixed_dictionaries({f"{stage}_ms": stage_ms for stage in STAGES})


@given(stages_ms, st.floats(0, 1e7), st.integers(-5, 100), st.booleans())
def test_bars_of_a_waterfall_follow_each_other_inside_the_cells(stages, whole, cells, is_live):
    end = {"age_ms": whole, "phase": "decoding"} if is_live else {"e2e_ms": whole}
    bars, sums = waterfall({**stages, **end}, cells)
    assert [bar.start for bar in bars] == sorted(bar.start for bar in bars)
    assert all(bar.start + bar.cells <= max(1, cells) for bar in bars)
    assert len(bars) == sum(value is not None for value in stages.values()) + is_live
    assert sums[-1][0] == ("age" if is_live else "unattributed")


def test_stages_are_those_that_stamps_are_cut_into():
    cut = [name.removesuffix("_ms") for name in Stages.__dataclass_fields__]
    assert tuple(cut[: len(STAGES)]) == STAGES
