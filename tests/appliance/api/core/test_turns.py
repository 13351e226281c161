"""Conversations of coding agents, brought into a form that the published chat templates take.

The templates are our own: each refuses and leaves out what the published one of its name does.
"""

from __future__ import annotations

import pytest

from appliance.api.core import turns
from appliance.daemon.requests.row import LogRow
from engine.errors import RequestError
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.family_templates import FAMILIES
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

ALTERNATE = """
{%- set at = namespace(index=0) %}
{%- for m in turns if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (at.index % 2 == 0) %}{{ raise_exception('not by turns') }}{% endif %}
{%- set at.index = at.index + 1 %}
{%- endfor %}"""
PLAIN = """
{%- for m in turns %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}[call {{ call.function | tojson }}]{% endfor %}
{%- endfor %}"""
SPLIT_OFF = """
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}<system>{{ messages[0].content }}
{%- set turns = messages[1:] %}{% endif %}"""
NINE = """
{%- macro check(id) %}{% if not id or id | length != 9 %}
{{- raise_exception('ids have 9 characters') }}{% endif %}{% endmacro %}
{%- for m in messages %}
{%- for call in m.tool_calls or [] %}{{ check(call.id) }}{% endfor %}
{%- if m.role == 'tool' %}{{ check(m.tool_call_id) }}{% endif %}
{%- endfor %}"""
TOOLS = "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = {
    "Mistral 7B 0.1": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('not by turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "Mistral 7B 0.3": TOOLS + NINE + SPLIT_OFF + ALTERNATE + PLAIN,
    "Mistral Small": TOOLS + NINE + SPLIT_OFF + ALTERNATE + PLAIN.replace(
        "<{{", "{% if m.role == 'system' %}{{ raise_exception('no such role') }}{% endif %}<{{"
    ),
    "Gemma 2": FAMILIES["gemma"],
    "Gemma 3": SPLIT_OFF + ALTERNATE + PLAIN,
    "a Gemma 2 that knows tools": TOOLS + FAMILIES["gemma"],
    "Gemma 4": TOOLS + SPLIT_OFF + PLAIN,
    "Llama 3": TOOLS + "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% endfor %}" + SPLIT_OFF + PLAIN,
    "Qwen3": TOOLS + SPLIT_OFF + PLAIN,
    "Qwen3.5": TOOLS + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}{% endfor %}" + SPLIT_OFF + PLAIN,
    "Phi-4": SPLIT_OFF + PLAIN,
    "Granite": TOOLS + SPLIT_OFF + PLAIN,
    "gpt-oss": TOOLS + SPLIT_OFF + PLAIN.replace("in turns", "in turns if m.role != 'system'"),
    "GLM": TOOLS + "{% set turns = messages %}" + PLAIN,
}  # fmt: skip
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(call_id: str, **arguments):
    return {"type": "function", "id": call_id, "function": {"name": "add", "arguments": arguments}}


def says(role: str, content: str, **more):
    return {"role": role, "content": content, **more}


CLAUDE_CODES = [says("system", "S1"), says("user", "U1"), says("system", "S2")]
CODEXS = [says("system", "S1"), says("system", "S2"), says("user", "U1"), says("user", "U2")]
WITH_CALLS = [
    *CLAUDE_CODES,
    says("assistant", "A1", tool_calls=[call("toolu_01", a=1), call("toolu_02", a=2)]),
    says("tool", "R1", tool_call_id="toolu_01"),
    says("tool", "R2", tool_call_id="toolu_02"),
    says("user", "U2"),
    says("assistant", "A2", tool_calls=[call("toolu_03", a=3)]),
    says("tool", "R3", tool_call_id="toolu_03"),
    says("assistant", "A3"),
    says("user", "U3"),
    says("system", "S3"),
]
CONVERSATIONS = {
    "Claude Code": CLAUDE_CODES,
    "Claude Code without a system prompt": CLAUDE_CODES[1:],
    "Claude Code with calls": WITH_CALLS,
    "Codex": CODEXS,
    "Codex, second turn": [*CODEXS, says("assistant", "A1"), says("user", "U3")],
    "opencode": [CODEXS[0], CODEXS[2], says("assistant", "A1"), says("user", "U2")],
}  # fmt: skip
TAKEN_AS_SENT = {
    **{model: set(CONVERSATIONS) for model in ("Gemma 4", "Qwen3", "Granite", "GLM")},
    "Llama 3": set(CONVERSATIONS) - {"Claude Code with calls"},
    "Qwen3.5": {"opencode"},
    "gpt-oss": {"opencode"},
}


