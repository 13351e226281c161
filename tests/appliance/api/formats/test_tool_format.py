"""How a model writes calls and reasoning, found out from its chat template."""

from __future__ import annotations

import pytest

from appliance.api.formats.format_choice import THOUGHTS, output_format_of
from appliance.api.formats.tool_format import FORMATS
from appliance.configuration.settings import REASONING_PARSERS, TOOL_PARSERS
from engine.text.tokenizer import Tokenizer
from tests.family_templates import FAMILIES
from tests.tiny_tokenizers import CHATML, byte_level


def of(template: str | None, **settings):
    return output_format_of(Tokenizer(byte_level(), chat_template=template), **settings)


@pytest.mark.parametrize(
    ("family", "tools", "thoughts"),
    [
        ("qwen", "hermes", "think"),
        ("smollm3", "hermes", "think"),
        ("llama", "llama", None),
        ("mistral", "mistral_list", None),
        ("granite", "granite", None),
    ],
)
def test_formats_are_those_that_the_template_speaks_of(family, tools, thoughts):
    found = of(FAMILIES[family])
    assert found.tools is FORMATS[tools]
    assert found.thoughts is (THOUGHTS[thoughts] if thoughts else None)
    assert not found.has_preamble


USES_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("says", "tools"),
    [
        ("<tool_call>\n<function=name>\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ("[TOOL_CALLS]f[ARGS]", "mistral"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json", "deepseek_v3"),
        ("<|tool_call>call:", "gemma"),
        ("<start_function_call>", "functiongemma"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|start|><|channel|>final<|message|>", "harmony"),
    ],
)
def test_every_format_is_known_by_its_signs(says, tools):
    assert of(USES_TOOLS + says).tools is FORMATS[tools]


@pytest.mark.parametrize("template", [CHATML, None, USES_TOOLS + "an unknown way to call"])
def test_without_a_known_format_there_is_a_preamble(template):
    found = of(template)
    assert (found.tools, found.has_preamble) == (FORMATS["hermes"], True)


def test_settings_name_what_a_template_does_not_say():
    found = of(CHATML, tool_parser="glm", reasoning_parser="think")
    assert (found.tools, found.thoughts) == (FORMATS["glm"], THOUGHTS["think"])
    assert of(FAMILIES["qwen"], reasoning_parser="none").thoughts is None


def test_settings_know_every_format():
    assert set(TOOL_PARSERS) == FORMATS.keys()
    assert set(REASONING_PARSERS) == THOUGHTS.keys()


def test_reasoning_has_begun_where_the_prompt_ends_in_it():
    found = of(FAMILIES["qwen"])
    assert found.begins_reasoning("<|im_start|>assistant\n<think>\n")
    assert not found.begins_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not of(CHATML).begins_reasoning("<think>")
