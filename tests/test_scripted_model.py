"""The scripted model does what apps are checked with: a call by each API, then an answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.daemons import ALONE
from tests.worlds.scripted_model import COMMAND, DONE, END, MARK, STYLES, Script, template, write

PARAMETERS = {
    "type": "object",
    "properties": {
        "timeout": {"type": "number"},
        "command": {"type": "string"},
        "description": {"type": "string"},
    },
    "required": ["command", "description"],
}
TASK = {"role": "user", "content": "Write the mark."}


def test_a_call_is_made_and_its_result_is_answered_by_each_api(start_daemon, tmp_path):
    daemon = start_daemon(*ALONE, model=write(tmp_path / "scripted", "mistral")).wait_ready()
    function = {"name": "run_command", "parameters": PARAMETERS}
    tool = {"type": "function", "function": function}

    def ask(path, **body):
        reply = daemon.http.post(path, json={"temperature": 1, "max_tokens": 400, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def openai(messages):
        reply = ask("/v1/chat/completions", messages=messages, tools=[tool])
        message = reply["choices"][0]["message"]
        calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        return message["content"], calls

    def anthropic(messages):
        tools = [{"name": "run_command", "input_schema": PARAMETERS}]
        blocks = ask("/v1/messages", messages=messages, tools=tools)["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        return "".join(texts), [block["input"] for block in blocks if block["type"] == "tool_use"]

    def responses(messages):
        reply = ask("/v1/responses", input=messages, tools=[{"type": "function", **function}])
        items = [item for item in reply["output"] if item["type"] == "function_call"]
        return json.dumps(reply["output"]), [json.loads(item["arguments"]) for item in items]

    def ollama(messages):
        message = ask("/api/chat", messages=messages, tools=[tool], stream=False)["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        return message["content"], calls

    for way in (openai, anthropic, responses, ollama):
        _, calls = way([TASK])
        assert calls == [{"command": COMMAND, "description": COMMAND}], way
        text, calls = way([{"role": "user", "content": f"It said {MARK}."}])
        assert calls == []
        assert DONE in text


@pytest.mark.parametrize("style", STYLES)
def test_no_draw_leaves_a_reply(style):
    """Temperature 1 draws each next piece with all but a billionth of the probability."""
    script = Script(style)
    embedding, head = script.embedding_and_head()
    for name, chain in script.chains.items():
        if name == "call":
            continue  # the server's grammar says what follows
        tokens = [script.id_of(text) for text in (f"<|say:{name}|>", *chain, END)]
        points = embedding[tokens[:-1]].astype(np.float64)
        logits = points / np.sqrt(np.mean(points**2, axis=1, keepdims=True)) @ head.T
        likelihood = np.exp(logits - logits.max(axis=1, keepdims=True))
        likelihood /= likelihood.sum(axis=1, keepdims=True)
        assert (likelihood[range(len(points)), tokens[1:]] > 1 - 1e-9).all()


@pytest.mark.parametrize("style", STYLES)
def test_no_token_of_the_script_is_said_after_two_others(style):
    """One token follows another, whatever came before: so each may have one place only."""
    script = Script(style)
    said = [piece for chain in script.chains.values() for piece in chain] + script.command
    assert len(set(said)) == len(said)
    assert "".join(script.command) == COMMAND
    assert MARK in template(style)
