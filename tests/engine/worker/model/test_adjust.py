"""Adjusted logits against a slow reference in float64."""

import math
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.sampling import SamplingParams
from engine.worker.model.logit_rules import adjust, bits_of, is_adjusted, rules_of

VOCAB_SIZE = 24
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
INF = math.inf


def params(**changes):
    return SamplingParams(**({"max_tokens": 8, "seed": 0} | changes))


def reference(logits, p, prompt_ids, output_ids, ending_ids, allowed):
    """One logit at a time, as the documentation of each field says it."""
    result = []
    for token, raw in enumerate(logits):
        value = raw + p.logit_bias.get(token, 0.0)
        if len(output_ids) < p.min_tokens and token in ending_ids:
            value = -INF
        if allowed is not None and not allowed[token]:
            value = -INF
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            value = -INF
        if any([*output_ids, token][-len(word) :] == list(word) for word in p.bad_words):
            value = -INF
        if token in prompt_ids or token in output_ids:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output_ids.count(token)
        value -= p.presence_penalty * (token in output_ids)
        result.append(value)
    return result


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    prompt_ids=TOKENS,
    output_ids=TOKENS,
    presence=st.sampled_from([0.0, -2.0, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, -1.5, 0.1, 2.0]),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32)),
    min_tokens=st.sampled_from([0, 3, 100]),
    ending_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    forbidden=st.none() | st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=VOCAB_SIZE - 4),
    only=st.none() | st.frozensets(st.integers(0, VOCAB_SIZE + 3), min_size=1),
    bad_words=st.lists(st.lists(st.integers(0, VOCAB_SIZE + 1), min_size=1, max_size=3)),
)
def test_every_adjustment_is_the_references(
    logits, prompt_ids, output_ids, presence, frequency, repetition, bias, min_tokens, ending_ids,
    forbidden, only, bad_words,
):  # fmt: skip
    p = params(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        min_tokens=min_tokens,
        allowed_token_ids=None if only is None else tuple(only),
        bad_words=tuple(map(tuple, bad_words)),
    )
    allowed = None
    if forbidden is not None:
        allowed = [i not in forbidden for i in range(VOCAB_SIZE)]
    expected = reference(logits, p, prompt_ids, output_ids, ending_ids, allowed)
    rules = rules_for(p, prompt_ids, output_ids, ending_ids, allowed, VOCAB_SIZE)
    # the grammar allows more than the end, so that no minimum gives way
    assert (rules.why_nothing() is not None) == (max(expected) == -INF)
    row = torch.tensor(logits)
    adjust(row, rules)
    assert row.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4)


def rules_for(p, prompt_ids, output_ids, ending_ids, allowed=None, vocab_size=4):
    """The rules of a row; allowed has one truth for each id."""
    ids = array("q", [*prompt_ids, *output_ids, 1, 2, 3])  # a guess behind them counts for nothing
    counts = len(prompt_ids), len(prompt_ids) + len(output_ids)
    if allowed is not None:
        allowed = bits_of(i for i, may in enumerate(allowed) if may).ljust(4, b"\0")
    only = None if p.allowed_token_ids is None else bits_of(p.allowed_token_ids)
    return rules_of(p, ids, *counts, ending_ids, vocab_size, allowed, only)


def adjusted(rules):
    row = torch.zeros(rules.vocab_size)
    adjust(row, rules)
    return row.tolist()


def test_nothing_but_the_end_is_left_and_the_minimum_gives_way():
    for ending_ids, left in (([3], [-INF, -INF, -INF, 0.0]), ([2, 3], [-INF, -INF, 0.0, 0.0])):
        allowed = [i in ending_ids for i in range(4)]
        assert adjusted(rules_for(params(min_tokens=5), [], [1], ending_ids, allowed)) == left


def test_a_minimum_does_not_give_way_to_anything_but_a_complete_grammar():
    why = "no token is left by `allowed_token_ids` and `min_tokens`"
    only_the_end = params(min_tokens=5, allowed_token_ids=(3,))
    assert rules_for(only_the_end, [], [1], [3]).why_nothing() == why
    assert rules_for(only_the_end, [], [3] * 5, [3]).why_nothing() is None
    grammar = [False, True, False, True]  # goes on with 1, which is not allowed
    assert rules_for(only_the_end, [], [], [3], grammar).why_nothing() == why


def test_the_minimum_holds_up_to_its_last_token():
    for num_outputs, is_forbidden in ((2, True), (3, False)):
        row = adjusted(rules_for(params(min_tokens=3), [], [0] * num_outputs, [3]))
        assert math.isinf(row[3]) is is_forbidden


def test_ids_that_the_model_has_not_are_passed_over():
    rules = rules_for(params(min_tokens=3, logit_bias={9: 5.0, 1: 2.0}), [], [], [7, 2])
    assert adjusted(rules) == [0.0, 2.0, -INF, 0.0]


def test_what_leaves_no_token_is_named():
    limits = params(allowed_token_ids=(1, 2), bad_words=((1,), (0, 2)))
    assert rules_for(limits, [], [3], []).why_nothing() is None
    why = rules_for(limits, [], [0], []).why_nothing()
    assert why.endswith("by `allowed_token_ids` and `bad_words`")
    of_a_grammar = params(grammar="g", bad_words=((1,),))
    why = rules_for(of_a_grammar, [], [], [], [False, True], 2).why_nothing()
    assert why.endswith("the grammar and `bad_words`")


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": {1: 0.5}},
        {"min_tokens": 1},
        {"grammar": "g"},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1, 2),)},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 0.9},
    ],
)
def test_only_rows_that_ask_for_it_are_adjusted(change):
    assert is_adjusted(params(**change))
    assert not is_adjusted(params(temperature=0.5, top_k=3, logprobs=2, prompt_logprobs=1))
