"""Ten thousand inputs; `python -m tests.fuzz` feeds as many as one likes to every parser."""

import functools
import json
from random import Random

import pytest

from engine.errors import PenstockError, reading_model
from tests.fuzz.__main__ import feed, fuzz
from tests.fuzz.mutations import MAX_BYTES, mutated
from tests.fuzz.parsers import PARSERS, Parser

INPUTS_PER_SHARE = 76


@pytest.mark.parametrize("name", PARSERS)
def test_only_documented_errors_come_out_of_a_parser(name):
    parser = PARSERS[name]()
    assert fuzz(name, parser, seed=3, count=INPUTS_PER_SHARE * parser.share) == 0


def test_an_input_is_made_again_from_its_seed():
    examples = [b'{"a": [1, "b"], "c": {"d": null}}', b"[]"]
    make = functools.partial(mutated, examples=examples, fragments=[], is_json=True)
    made = [make(Random(seed)) for seed in range(50)]
    assert made == [make(Random(seed)) for seed in range(50)]
    assert len(set(made)) > 40


def test_no_input_is_longer_than_the_limit():
    """Lists within lists, each of which may become a hundred times as long."""
    example = json.dumps([[[["x" * 400] * 4] * 4] * 4]).encode()
    for seed in range(300):
        made = mutated(Random(seed), [example], [], is_json=True)
        assert len(made) <= MAX_BYTES


@pytest.mark.parametrize(
    ("error", "shown"),
    [(PenstockError("x"), None), (KeyError("x"), "KeyError"), (SystemExit(), "SystemExit")],
)
def test_every_other_error_is_shown(error, shown):
    def parse(_):
        raise error

    problem = feed(Parser(parse, [], (PenstockError,)), b"")
    assert problem is None if shown is None else problem.startswith(shown)


def test_an_error_that_only_the_last_guard_understood_is_shown():
    def parse(_):
        with reading_model("model"):
            raise KeyError("x")

    assert feed(Parser(parse, [], (PenstockError,)), b"").startswith("unforeseen")
