"""Ollama's API: chat and generate brought into a chat's fields, replies line by line, model paths.

Owns: which fields there are, and what is refused by name; their shapes; /api/version, tags, show,
ps and pull.
Invariant: what is answered is what a client of OpenAI's API would have asked for.
Never: keeps anything between two requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from appliance.api.appliance import Appliance
from appliance.api.ask import MAX_MESSAGES, Ask, check_model, infill_of
from appliance.api.openai import chat_ask, completion_ask
from appliance.api.replies import fingerprint
from appliance.api.stream import Delta
from appliance.api.tool_format import output_format_of
from appliance.api.wire import Dialect, appliance_of, error_body, json_response, require
from appliance.frame.protocol import iso_time, utc_now
from appliance.json_fields import Fields, invalid_type, invalid_value, unsupported
from appliance.models.names import HubName, a_model
from appliance.request import ModelInfo, Request, Role
from engine.errors import ConfigError, RequestError, Unavailable
from engine.schedule.sequence import FinishReason

Json = dict[str, Any]

_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's options, and what they are called in OpenAI's or vLLM's API."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
}
"""Options that would change the answer, and the values with which they do not."""
_NO_EFFECT = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram"),
    *("use_mmap", "use_mlock", "numa", "vocab_only", "f16_kv", "repeat_last_n"),
    *("mirostat_tau", "mirostat_eta"),
}
"""Options about how a model is loaded; what is loaded here is the operator's."""


def chat_ask_of(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /api/chat."""
    messages = fields.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise invalid_type("messages", "a list of messages", messages)
    if len(messages or []) > MAX_MESSAGES:
        raise invalid_value("messages", f"has more than {MAX_MESSAGES} messages")
    places = [f"messages[{index}]" for index in range(len(messages or []))]
    said = [_message(Fields.of(m, at)) for m, at in zip(messages or [], places, strict=True)]
    chat = {**_common(fields), "messages": said, "tools": _tools(fields.get("tools"))}
    return _finished(chat_ask(Fields(chat), model), fields, chat)


def generate_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /api/generate: a chat of one message, or with `raw` a bare prompt."""
    prompt, system = fields.text("prompt") or "", fields.text("system")
    if fields.get("images"):
        raise unsupported("images", "are not supported: this model reads text")
    if fields.get("template"):
        raise unsupported("template", "is a program, and is not run; `raw` sends a bare prompt")
    if fields.get("context"):
        raise unsupported("context", "is not kept; send the conversation to /api/chat")
    common, suffix = _common(fields), fields.text("suffix")
    if fields.boolean("raw") or suffix:
        plain = {**common, "prompt": prompt, "suffix": suffix}
        plain.pop("chat_template_kwargs", None)
        if plain.get("max_tokens") is None:
            plain["max_tokens"] = 128
        return _finished(completion_ask(Fields(plain), model, 1), fields, plain)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    chat = {**common, "messages": messages}
    return _finished(chat_ask(Fields(chat), model), fields, chat)


def _common(fields: Fields) -> Json:
    """What both have; options that nobody knows are told as ignored."""
    options = fields.nested("options") or Fields({}, "options")
    asked: Json = {"model": fields.get("model"), "stream": fields.boolean("stream", default=True)}
    asked |= {ours: options.get(theirs) for theirs, ours in _OPTIONS.items()}
    for name, neutral in _NEUTRAL.items():
        value = options.get(name)
        if value is not None and value not in neutral:
            raise unsupported(options.path(name))
    num_predict = options.integer("num_predict", -2)
    if num_predict is not None and num_predict > 0:
        asked["max_tokens"] = num_predict
    asked["response_format"] = _form(fields.get("format"))
    think = fields.get("think")
    if think is not None:
        asked["chat_template_kwargs"] = {"enable_thinking": think not in (False, "none")}
    fields.get("keep_alive")  # the model stays as long as the daemon
    unknown = [name for name in options.ignored if name not in _NO_EFFECT]
    asked["_ignored"] = tuple(f"options.{name}" for name in unknown)
    return asked


def _finished(ask: Ask, fields: Fields, asked: Json) -> Ask:
    return dataclasses.replace(ask, ignored=(*asked["_ignored"], *fields.ignored))


def _form(value: object) -> Json | None:
    """`json`, or a schema."""
    if value in (None, ""):
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"schema": value}}
    raise invalid_value("format", "must be json, or a JSON schema")


def _message(fields: Fields) -> Json:
    """Ollama's calls have no ids, and their arguments are objects."""
    if fields.get("images"):
        raise unsupported(fields.path("images"), "are not supported: this model reads text")
    message: Json = {"role": fields.get("role"), "content": fields.get("content") or ""}
    if calls := fields.get("tool_calls"):
        message["tool_calls"] = calls
    if thinking := fields.text("thinking"):
        message["reasoning_content"] = thinking
    for name in ("tool_name", "tool_call_id"):
        if (text := fields.text(name)) is not None:
            message["name" if name == "tool_name" else name] = text
    return message


