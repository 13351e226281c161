"""How much a model is to think, as each API and each client says it."""

from __future__ import annotations

import pytest

from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

TEMPLATE = (
    "[{{ reasoning_effort }} {{ enable_thinking }}]"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSE = "/v1/chat/completions", "/v1/responses"
MESSAGE, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
BODIES = {
    CHAT: {"messages": HI, "max_tokens": 1},
    RESPONSE: {"input": "hi", "max_output_tokens": 1},
    MESSAGE: {"messages": HI, "max_tokens": 1},
    OLLAMA: {"messages": HI, "stream": False, "options": {"num_predict": 1}},
    GENERATE: {"prompt": "hi", "stream": False, "options": {"num_predict": 1}},
}
HIGH = {"effort": "high"}
ASKED = [
    (CHAT, {"reasoning_effort": "high"}, "high True"),
    (CHAT, {"reasoning_effort": "none"}, "none False"),
    (CHAT, {"reasoning": HIGH}, "high True"),
    (CHAT, {"reasoning": {"enabled": False}}, " False"),
    (CHAT, {"think": "low"}, "low True"),
    (CHAT, {"think": False}, " False"),
    (CHAT, {"enable_thinking": False}, " False"),
    (CHAT, {"thinking": {"type": "disabled"}}, " False"),
    (CHAT, {"thinking": {"type": "enabled"}}, " True"),
    (CHAT, {"think": True, "chat_template_kwargs": {"enable_thinking": False}}, " False"),
    (RESPONSE, {"reasoning": HIGH}, "high True"),
    (MESSAGE, {"output_config": HIGH}, "high True"),
    (MESSAGE, {"output_config": HIGH, "thinking": {"type": "disabled"}}, "high False"),
    (OLLAMA, {"think": "high"}, "high True"),
    (OLLAMA, {"think": True}, " True"),
    (OLLAMA, {"think": False}, " False"),
    (GENERATE, {"think": "medium"}, "medium True"),
]


@pytest.mark.parametrize(("path", "fields", "told"), ASKED, ids=str)
async def test_effort_reaches_the_template_over_each_door(path, fields, told, tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=TEMPLATE))
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.http.post(path, json={**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    assert "x-penstock-ignored" not in reply.headers
    assert appliance.submitted[0].prompt_text == f"[{told}]hi"


UNREAD = [
    (CHAT, {"reasoning": {"effort": "low", "max_tokens": 5}}, "reasoning.max_tokens"),
    (RESPONSE, {"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
    (MESSAGE, {"output_config": {"budget": 1}}, "output_config.budget"),
    (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
    (OLLAMA, {"options": {"num_predict": 1, "mirostat": 2}}, "options.mirostat"),
    (OLLAMA, {"options": {"num_predict": 1, "typical_p": 0.7}}, "options.typical_p"),
    (GENERATE, {"context": [1, 2]}, "context"),
]


@pytest.mark.parametrize(("path", "fields", "name"), UNREAD, ids=str)
async def test_fields_within_fields_that_are_not_read_are_named(path, fields, name, tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=TEMPLATE))
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.http.post(path, json={**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-penstock-ignored"] == name


@pytest.mark.parametrize("options", [{"temperature": 3}, {"repeat_penalty": 3}, {"mirostat": 0}])
async def test_ollamas_ranges_are_taken(options, tmp_path):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=TEMPLATE))
    async with serving(appliance, tmp_path / "api.sock") as served:
        body = {**BODIES[OLLAMA], "options": {"num_predict": 1, **options}}
        reply = await served.http.post(OLLAMA, json=body)
    assert reply.status_code == 200
    assert "x-penstock-ignored" not in reply.headers
