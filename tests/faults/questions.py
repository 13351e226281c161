"""Make requests of every API whose answers can be recorded while nothing disturbs the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.faults.wire import Door, ask
from tests.starter.documents import Document, Writer
from tests.sweep.replies import Said, read

FACTS = (2, 8, 25, 40, 60)
"""Of a document; a fact takes some 12 tokens."""
MODEL = "penstock-starter-1"
LONG_TOKENS = 300
MAX_TOKENS = 48


@dataclass(slots=True)
class Question:
    """A request and the right answer to it."""

    path: str
    body: dict[str, Any]
    secret: str
    """A part of the prompt that no file of the daemon may have."""
    right: tuple[Any, ...] = field(default=())

    @property
    def texts(self) -> dict[int, str]:
        """The right text of each choice."""
        return dict(self.right[0])

    def record(self, door: Door) -> None:
        """Ask while nothing disturbs, and keep the answer."""
        reply = ask(door, self.path, self.body)
        said = read(reply)
        assert reply.status == 200, (self.path, reply.status, reply.body, reply.problem)
        assert (said.is_ended, said.errors) == (True, []), (self.path, reply.body)
        self.right = answer_of(said)


def answer_of(said: Said) -> tuple[Any, ...]:
    """Take what must be the same each time; how much of a prompt was cached is not."""
    texts, reasons, counts, errors, is_ended = said.as_tuple()
    counts = [(name, count) for name, count in counts if name != "input_tokens"]
    return texts, reasons, counts, errors, is_ended


def make_questions(seed: int, count: int) -> list[Question]:
    """Make so many questions, of all forms in turn."""
    rng = Random(seed)
    writer = Writer(rng, held_out=True)
    forms = [_chat, _completion, _choices, _messages, _long, _responses, _stopped, _turns]
    forms += [_ollama_chat, _logprobs, _schema, _ollama_generate, _echo]
    return [forms[i % len(forms)](writer, rng, streams=i % 3 != 1) for i in range(count)]


def simple_question() -> Question:
    """Make the question that shows whether the daemon serves."""
    messages = [{"role": "user", "content": "Who are you?"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    return Question("/v1/chat/completions", body, "")


def long_body(rng: Random, *, num_facts: int = 60) -> dict[str, Any]:
    """Make a completion that holds many blocks for a while; its answer is not looked at."""
    document = Writer(rng, held_out=True).document(num_facts)
    return {"prompt": document.text, "max_tokens": 400, "ignore_eos": True, "stream": True}


def _asked(writer: Writer, rng: Random) -> tuple[Document, str, str]:
    document = writer.document(rng.choice(FACTS))
    turn = writer.lookup(document)
    start = rng.randrange(max(1, len(document.text) - 40))
    return document, f"{document.text}\n\n{turn.question}", document.text[start : start + 40]


def _chat(writer: Writer, rng: Random, *, streams: bool) -> Question:
    _, prompt, secret = _asked(writer, rng)
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS}
    body |= {"temperature": 0, "stream": streams}
    return Question("/v1/chat/completions", body, secret)


def _choices(writer: Writer, rng: Random, *, streams: bool) -> Question:
    question = _chat(writer, rng, streams=streams)
    question.body |= {"n": 3, "temperature": 0.9, "seed": rng.randrange(2**31)}
    return question


def _schema(writer: Writer, rng: Random, *, streams: bool) -> Question:
    question = _chat(writer, rng, streams=streams)
    schema = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 20}}}
    schema |= {"required": ["answer"], "additionalProperties": False}
    wanted = {"name": "answer", "schema": schema}
    question.body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    return question


def _turns(writer: Writer, rng: Random, *, streams: bool) -> Question:
    document = writer.document(rng.choice(FACTS))
    first, second = writer.lookup(document), writer.lookup(document)
    messages = [
        {"role": "user", "content": f"{document.text}\n\n{first.question}"},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.question},
    ]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": streams}
    return Question("/v1/chat/completions", body, document.text[:40])


def _completion(writer: Writer, rng: Random, *, streams: bool) -> Question:
    _, prompt, secret = _asked(writer, rng)
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.7, "ignore_eos": True}
    body |= {"seed": rng.randrange(2**31), "stream": streams}
    return Question("/v1/completions", body, secret)


def _long(writer: Writer, rng: Random, *, streams: bool) -> Question:
    question = _completion(writer, rng, streams=streams)
    question.body["max_tokens"] = LONG_TOKENS
    return question


def _stopped(writer: Writer, rng: Random, *, streams: bool) -> Question:
    question = _long(writer, rng, streams=streams)
    question.body["stop"] = ["ing", " is"]
    return question


def _logprobs(writer: Writer, rng: Random, *, streams: bool) -> Question:
    question = _completion(writer, rng, streams=streams)
    question.body["logprobs"] = 3
    return question


def _echo(writer: Writer, rng: Random, *, streams: bool) -> Question:
    question = _completion(writer, rng, streams=False)
    question.body["echo"] = True
    return question


def _messages(writer: Writer, rng: Random, *, streams: bool) -> Question:
    _, prompt, secret = _asked(writer, rng)
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": streams}
    return Question("/v1/messages", body, secret)


def _responses(writer: Writer, rng: Random, *, streams: bool) -> Question:
    _, prompt, secret = _asked(writer, rng)
    body = {"input": prompt, "max_output_tokens": MAX_TOKENS, "temperature": 0, "stream": streams}
    return Question("/v1/responses", body, secret)


def _ollama_chat(writer: Writer, rng: Random, *, streams: bool) -> Question:
    _, prompt, secret = _asked(writer, rng)
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": streams}
    body["options"] = {"num_predict": MAX_TOKENS, "temperature": 0}
    return Question("/api/chat", body, secret)


def _ollama_generate(writer: Writer, rng: Random, *, streams: bool) -> Question:
    _, prompt, secret = _asked(writer, rng)
    body = {"model": MODEL, "prompt": prompt, "stream": streams}
    body["options"] = {"num_predict": MAX_TOKENS, "temperature": 0}
    return Question("/api/generate", body, secret)
