from __future__ import annotations

import jinja2
import pytest
import transformers

from engine.errors import RequestError
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.family_templates import FAMILIES
from tests.tiny_tokenizers import CHATML, byte_level, save

SPECIALS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The <weather> & "more"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, None, True]}},
}
SYSTEM = {"role": "system", "content": " Be kind. /no_think "}
USER = {"role": "user", "content": "hello wörld 😀"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n well \n"}
CHATS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "several turns": [USER, ANSWER, USER],
    "calls": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "17 degrees", "tool_call_id": "abcdefghi", "name": "f"},
    ],
    "two calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "because"}],
    "two users": [USER, USER],
}
OPTIONS = {
    "plain": {},
    "no header": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "no thinking": {"enable_thinking": False},
    "continued": {"continue_final_message": True, "add_generation_prompt": False},
}


def outcome(render, messages, options):
    """The text, or that it was refused."""
    try:
        return render(messages, options)
    except (RequestError, ValueError, jinja2.TemplateError):
        return "refused"


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """transformers and our own tokenizer, of the same folder."""
    template = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(byte_level(), folder, chat_template=template, **SPECIALS)
    return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_templates_of_the_families_render_as_in_transformers(both, messages, options):
    oracle, ours = both

    def theirs(messages, options):
        options = {"add_generation_prompt": True, **options}
        return oracle.apply_chat_template(messages, tokenize=False, **options)

    def render(messages, options):
        own = {name: options[name] for name in options if name != "enable_thinking"}
        variables = {name: options[name] for name in options if name == "enable_thinking"}
        return ours.render_chat(messages, variables=variables, **own)

    assert outcome(render, messages, options) == outcome(theirs, messages, options)


@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
def test_every_family_renders_a_plain_conversation(template):
    text = ChatTemplate(template, "here").render([USER, ANSWER, USER], variables=SPECIALS)
    assert text.count("hello wörld 😀") == 2


def test_families_refuse_what_they_do_not_have():
    gemma = ChatTemplate(FAMILIES["gemma"], "here")
    with pytest.raises(RequestError, match="System role") as refusal:
        gemma.render([SYSTEM, USER])
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


def test_a_template_that_would_leave_out_tools_is_told_apart():
    takes = {name: ChatTemplate(text, "here").takes_tools for name, text in FAMILIES.items()}
    assert {name for name in takes if not takes[name]} == {"gemma", "phi"}


def test_of_named_templates_one_is_for_tools(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    folder = save(byte_level(), tmp_path, chat_template=named)
    ours = Tokenizer.from_folder(folder)
    assert ours.render_chat([USER]) == "plain"
    assert ours.render_chat([USER], tools=TOOLS) == "with 2"
    assert ours.chat_template.takes_tools


def test_a_message_that_a_template_leaves_out_cannot_be_continued():
    template = ChatTemplate("{{ messages[0].content }}", "here")
    with pytest.raises(RequestError, match="final message"):
        template.render([USER, ANSWER], continue_final_message=True)


def test_a_continued_message_keeps_its_spaces_where_the_template_does():
    template = ChatTemplate(CHATML, "here")
    text = template.render(
        [USER, {"role": "assistant", "content": "and so "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("<|im_start|>assistant\nand so ")
