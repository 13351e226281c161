"""Compare each Qwen family with transformers in every mode, and print the table.

    python -m tests.family_table [FAMILY ...]

A cell names the arms whose tokens equal transformers' in float32: those of
tests/engine/worker/test_recurrent_modes.py, which runs one family in each, are run with all
families here. Guesses are compared bit for bit, as tests.speculated does.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import speculated
from tests.checkpoints import GATED_DELTA_NETS
from tests.engine.worker import test_recurrent_modes as modes
from tests.worlds.computing_world import load

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", *GATED_DELTA_NETS)
ARMS = tuple(modes.FAMILY_OF)
OWN_POOLS = ("peer", "shm")
HANDOFFS = ("alias", "peer", "shm", "2x1 peer")
NUM_SPECULATED = 50

Cell = tuple[str, str, Callable[[], Any]]
"""Mode, arm, and what raises AssertionError if a token differs."""


def cells(family: str, models: Callable[[str], Any]) -> Iterator[Cell]:
    """List a family's cells, by mode."""
    modes.FAMILY_OF.update(dict.fromkeys(ARMS, family))
    for arm in ARMS:
        of_turns = modes.test_cold_and_cached_turns_over_every_transport
        yield "cold, cached", arm, partial(of_turns, family, arm, models)
    for arm in OWN_POOLS:
        from_pool = modes.test_a_conversation_goes_on_from_another_pool
        yield "from another pool", arm, partial(from_pool, arm, models)
    for mode, kind in (
        ("from DRAM", modes.DramWorld),
        ("from SSD after a restart", modes.SsdWorld),
    ):
        for arm in ("alias", "peer"):
            from_tier = modes.test_a_conversation_goes_on_from_a_tier
            yield mode, arm, partial(from_tier, arm, kind, models)
    for arm in ("colocated", "alias"):
        yield "preempted", arm, partial(modes.test_preempted_sequences, arm, models)
    for when in ("prompt", "reply"):
        for arm in HANDOFFS:
            of_death = modes.test_deaths_within_prompts_and_replies
            yield f"worker killed within a {when}", arm, partial(of_death, arm, when, models)
    for arm in ARMS:
        guessed = modes.test_guesses_change_no_token_and_leave_each_border_as_a_turn_finds_it
        yield "speculated", arm, partial(guessed, arm, models)
    if family in GATED_DELTA_NETS:
        yield "killed before guesses are taken back", "alias", partial(killed_with_guesses, models)


def killed_with_guesses(models: Callable[[str], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        modes.test_a_death_before_refused_guesses_are_taken_back_loses_nothing(models, patch)


def num_equal_bits(family: str, folder: Path) -> str:
    """Compare sequences with and without guesses; return how many are equal."""
    model, counts, number = speculated.Model(folder, speculated.Kind(family)), Counter[str](), 0
    while counts["equal"] < NUM_SPECULATED:
        number += 1
        counts += speculated.compare(model, number)
    return f"{counts['equal']} of {counts['equal']}, {counts['refused']} guesses refused"


def column(family: str, folder: Path) -> dict[str, str]:
    """Run a family's cells; return what to print of each mode."""
    loaded = load(folder / "served", family)
    right: dict[str, list[str]] = {}
    for mode, arm, run in cells(family, lambda _: loaded):
        torch.manual_seed(0)
        try:
            run()
            said = arm
        except AssertionError as error:
            said = f"**not {arm}**"
            print(family, mode, arm, str(error).splitlines()[:1], file=sys.stderr, flush=True)
        right.setdefault(mode, []).append(said)
    cell = {mode: ", ".join(arms) for mode, arms in right.items()}
    return cell | {"speculated, bit for bit": num_equal_bits(family, folder / "guessed")}


def main() -> None:
    """Print the table as Markdown."""
    torch.set_num_threads(1)
    families = sys.argv[1:] or FAMILIES
    columns = []
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            columns.append(column(family, Path(folder)))
        print(family, columns[-1], file=sys.stderr, flush=True)
    print("|", " | ".join(("mode", *families)), "|")
    print("|", " | ".join(["---"] * (1 + len(families))), "|")
    for mode in max(columns, key=len):
        print("|", " | ".join([mode, *(each.get(mode, "") for each in columns)]), "|")


if __name__ == "__main__":
    main()
