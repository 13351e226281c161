"""Triton's attention is attention, whatever the tiles, parts and blocks; by its interpreter."""

import pytest

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


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_that_pads_a_graphs_batch_sees_nothing_and_yields_zeros(parts):
    check_padding("cpu", SMALL, parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_a_guess_sees_the_keys_up_to_its_own(parts, window):
    check_pending_rows(Step(PENDING, window=window), "cpu", SMALL, parts)
