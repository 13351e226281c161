"""A worker's grammars: compiled once, with the first mask, for which no step then waits."""

from __future__ import annotations

import os
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from engine.text.grammar import GrammarError, choice_grammar, lark_grammar
from engine.text.grammar_matcher import GrammarTokenizer, Matcher
from engine.text.tokenizer import Tokenizer
from engine.worker import grammars as grammars_module
from engine.worker.grammars import Grammars
from tests.tiny_tokenizers import byte_level

EOS = 0


@pytest.fixture
def grammars():
    tokenizer = Tokenizer(byte_level())
    return Grammars(lambda: GrammarTokenizer(tokenizer, tokenizer.vocab_size, [EOS]))


@pytest.fixture
def computed(monkeypatch):
    """The outputs of which masks were computed so far."""
    outputs, along = [], Matcher.allowed_along

    def counted(self, output_ids, draft):
        outputs.append(list(output_ids))
        return along(self, output_ids, draft)

    monkeypatch.setattr(Matcher, "allowed_along", counted)
    return outputs


def sequence(matcher: Future[Matcher]):
    return SimpleNamespace(matcher=matcher, draft=[], output_ids=[])


def test_the_first_mask_is_computed_with_the_grammar_and_not_again_for_the_next_request(
    grammars, computed
):
    grammar = choice_grammar([f"c{i}" for i in range(100)])
    first = grammars.compile(grammar)
    first.result()
    assert computed == [[]]
    second = grammars.compile(grammar)
    assert second.result() is not first.result()
    assert computed == [[]]
    masks = grammars.masks([sequence(first), sequence(second)]).result()
    assert masks[0] == masks[1]


def test_a_grammar_without_a_first_token_is_an_error_of_its_sequence_alone(grammars):
    fails = grammars.compile(lark_grammar("root ::= (" + '"a"|' * 3750 + '"b")*'))
    good = grammars.compile(choice_grammar(["yes"]))
    bad, masks = grammars.masks([sequence(fails), sequence(good)]).result()
    assert isinstance(bad, GrammarError)
    assert len(masks) == 1


def test_compilers_stand_back_from_steps_and_masks_do_not(grammars, monkeypatch):
    own, seen = os.nice(0), []
    monkeypatch.setattr(grammars_module, "COMPILER_NICE", own + 1)
    allowed = Matcher.allowed_along

    def watched(self, output_ids, draft):
        seen.append(os.nice(0))
        return allowed(self, output_ids, draft)

    monkeypatch.setattr(Matcher, "allowed_along", watched)
    compiled = grammars.compile(choice_grammar(["yes"]))
    compiled.result()
    grammars.masks([sequence(compiled)]).result()
    assert (seen, os.nice(0)) == ([own + 1, own], own)