async def served_prompt(template: str, messages, tmp_path):
    """What the daemon makes of a chat: the prompt's text, and the words of what was changed."""
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    appliance = FakeAppliance(tokenizer, max_model_len=8192)
    tools = [ADD] if any(one.get("tool_calls") for one in messages) else []
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.chat(messages=messages, tools=tools, max_tokens=1)
        assert reply.status_code == 200, reply.text
    (request,) = appliance.submitted
    return request.prompt_text, LogRow.from_request(request).changes


@pytest.mark.parametrize("said", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("model", TEMPLATES)
async def test_every_template_gets_all_that_agents_say_in_order(model, said, tmp_path):
    text, changes = await served_prompt(TEMPLATES[model], said, tmp_path)
    told = [one["content"] for one in said]
    places = [text.index(content) for content in told]
    if "one by one" not in (changes or ""):  # then a result stands behind its own call
        assert places == sorted(places)
    assert text.count('"name": "add"') - 1 == 3 or "R1" not in told
    assert ("in words" in (changes or "")) == (model.startswith("a Gemma") and "R1" in told)
    taken = {name for name, one in CONVERSATIONS.items() if one is said}
    if model in TAKEN_AS_SENT:
        assert (changes is None) == (taken <= TAKEN_AS_SENT[model])


async def test_a_conversation_that_is_taken_is_not_changed(tmp_path):
    text, changes = await served_prompt(FAMILIES["qwen"], WITH_CALLS, tmp_path)
    plain = Tokenizer(byte_level(), chat_template=FAMILIES["qwen"])
    assert text == plain.render_chat(
        [{**one, "content": one["content"]} for one in WITH_CALLS], tools=[ADD]
    )
    assert changes is None


@pytest.mark.parametrize(
    ("model", "said", "roles", "words"),
    [
        ("Mistral Small", "Claude Code", "system user", ["1 later", "1 turn"]),
        ("Mistral Small", "Codex", "system user", ["2 system", "1 turn"]),
        ("Gemma 2", "Codex", "user", ["2 system", "1 turn", "put into the user"]),
        ("Qwen3.5", "Claude Code", "system user user", ["1 later"]),
        ("gpt-oss", "Codex", "system user user", ["2 system"]),
    ],
)
async def test_no_more_is_changed_than_the_template_needs(model, said, roles, words, tmp_path):
    text, changes = await served_prompt(TEMPLATES[model], CONVERSATIONS[said], tmp_path)
    marks = ("<system>", "<user>", "<start_of_turn>user")
    found = [at for mark in marks for at in [mark] * text.count(mark)]
    assert " ".join(one.strip("<>").replace("start_of_turn>", "") for one in found) == roles
    assert len(changes.replace(", ", "; ").split("; ")) == len(words)
    assert all(word in changes for word in words)


def rendered(template: ChatTemplate, messages, counts: list[int]):
    def render_form(form):
        counts[-1] += 1
        return template.render(form)

    counts.append(0)
    return turns.render(messages, render_form, template.known_forms, has_tools=False)


def test_what_a_template_takes_is_remembered_by_the_conversations_shape():
    template, counts = ChatTemplate(TEMPLATES["Mistral Small"], "here"), []
    first = rendered(template, CODEXS, counts)
    longer = [*CODEXS, says("assistant", "A"), *CODEXS[2:], says("assistant", "A"), *CODEXS[2:]]
    rendered(template, longer, counts)
    again = rendered(template, [says(m["role"], m["content"] + "!") for m in longer], counts)
    assert counts == [4, 4, 1]
    assert [change.split()[:2] for change in again.changes] == [["2", "system"], ["3", "turns"]]
    assert first.text.count("<user>") == 1


def test_a_template_that_always_leaves_something_out_is_asked_once_for_each_form():
    template, counts = ChatTemplate("{{ messages[-1].content }}", "here"), []
    said = [says("system", "S1"), says("user", "U1"), says("system", "S2"), says("user", "U2")]
    known = [rendered(template, said, counts) for _ in range(2)]
    assert counts[1] == 1
    assert known[0] == known[1]


def test_a_template_that_takes_nothing_refuses_in_its_own_words_for_what_was_sent():
    source = "{{ raise_exception('no ' ~ messages[0].role ~ messages | length) }}"
    template = ChatTemplate(source, "here")
    for _ in range(2):
        with pytest.raises(RequestError, match="no system4"):
            rendered(template, CODEXS, [])


def test_shapes_are_forgotten_before_they_are_too_many(monkeypatch):
    monkeypatch.setattr(turns, "MAX_SHAPES", 2)
    template = ChatTemplate(PLAIN.replace("turns", "messages"), "here")
    for count in range(4):
        rendered(template, [says("user", "U")] + [says("assistant", "A")] * count, [])
        assert len(template.known_forms) <= 2


def test_ids_of_calls_become_nine_characters_and_results_keep_to_their_calls():
    said = [
        says("user", "U"),
        says("assistant", "", tool_calls=[call("call_1"), call("call_2"), call("abcdefghi")]),
        says("tool", "R2", tool_call_id="call_2"),
        says("tool", "R1", tool_call_id="call_1"),
        says("tool", "R3", tool_call_id="abcdefghi"),
    ]
    template = ChatTemplate(NINE + PLAIN.replace("in turns", "in messages"), "here")
    seen = []
    turns.render(said, lambda form: seen.append(form) or template.render(form), {}, has_tools=True)
    form = seen[-1]
    ids = [one["id"] for one in form[1]["tool_calls"]]
    assert {len(one) for one in ids} == {9}
    assert ids[2] == "abcdefghi"
    assert [one["tool_call_id"] for one in form[2:]] == [ids[1], ids[0], ids[2]]


def test_results_stay_with_their_calls_where_ids_come_again():
    def turn(*results):
        calls = [call(call_id) for call_id in ("a", "b")[: len(results)]]
        told = [
            says("tool", text, tool_call_id=id_) for text, id_ in zip(results, "ab", strict=False)
        ]
        return [says("assistant", "", tool_calls=calls), *told]

    apart, _ = turns._calls_apart([*turn("1", "2"), *turn("3", "4"), *turn("5")])
    told = [(one["role"], one["content"]) for one in apart]
    assert told == [each for text in "12345" for each in (("assistant", ""), ("tool", text))]


def test_calls_without_ids_as_ollamas_clients_send_them_get_some():
    nameless = [{"type": "function", "function": {"name": n, "arguments": {}}} for n in "ab"]
    said = [
        says("user", "U"),
        says("assistant", "", tool_calls=nameless),
        says("tool", "Ra"),
        says("tool", "Rb"),
    ]
    template = ChatTemplate(NINE + PLAIN.replace("in turns", "in messages"), "here")
    seen = []
    turns.render(said, lambda form: seen.append(form) or template.render(form), {}, has_tools=True)
    ids = [one["id"] for one in seen[-1][1]["tool_calls"]]
    assert [one["tool_call_id"] for one in seen[-1][2:]] == ids


def test_an_answer_that_is_continued_stays_the_last():
    said = [*CODEXS, says("assistant", "A1"), says("assistant", "so far")]
    template = ChatTemplate(TEMPLATES["Mistral Small"], "here")

    def render_form(form):
        return template.render(form, add_generation_prompt=False, continue_final_message=True)

    assert turns.render(said, render_form, {}, has_tools=False).text.endswith("A1\n\nso far")


# What a template leaves out

PARTED = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
LOOKS_AT_THE_FIRST = PARTED.replace("{% for p", "{{ m.content[0]['type'] }}{% for p")
ONLY_IMAGES = PARTED.replace("== 'text'", "== 'image'")


@pytest.mark.parametrize(
    "template",
    [
        PARTED,
        PARTED.replace("== 'text' %}", "== 'text' and m.role != 'x' %}"),
        LOOKS_AT_THE_FIRST,
    ],
)
async def test_a_template_that_reads_parts_gets_parts(template, tmp_path):
    text, changes = await served_prompt(template, CLAUDE_CODES, tmp_path)
    assert [text.index(word) for word in ("S1", "U1", "S2")] == sorted(
        text.index(word) for word in ("S1", "U1", "S2")
    )
    assert "contents told in parts" in changes


async def test_a_reply_is_continued_in_parts(tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=PARTED))
    async with serving(appliance, tmp_path / "api.sock") as served:
        said = [says("user", "U1"), says("assistant", "Beg")]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        await served.chat(messages=said, max_tokens=1, **options)
    assert appliance.submitted[0].prompt_text == "<|user|>U1<|assistant|>Beg"


