"""Triton's attention is attention, whatever the tiles, parts and blocks; by its interpreter."""

import pytest
import torch

from engine.worker.model.attention import Tiling
from tests.engine.kernel_cases import (
    PENDING,
    STEPS,
    Step,
    check_attention,
    check_padding,
    check_pending_rows,
)

SMALL, LARGE = Tiling(16, 16, 4), Tiling(32, 64, 4)
pytestmark = pytest.mark.usefixtures("real_bfloat16")


@pytest.mark.parametrize(("tiling", "parts"), [(SMALL, 3), (LARGE, 1)], ids=["small", "large"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_every_sequence_gets_what_it_would_get_alone(step, parts, tiling):
    check_attention(step, "cpu", tiling, parts)


LATER = ((70, 20), (0, 5), (40, 1), (33, 18))
"""Chunks after cached prefixes, whose keys are cut into parts; some parts are empty."""


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        (Step(LATER), 7),
        (Step(LATER, heads=(6, 2), window=40, has_sinks=True), 3),
        (Step(LATER, heads=(6, 1), head_dim=80, block_size=7, dtype=torch.bfloat16), 2),
        (Step(LATER, softcap=3.0), 2),
    ],
    ids=str,
)
def test_a_chunk_after_a_long_prefix_is_joined_from_its_parts(step, parts):
    check_attention(step, "cpu", SMALL, parts)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_that_pads_a_graphs_batch_sees_nothing_and_yields_zeros(parts):
    check_padding("cpu", SMALL, parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_a_guess_sees_the_keys_up_to_its_own(parts, window):
    check_pending_rows(Step(PENDING, window=window), "cpu", SMALL, parts)
