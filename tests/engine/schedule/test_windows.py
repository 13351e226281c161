"""Sequences whose layers with sliding windows give their blocks up: exact in every arrangement."""

import random

import pytest

from engine.cache.window_blocks import Windows
from tests.engine.schedule.harness import ARMS, World, walk

WINDOWS = Windows(num_each=2, num_tokens=7, ahead_tokens=16)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("num_blocks", [65, 130])
def test_random_walks_are_exact(arm, num_blocks):
    world = World(arm, num_blocks=num_blocks, num_slots=9, windows=WINDOWS)
    walk(world, random.Random(f"{arm} {num_blocks}"))