DROPS = {
    "all but the last": ("{{ messages[-1].content }}", 0),
    "the user": ("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", 0),
    "words, as it reads images": (ONLY_IMAGES, 0),
    "the answers": ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", 1),
}


@pytest.mark.parametrize(("template", "index"), DROPS.values(), ids=DROPS)
async def test_a_message_that_a_template_leaves_out_refuses_the_request(template, index, tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    said = [says("user", "U1"), says("assistant", "A1"), says("user", "U2")]
    async with serving(appliance, tmp_path / "api.sock") as served:
        for _ in range(2):
            reply = await served.chat(messages=said, max_tokens=1)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, f"messages[{index}].content")
            assert "chat template of chat_template" in error["message"]


async def test_what_is_left_out_is_named_as_its_client_sent_it(tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=DROPS["the user"][0]))
    async with serving(appliance, tmp_path / "api.sock") as served:
        body = {"instructions": "S", "input": [says("user", "U1")]}
        reply = await served.http.post("/v1/responses", json=body)
    assert reply.json()["error"]["param"] == "input[0].content"


async def test_a_known_shape_is_looked_at_again(tmp_path):
    """A template may leave out what it took before: here, a fourth message."""
    template = "{% for m in messages[:3] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    turn = [says("user", "what is it"), says("assistant", "it is so")]
    async with serving(appliance, tmp_path / "api.sock") as served:
        short = [*turn, says("user", "why so")]
        assert (await served.chat(messages=short, max_tokens=1)).status_code == 200
        longer = [*turn, *turn, says("user", "another matter")]
        assert (await served.chat(messages=longer, max_tokens=1)).status_code == 400


CALLS_ALONE = (
    TOOLS + "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].id }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
BESIDE = [
    says("user", "U1"),
    says("assistant", "A1", tool_calls=[call("abcdefghi", a=1)]),
    says("tool", "R1", tool_call_id="abcdefghi"),
]


async def test_words_beside_calls_get_a_message_of_their_own_where_they_would_be_lost(tmp_path):
    text, changes = await served_prompt(CALLS_ALONE, BESIDE, tmp_path)
    assert (
        text
        == "[" + text[1 : text.index("]<")] + "]<user>U1<assistant>A1<assistant>abcdefghi<tool>R1"
    )
    assert "before its calls" in changes


async def test_words_beside_calls_that_no_form_keeps_are_named(tmp_path):
    template = (
        CALLS_ALONE + "{% for m in messages %}{% if not loop.first and m.role == 'assistant' "
    )
    template += (
        "and loop.previtem.role == m.role %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template), max_model_len=8192)
    async with serving(appliance, tmp_path / "api.sock") as served:
        for _ in range(2):
            reply = await served.chat(messages=BESIDE, tools=[ADD], max_tokens=1)
            assert reply.status_code == 200
            assert reply.headers["x-penstock-ignored"] == "messages.1.content"