def _tools(value: object) -> object:
    """Older clients leave out what type a tool is."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "function", **one} if isinstance(one, dict) and one.get("type") is None else one
        for one in value
    ]


# What clients of Ollama's /api/chat and /api/generate read: JSON objects, one a line.
# Invariant: the lines of a stream add up to the whole reply; only the last one is done.
# Never: waits, or knows HTTP.


class OllamaShape:
    """The shape of one reply.

    Args:
        request: whose reply it is; it has one sequence.
        is_chat: a message, or a response as /api/generate gives it.
    """

    media_type = "application/x-ndjson"

    def __init__(self, request: Request, *, is_chat: bool) -> None:
        self._request = request
        self._is_chat = is_chat
        self._calls: list[list[str]] = []
        """Name and arguments of each; a call is told once it is complete."""
        self._num_told = 0
        self._last: Delta | None = None

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """The reply in one piece."""
        (delta,) = deltas
        self._take(delta)
        return self._object(delta.text, delta.reasoning, self._complete(is_last=True)) | self._end()

    def opening(self) -> bytes:
        """A stream has none."""
        return b""

    def events(self, delta: Delta) -> bytes:
        """What a stream tells of a delta."""
        self._take(delta)
        calls = self._complete(is_last=delta.finish_reason is not None)
        if not (delta.text or delta.reasoning or calls):
            return b""
        told = self._object(delta.text, delta.reasoning, calls)
        return _line(told | {"done": False})

    def closing(self) -> bytes:
        """What a stream ends with."""
        return _line(self._object("", "", []) | self._end())

    def failure(self, error: RequestError) -> bytes:
        """What a stream ends with if it fails."""
        return _line(error_body(Dialect.OLLAMA, error))

    def alive(self, place: int | None) -> bytes:
        """Nothing: every line is an object for the client."""
        return b""

    def _take(self, delta: Delta) -> None:
        self._last = delta
        for part in delta.calls:
            if part.name is not None:
                self._calls.append([part.name, ""])
            self._calls[-1][1] += part.arguments

    def _complete(self, *, is_last: bool) -> list[Json]:
        """Calls that are complete and not told; one that a limit has cut off never is."""
        told = []
        while self._num_told < len(self._calls):
            name, text = self._calls[self._num_told]
            try:
                arguments = msgspec.json.decode(text or "null")
            except msgspec.DecodeError:
                arguments = None
            is_next = self._num_told < len(self._calls) - 1
            if not isinstance(arguments, dict):
                if not (is_next or is_last):
                    break  # more of it may come
            else:
                told.append({"function": {"name": name, "arguments": arguments}})
            self._num_told += 1
        return told

    def _object(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        said: Json = {"thinking": reasoning} if reasoning else {}
        if self._is_chat:
            said = {"role": "assistant", "content": text, **said}
            if calls:
                said["tool_calls"] = calls
            said = {"message": said}
        else:
            said["response"] = text
        return {"model": self._request.model, "created_at": utc_now(), **said}

    def _end(self) -> Json:
        """The reason, and times in nanoseconds; those that were not measured are not there."""
        (sequence,) = self._request.sequences
        reason = self._last.finish_reason if self._last else FinishReason.STOP
        stamps, told = sequence.stamps, {}
        last_ns = stamps.last_token_ns
        if last_ns is not None and stamps.first_token_ns is not None:
            told["total_duration"] = last_ns - stamps.arrived_ns
            begun_ns = stamps.started_ns or stamps.arrived_ns
            told["prompt_eval_duration"] = stamps.first_token_ns - begun_ns
            told["eval_duration"] = last_ns - stamps.first_token_ns
        return {
            "done": True,
            "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
            **told,
            "load_duration": 0,
            "prompt_eval_count": sequence.num_prompt_tokens,
            "eval_count": sequence.num_output_tokens,
        }


def _line(content: Json) -> bytes:
    return msgspec.json.encode(content) + b"\n"


# Ollama's paths about models: what is served, what it can do; pulling, for operators.
# Invariant: what is not known is left out, never made up.
# Never: generates; changes which model is served.


PULL = (sys.executable, "-P", "-m", "appliance.models.hub")
_RETRY_MS = 10_000
_BAD_GATEWAY = 502
_STATUSES = {3: 503, 4: 403, 5: 404, 78: 400}
"""What to answer, by the exit code of a pull: no hub, not for us, not there, not to be served."""


def ollama_routes() -> list[Route]:
    """All but the two that generate."""
    api = _Pulls()
    return [
        Route("/api/version", show_version),
        Route("/api/tags", tags),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/ps", running),
        Route("/api/pull", api.pull, methods=["POST"]),
    ]


async def show_version(http: HttpRequest) -> Response:
    """Ours: no version of Ollama is claimed."""
    return json_response({"version": version("penstock")})


async def tags(http: HttpRequest) -> Response:
    """The model that is served, and those that a request may name instead."""
    appliance = appliance_of(http)
    others = [{"name": n, "model": n, "details": {}} for n in appliance.model.others]
    return json_response({"models": [_model(appliance), *others]})


async def running(http: HttpRequest) -> Response:
    """The one that is served."""
    appliance = appliance_of(http)
    return json_response(
        {"models": [_model(appliance) | {"context_length": appliance.model.max_model_len}]}
    )


async def show(http: HttpRequest) -> Response:
    """What the model is and can do."""
    appliance, fields = appliance_of(http), Fields.of_body(await http.body())
    name = fields.get("model")
    name = fields.get("name") if name is None else name
    if isinstance(name, str) and (plain := name.removesuffix(":latest")) in appliance.model.others:
        known = {"general.architecture": "penstock", "general.basename": plain}
        return json_response({"details": {}, "model_info": known, "capabilities": ["completion"]})
    check_model(name, appliance.model)
    model, tokenizer = appliance.model, appliance.tokenizer
    output_format = output_format_of(tokenizer, model.tool_parser, model.reasoning_parser)
    can = ["completion"]
    if tokenizer.chat_template is not None:
        can.append("tools")
        if output_format.thoughts or output_format.tools.is_harmony:
            can.append("thinking")
    if infill_of(tokenizer) is not None:
        can.append("insert")
    told: Json = {
        "details": {},
        "model_info": {
            "general.architecture": "penstock",
            "general.basename": model.model_id,
            "penstock.context_length": model.max_model_len,
            "penstock.vocab_size": model.vocab_size,
        },
        "capabilities": can,
        "modified_at": iso_time(model.created),
    }
    if tokenizer.chat_template is not None:
        told["template"] = tokenizer.chat_template.tool_source
    return json_response(told)


def _model(appliance: Appliance) -> Json:
    model = appliance.model
    return {
        "name": model.model_id,
        "model": model.model_id,
        "modified_at": iso_time(model.created),
        "digest": fingerprint(model),
        "details": {},
    }


class _Pulls:
    """Downloads that clients ask for, one at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._is_busy = False
        self._failed_status = _BAD_GATEWAY
        """Of the last pull that failed."""

    async def pull(self, http: HttpRequest) -> Response:
        """Bring a model into the cache of this machine; what is served stays what it is."""
        require(http, Role.OPERATOR)
        fields = Fields.of_body(await http.body())
        asked = fields.text("model") or fields.text("name") or ""
        try:
            name = a_model(asked)
        except (ConfigError, ValueError) as error:
            raise invalid_value("model", f"is no name of a model: {error}") from error
        if not isinstance(name, HubName):
            raise invalid_value("model", "must be a name on the hub, as OWNER/NAME")
        if self._is_busy:
            raise Unavailable(
                "another model is being pulled", code="busy", retry_after_ms=_RETRY_MS
            )
        lines = self._lines(name, appliance_of(http).model.model_id)
        if fields.boolean("stream", default=True):
            encoded = (msgspec.json.encode(line) + b"\n" async for line in lines)
            return StreamingResponse(encoded, media_type="application/x-ndjson")
        said = [line async for line in lines]
        last = said[-1]
        return json_response(last, status=self._failed_status if "error" in last else 200)

    async def _lines(self, name: HubName, served: str) -> AsyncIterator[Json]:
        """What Ollama's clients show: a status, and bytes. The process ends with its reader."""
        self._is_busy = True
        process = None
        try:
            yield {"status": f"pulling {name}"}
            process = await asyncio.create_subprocess_exec(
                *PULL, str(name), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            assert process.stdout is not None
            said: Json = {}
            async for line in process.stdout:
                said = json.loads(line)
                if "done_bytes" in said:
                    yield {
                        "status": f"pulling {name}",
                        "total": said["total_bytes"],
                        "completed": said["done_bytes"],
                    }
            if "folder" in said:
                yield {"status": f"{served} is still what is served; serve --model {name} for this"}
                yield {"status": "success"}
            else:
                words = said.get("error") or {"what": "the pull has ended without a word"}
                self._failed_status = _STATUSES.get(said.get("exit_code", 1), _BAD_GATEWAY)
                yield {"error": "; ".join(filter(None, (words["what"], words.get("hint"))))}
        finally:
            self._is_busy = False
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
