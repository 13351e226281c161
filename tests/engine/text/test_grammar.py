"""Grammars as clients write them, followed over the tokens of tiny tokenizers."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.text.call_syntax import CallSyntax
from engine.text.calls_grammar import calls_grammar
from engine.text.grammar import (
    MAX_GRAMMAR_CHARS,
    GrammarError,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
)
from engine.text.grammar_matcher import GrammarTokenizer, Matcher
from engine.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level, sentencepiece_like

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tag": {"enum": ["a", "b"]}},
    "required": ["x", "tag"],
    "additionalProperties": False,
}
HERMES = CallSyntax(begin="<tool_call>\n", end="\n</tool_call>", separator="\n")
TOOLS = {"move": POINT, "wait": None}


def is_set(mask, token_id):
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


class Model:
    """A tokenizer as a model has it: two ids more in the logits, and two that end an output."""

    def __init__(self, backend, eos):
        self.tokenizer = Tokenizer(backend)
        self.eos_ids = [backend.token_to_id(token) for token in eos]
        self.vocab_size = self.tokenizer.vocab_size + 2
        self.tokens = GrammarTokenizer(self.tokenizer, self.vocab_size, self.eos_ids)

    def text(self, ids):
        return b"".join(self.tokenizer.token_bytes(i) for i in ids).decode()

    def accepts(self, grammar, text):
        """True if the text may be said, in whatever tokens, and may end there."""
        validate(grammar)
        ids = self.tokens.compiler.tokenize_str(text, parse_special=True)
        try:
            mask = Matcher(self.tokens, grammar).allowed(ids)
        except GrammarError:
            return False
        assert len({is_set(mask, i) for i in self.eos_ids}) == 1
        return is_set(mask, self.eos_ids[0])

    def random_walk(self, grammar, seed, max_tokens=200):
        """Ids drawn evenly from what is allowed, up to the end; None if that is too far."""
        matcher, ids, rng = Matcher(self.tokens, grammar), [], random.Random(seed)
        while len(ids) < max_tokens:
            mask = matcher.allowed(ids)
            allowed = [i for i in range(8 * len(mask)) if is_set(mask, i)]
            token_id = rng.choice(allowed)
            if token_id in self.eos_ids:
                return ids
            ids.append(token_id)
        return None


SMALL = Model(byte_level(), ["<|im_end|>", "<|end|>"])


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def model(request):
    if request.param == "byte level":
        return SMALL
    return Model(sentencepiece_like(), ["</s>"])


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (json_grammar(), '{"a": [1, "é", null]}', "[1]"),
        (json_grammar(), "{}", "{"),
        (json_grammar(POINT), '{"x": 12, "tag": "a"}', '{"tag": "a", "x": 12}'),
        (json_grammar(POINT), '{"x":-1,"tag":"b"}', '{"x": 1, "tag": "c"}'),
        (json_grammar(True), "[1, 2]", "1, 2"),
        (json_grammar({"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}), "null", "nul"),
        (regex_grammar(r'[a-z]+/"\d'), 'ab/"7', 'ab/"'),
        (choice_grammar(["yes", "no\n", 'q"/\\', "日本"]), 'q"/\\', "yesno"),
        (choice_grammar(["yes", "no\n", 'q"/\\', "日本"]), "日本", "日"),
        (lark_grammar('start: "a"+ b\nb: /[0-9]/'), "aa5", "aa"),
        (lark_grammar('root ::= "a" root | "b"'), "aab", "aa"),
    ],
)
def test_a_grammar_says_what_may_be_said(model, grammar, yes, no):
    assert model.accepts(grammar, yes)
    assert not model.accepts(grammar, no)


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_grammar({"$ref": "#"}),
        lambda: json_grammar({**POINT, "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        lambda: calls_grammar(
            {"f": {"properties": {"x": {"$ref": "#/properties/x"}}}},
            HERMES,
            special_ids={},
            is_required=True,
        ),
        lambda: lark_grammar("start: start"),
        lambda: lark_grammar("start: a\na: b\nb: a | a b"),
        lambda: regex_grammar(r"[^\s\S]"),
    ],
)
def test_what_only_refers_to_itself_is_refused_before_anything_is_said(make):
    with pytest.raises(GrammarError, match=r"to itself|no text"):
        validate(make())


@pytest.mark.parametrize("pattern", ["a{1000000}", "(ab{200}){400}"])
def test_what_leaves_no_choice_for_long_is_refused_before_anything_is_said(pattern):
    with pytest.raises(GrammarError, match="it fixes its first"):
        validate(regex_grammar(pattern))


def test_long_repetitions_that_leave_a_choice_are_served():
    validate(regex_grammar("[a-z]{1000000}"))
    validate(regex_grammar("a{60000}"))
    validate(choice_grammar(["x" * 60_000]))


def test_a_repetition_that_is_too_large_further_on_says_so():
    matcher = Matcher(SMALL.tokens, regex_grammar("x?y{1000000}"))
    y = SMALL.tokens.compiler.tokenize_str("y")
    with pytest.raises(GrammarError, match="it is too large"):
        follow(matcher, y * 10)


def test_a_forced_text_is_tokenized_a_little_at_each_step_and_as_if_it_were_whole(
    model, monkeypatch
):
    text, lengths, output = "hello wörld, 日本 😀 ab " * 200, [], []
    encode = model.tokenizer.encode
    whole = encode(text, add_special_tokens=False)
    monkeypatch.setattr(
        model.tokenizer,
        "encode",
        lambda text, **how: lengths.append(len(text)) or encode(text, **how),
    )
    matcher = Matcher(model.tokens, choice_grammar([text]))
    for _ in range(60):
        mask = matcher.allowed(output)
        output += [token_id for token_id in range(model.vocab_size) if is_set(mask, token_id)]
    assert 0 < max(lengths) <= 512
    assert len(output) == 60
    assert text.encode().startswith(b"".join(map(model.tokenizer.token_bytes, output)))
    assert model is not SMALL or output == whole[:60]


def test_a_forced_text_that_the_tokenizer_refuses_is_written_all_the_same(model, monkeypatch):
    def refuse(*_, **__):
        raise RequestError("it takes too much")

    monkeypatch.setattr(model.tokenizer, "encode", refuse)
    matcher, output, text = Matcher(model.tokens, choice_grammar(["hello"])), [], ""
    while text != "hello":
        mask = matcher.allowed(output)
        output.append(next(one for one in range(model.vocab_size) if is_set(mask, one)))
        text = model.text(output)
        assert "hello".startswith(text)


def follow(matcher, ids):
    """Ask for the way on after each of the ids."""
    for end in range(len(ids) + 1):
        matcher.allowed(ids[:end])


def test_what_refers_to_itself_on_its_way_is_served(model):
    tree = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}
    assert model.accepts(json_grammar(tree), "[[],null,[null]]")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_parses(model, seed):
    bounded = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 8}, "p": POINT},
        "required": ["s", "p"],
        "additionalProperties": False,
    }
    ids = model.random_walk(json_grammar(bounded), seed, max_tokens=10_000)
    value = json.loads(model.text(ids))
    assert list(value) == ["s", "p"]
    assert value["p"]["tag"] in "ab"


CALL_1 = '<tool_call>\n{"name": "move", "arguments": {"x": 1, "tag": "a"}}\n</tool_call>'
CALL_2 = '<tool_call>\n{"name": "wait", "arguments": {"s": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("is_required", "is_parallel", "text", "is_right"),
    [
        (True, True, CALL_1, True),
        (True, True, f"{CALL_1}\n{CALL_2}", True),
        (True, False, f"{CALL_1}\n{CALL_2}", False),
        (True, False, CALL_2, True),
        (True, True, "hello", False),
        (True, True, CALL_1.replace("move", "stop"), False),
        (True, True, CALL_1.replace('"a"', '"c"'), False),
        (False, True, "hello", True),
        (False, True, "", True),
        (False, True, "a <tool is not a <tool_", True),
        (False, True, f"I do: {CALL_1} and {CALL_2} done", True),
        (False, False, f"I do: {CALL_1}", True),
        (False, False, f"I do: {CALL_1} and", False),
        (False, True, "I do: <tool_call>", False),
        (False, True, f"I do: {CALL_1.replace('move', 'stop')}", False),
    ],
)
def test_calls_are_of_the_tools_and_free_text_is_free_up_to_the_marker(
    model, is_required, is_parallel, text, is_right
):
    grammar = calls_grammar(
        TOOLS, HERMES, special_ids={}, is_required=is_required, is_parallel=is_parallel
    )
    assert model.accepts(grammar, text) is is_right


WAIT = '{"name": "wait", "parameters": {}}'


@pytest.mark.parametrize(
    ("is_required", "text", "is_right"),
    [
        (True, '<|im_start|>[{"name": "wait", "parameters": {}}]', True),
        (False, '<|im_start|>[{"name": "wait", "parameters": {}}]', True),
        (False, f"so <|im_start|>[{WAIT}, {WAIT}]", True),
        (False, "so", True),
        (True, "so", False),
        (False, "so <|im_start|>", False),
        (False, "so <|begin|>", False),
    ],
)
def test_a_special_token_can_mark_calls(is_required, text, is_right):
    backend = byte_level()
    model = Model(backend, ["<|end|>"])
    syntax = CallSyntax(
        opening="<|im_start|>[",
        head='{{"name": "{name}", "parameters": ',
        separator=", ",
        closing="]",
    )
    special_ids = {name: backend.token_to_id(name) for name in ("<|im_start|>", "<|begin|>")}
    grammar = calls_grammar(TOOLS, syntax, special_ids=special_ids, is_required=is_required)
    assert model.accepts(grammar, text) is is_right


def test_free_text_without_a_marker_cannot_have_calls():
    with pytest.raises(ValueError, match="marks calls"):
        calls_grammar(TOOLS, CallSyntax(), special_ids={}, is_required=False)


@pytest.mark.parametrize("schema", [{}, {"properties": {"x": {"type": "integer"}}}])
def test_arguments_are_an_object_whether_the_schema_says_so_or_not(model, schema):
    grammar = calls_grammar({"t": schema}, CallSyntax(), special_ids={}, is_required=True)
    assert model.accepts(grammar, '{"name": "t", "arguments": {"x": 1}}')
    assert not model.accepts(grammar, '{"name": "t", "arguments": 1}')


def test_many_grammars_are_validated_at_once():
    """The depth of new threads' stacks is the process's; here all of them need it."""
    deep = json_grammar(_chain(1200))
    with ThreadPoolExecutor(8) as executor:
        assert list(executor.map(validate, [deep] * 16)) == [None] * 16
    assert threading.stack_size() == 0


def test_schemas_of_tools_may_refer_within_themselves(model):
    tree = {"type": "object", "properties": {"l": {"$ref": "#"}}, "additionalProperties": False}
    grammar = calls_grammar({"t": tree}, CallSyntax(), special_ids={}, is_required=True)
    assert model.accepts(grammar, '{"name": "t", "arguments": {"l": {"l": {}}}}')
    assert not model.accepts(grammar, '{"name": "t", "arguments": {"l": {"r": {}}}}')


def test_a_matcher_is_where_its_outputs_are_however_it_came_there(model):
    grammar = json_grammar(POINT)
    ids = model.random_walk(grammar, seed=3, max_tokens=10_000)
    stepwise, compiled = Matcher(model.tokens, grammar), Matcher(model.tokens, grammar)
    for count in range(len(ids) + 1):
        mask = stepwise.allowed(ids[:count])
        assert compiled.copy().allowed(ids[:count]) == mask
        assert len(mask) == -(-model.vocab_size // 32) * 4
        assert not any(mask[model.tokenizer.vocab_size :])


def test_outputs_that_do_not_match_are_an_error(model):
    matcher = Matcher(model.tokens, choice_grammar(["yes"]))
    with pytest.raises(GrammarError):
        matcher.allowed(model.tokenizer.encode("w", add_special_tokens=False))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (json_grammar({"type": "colour"}), "colour"),
        (json_grammar({"type": "string", "pattern": "("}), "regex"),
        (json_grammar(False), "false"),
        (json_grammar({"not": {"type": "string"}}), "not"),
        (regex_grammar("(?=a)b"), "look-around"),
        (lark_grammar("start: nowhere"), "nowhere"),
        ('{"grammars": [', "EOF"),
        (" " * (MAX_GRAMMAR_CHARS + 1), "characters"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(grammar, reason):
    with pytest.raises(GrammarError, match=reason) as refusal:
        validate(grammar)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "write",
    [
        regex_grammar,
        lark_grammar,
        lambda text: choice_grammar([text]),
        lambda text: json_grammar({"const": text}),
        lambda text: calls_grammar({text: None}, HERMES, special_ids={}, is_required=True),
    ],
)
def test_half_a_surrogate_pair_is_refused(write):
    with pytest.raises(GrammarError):
        validate(write("a\ud800"))


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ('root ::= ("a"', "Expected ')' at line 1"),
        ("root ::= nope", "Rule 'nope' not found"),
        ('x ::= "a"', "No 'root' rule found"),
        ("", "No 'root' rule found"),
        ('root ::= "\\', "escape sequence"),
        ("root ::= [\\", "escape sequence"),
    ],
)
def test_gbnf_that_is_none_is_refused(text, about):
    with pytest.raises(GrammarError, match=re.escape(about)):
        lark_grammar(text)


@pytest.mark.parametrize("grammar", [json_grammar(), json_grammar({"type": "object"})])
def test_json_goes_on_after_a_bounded_space(model, grammar):
    deep = '{"a":\n' + " " * 60 + "1}"
    assert model.accepts(grammar, deep)
    endless = "{" + "\n" * 65
    assert not model.accepts(grammar, endless + "}")
    assert model.accepts(grammar, endless[:-1] + "}")


def test_a_schema_may_say_itself_how_much_space_there_is(model):
    dense = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    assert model.accepts(json_grammar(dense), '{"a":1}')
    assert not model.accepts(json_grammar(dense), '{"a": 1}')


@pytest.mark.parametrize("own", [{}, [], None, {"whitespace_pattern": None}])
def test_space_is_bounded_whatever_else_a_schema_says(model, own):
    schema = json_grammar({"type": "object", "x-guidance": own})
    assert model.accepts(schema, '{"a":  1}')
    assert not model.accepts(schema, '{"a":' + " " * 400 + "1}")


def test_a_lenient_schema_passes_over_what_cannot_be_enforced(model):
    schema = {"type": "object", "unevaluatedProperties": False, "dependentRequired": {"a": ["b"]}}
    with pytest.raises(GrammarError):
        validate(json_grammar(schema))
    assert model.accepts(json_grammar(schema, is_lenient=True), '{"a": 1}')


def test_a_model_that_cannot_end_has_no_grammars():
    with pytest.raises(GrammarError, match="end-of-text"):
        GrammarTokenizer(Tokenizer(byte_level()), 300, [])


def _chain(count):
    """A schema in which each definition is reached through another, deep in the compiler."""
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$defs": {**definitions, f"d{count}": {}}, "$ref": "#/$defs/d0"}


def test_a_chain_of_rules_is_refused_before_its_error_is_told_for_each():
    with pytest.raises(GrammarError, match="3000 rules"):
        lark_grammar("start: r1\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1, 3000)))


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar(_chain(1200)),
        lark_grammar("start: " + "(" * 3000 + '"a"' + ")" * 3000),
        lark_grammar("start: " + '"a"? ' * 3000),
        lark_grammar('start: s\ns: s s | "a" | "a" s'),
        regex_grammar("(" * 5000 + "a" + ")" * 5000),
        regex_grammar("((a{1,100}){1,100}){1,100}"),
        regex_grammar("(a|b)*a(a|b){30}"),
        regex_grammar("[a-z]{1,100000}"),
        json_grammar({"type": "integer", "multipleOf": 9973}),
        json_grammar({"enum": [f"value {i}" for i in range(3000)]}),
        json_grammar({"type": "array", "minItems": 10**6}),
    ],
    ids=lambda grammar: grammar[:50],
)
def test_hostile_grammars_are_refused_or_end_in_an_error_or_work(model, grammar):
    """In any case the process goes on, and other grammars with it."""
    with contextlib.suppress(GrammarError):
        validate(grammar)
        model.random_walk(grammar, seed=1, max_tokens=20)
    assert model.accepts(choice_grammar(["yes"]), "yes")


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=12))
@settings(max_examples=30)
def test_any_text_can_be_a_choice_or_a_tools_name(text):
    assert SMALL.accepts(choice_grammar([text, "other"]), text)
    grammar = calls_grammar({text: None}, CallSyntax(), special_ids={}, is_required=True)
    name = json.dumps(text, ensure_ascii=False)
    assert SMALL.accepts(grammar, f'{{"name": {name}, "arguments": {{}}}}')


@given(st.from_regex(re.compile(r"[a-z0-9 {}\[\]\":,.|*+()\\/-]{1,20}", re.ASCII), fullmatch=True))
@settings(max_examples=100)
def test_any_pattern_compiles_or_is_refused(pattern):
    grammar = regex_grammar(pattern)
    with contextlib.suppress(GrammarError):
        validate(grammar)
        Matcher(SMALL.tokens, grammar).allowed([])
