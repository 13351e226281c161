"""Translate Ollama's chat, generate and model endpoints to ours and back.

Owns: which fields there are, and what is refused by name; their shapes; what apps ask before they
chat: /, /api/version, tags, show, ps, pull, and loading a model.
Invariant: what is answered is what a client of OpenAI's API would have asked for.
Never: keeps anything between two requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from appliance.api import ollama_bodies as bodies
from appliance.api import openai_bodies as chats
from appliance.api.appliance import Appliance
from appliance.api.ask import Ask, PromptTooLong
from appliance.api.chat_messages import left_out
from appliance.api.dialects import Dialect, error_body
from appliance.api.model_choice import check_model
from appliance.api.openai import ask_of_chat, ask_of_completion
from appliance.api.prompts import infill_of
from appliance.api.stream import Delta
from appliance.api.wire import appliance_of, json_response, require
from appliance.frame.protocol import iso_time, utc_now
from appliance.json_fields import (
    Json,
    check,
    decode_object,
    invalid_value,
    undeclared,
    unsupported,
)
from appliance.models.facts import ModelFacts
from appliance.models.names import HubName, a_model
from appliance.request import ModelInfo, Request, Role
from engine.errors import ConfigError, RequestError, Unavailable
from engine.schedule.sequence import FinishReason
from engine.wire.not_json import NOT_JSON

_READ = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty")
_READ_TOO = ("frequency_penalty", "repeat_penalty")
"""Options that have the same names in a chat."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
}
"""Options that are known and not supported, with the values that ask for nothing."""
_NO_EFFECT = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram"),
    *("use_mmap", "use_mlock", "numa", "vocab_only", "f16_kv", "repeat_last_n"),
    *("mirostat_tau", "mirostat_eta"),
}
"""Options about loading a model, which here is for the operator to decide."""
_REFUSED = {
    "images": "are not supported: this model reads text",
    "template": "is a program, and is not run; `raw` sends a bare prompt",
    "context": "is not kept; send the conversation to /api/chat",
}
"""Fields of /api/generate that are known and not supported, unless they are empty."""


class NothingToGenerate(Exception):
    """A request that only loads or unloads a model; it carries the whole reply."""

    def __init__(self, reply: Json, keep_alive_s: float | None) -> None:
        super().__init__("nothing to generate")
        self.reply = reply
        self.keep_alive_s = keep_alive_s

    def told(self, *, is_unloaded: bool) -> Json:
        """Return the reply, which says what becomes of the model."""
        return {**self.reply, "done_reason": "unload" if is_unloaded else "load"}


def chat_ask_of(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /api/chat."""
    body = check(values, bodies.OllamaChatRequest)
    last = len(body.messages or []) - 1
    said = [
        _message(one, f"messages[{index}]", is_last=index == last)
        for index, one in enumerate(body.messages or [])
    ]
    # a request to load has no messages, and its other fields are checked, too
    messages = said or [chats.ChatMessage(role="user", content="")]
    chat = chats.ChatRequest(**_common(values, body), messages=messages, tools=_tools(body.tools))
    ask = ask_of_chat(chat, model, _ignored(values, bodies.OllamaChatRequest))
    if not said:
        raise _loaded(body, model, {"message": {"role": "assistant", "content": ""}})
    kept_s = keep_alive_s(body.keep_alive)
    return dataclasses.replace(ask, drops_oldest=body.truncate is not False, keep_alive_s=kept_s)


def generate_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /api/generate: a chat of one message, or with `raw` a bare prompt."""
    for name, why in _REFUSED.items():
        if values.get(name):
            raise unsupported(name, why)
    body = check(values, bodies.OllamaGenerateRequest)
    prompt, common = body.prompt or "", _common(values, body)
    ignored = _ignored(values, bodies.OllamaGenerateRequest, _REFUSED)
    if (body.raw and prompt) or body.suffix:
        common.pop("chat_template_kwargs")
        plain = chats.CompletionRequest(**common, prompt=prompt, suffix=body.suffix)
        if not prompt:
            raise invalid_value("prompt", "is empty")
        ask = ask_of_completion(plain, model, 1, ignored)
        kept_s, most = keep_alive_s(body.keep_alive), model.default_max_tokens
        return dataclasses.replace(ask, default_max_tokens=most, keep_alive_s=kept_s)
    messages = [chats.ChatMessage(role="user", content=prompt)]
    if body.system is not None:
        messages.insert(0, chats.ChatMessage(role="system", content=body.system))
    ask = ask_of_chat(chats.ChatRequest(**common, messages=messages), model, ignored)
    if not prompt:
        raise _loaded(body, model, {"response": ""})
    return dataclasses.replace(ask, keep_alive_s=keep_alive_s(body.keep_alive))


def in_ollamas_words(error: RequestError) -> RequestError:
    """Say as Ollama does that a prompt is too long."""
    if isinstance(error, PromptTooLong):
        count = f"{error.num_prompt_tokens} tokens, {error.max_model_len} with the answer at most"
        return RequestError(
            f"the input length exceeds the context length: {count}", code=error.code
        )
    return error


def _common(values: Json, body: bodies.OllamaChatRequest | bodies.OllamaGenerateRequest) -> Json:
    """Write the fields that both have as a chat's."""
    options = body.options or bodies.Options()
    for name, neutral in _NEUTRAL.items():
        value = (values.get("options") or {}).get(name)
        if value is not None and value not in neutral:
            raise unsupported(f"options.{name}")
    limit, think = options.num_predict, body.think
    return {
        "model": body.model,
        "stream": body.stream is not False,
        **{name: getattr(options, name) for name in (*_READ, *_READ_TOO)},
        "max_tokens": limit if limit is not None and limit > 0 else None,
        "response_format": _form(body.format),
        "chat_template_kwargs": (
            None if think is None else {"enable_thinking": think not in (False, "none")}
        ),
    }


def _ignored(
    values: Json, kind: type[msgspec.Struct], known: Container[str] = ()
) -> tuple[str, ...]:
    """List the fields and options that have no effect; those about loading need none."""
    options = undeclared(values.get("options") or {}, bodies.Options, _NEUTRAL, _NO_EFFECT)
    return (*(f"options.{name}" for name in options), *undeclared(values, kind, known))


def _loaded(
    body: bodies.OllamaChatRequest | bodies.OllamaGenerateRequest, model: ModelInfo, empty: Json
) -> NothingToGenerate:
    """Answer a request without a prompt: by now its model is loaded."""
    told = {"model": model.model_id, "created_at": utc_now(), **empty, "done": True}
    return NothingToGenerate(told, keep_alive_s(body.keep_alive))


def keep_alive_s(value: float | str | None) -> float | None:
    """Read Ollama's `keep_alive`, seconds or `1h30m`; less than 0 is for ever; None: not given."""
    if isinstance(value, str):
        parts = re.findall(r"([0-9.]+)(ns|us|ms|s|m|h)?", value)
        total_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        value = -total_s if value.startswith("-") else total_s
    return math.inf if value is not None and value < 0 else value


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "": 1, "m": 60, "h": 3600}


class _Unloading(msgspec.Struct):
    """All of a body that decides whether it only unloads a model."""

    keep_alive: float | str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None


def unloaded(path: str, body: bytes, name: str) -> NothingToGenerate | None:
    """Answer a request that only unloads a model; None: it asks for something else.

    Args:
        path: of the endpoint.
        body: of the request.
        name: of the model.
    """
    try:
        asked = msgspec.json.decode(body, type=_Unloading)
        is_unloading = path in UNLOADING and keep_alive_s(asked.keep_alive) == 0
    except (*NOT_JSON, ValueError):
        return None  # it will be refused in the usual words
    if not is_unloading or asked.prompt or asked.messages:
        return None
    told = {"model": name, "created_at": utc_now(), **UNLOADING[path], "done": True}
    return NothingToGenerate(told, 0.0)


UNLOADING: dict[str, Json] = {
    "/api/generate": {"response": ""},
    "/api/chat": {"message": {"role": "assistant", "content": ""}},
}
"""Endpoints that unload models, and the reply's empty part."""


def _form(value: str | Json | None) -> chats.ResponseFormat | None:
    """Read `json`, or a schema."""
    if isinstance(value, dict):
        return chats.SchemaFormat(chats.NamedSchema(value))
    return chats.JsonFormat() if value else None


def _message(said: bodies.OllamaMessage, where: str, *, is_last: bool) -> chats.ChatMessage:
    """Write a message as a chat's; Ollama's calls have no ids, and their arguments are objects."""
    content = said.content or ""
    if said.images:
        is_asked = is_last and said.role == "user"
        place = left_out(f"{where}.images", "image", is_last=is_asked)
        content = f"{place}\n{content}"
    return chats.ChatMessage(
        role=said.role,
        content=content,
        name=said.tool_name,
        tool_call_id=said.tool_call_id,
        reasoning_content=said.thinking or None,
        tool_calls=said.tool_calls,
    )


def _tools(values: list[Any] | None) -> list[Any] | None:
    """Write tools as in a chat; older clients leave out what type a tool is."""
    return values and [
        {**one, "type": "function"} if isinstance(one, dict) and one.get("type") is None else one
        for one in values
    ]


# What clients of Ollama's /api/chat and /api/generate read: JSON objects, one a line.
# Invariant: the lines of a stream add up to the whole reply; only the last one is done.
# Never: waits, or knows HTTP.


class OllamaShape:
    """The shape of one reply.

    Args:
        request: the request to answer; it has one sequence.
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
        """Write the reply in one piece."""
        (delta,) = deltas
        self._take(delta)
        return self._object(delta.text, delta.reasoning, self._complete(is_last=True)) | self._end()

    def opening(self) -> bytes:
        """Begin a stream with nothing."""
        return b""

    def events(self, delta: Delta) -> bytes:
        """Write a delta for a stream."""
        self._take(delta)
        calls = self._complete(is_last=delta.finish_reason is not None)
        if not (delta.text or delta.reasoning or calls):
            return b""
        told = self._object(delta.text, delta.reasoning, calls)
        return _line(told | {"done": False})

    def closing(self) -> bytes:
        """End a stream."""
        return _line(self._object("", "", []) | self._end())

    def failure(self, error: RequestError) -> bytes:
        """End a stream that failed."""
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
            except NOT_JSON:
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
        """Write the reason and the times in nanoseconds, without those not measured."""
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
            **self._request.miss_usage,
        }


def _line(content: Json) -> bytes:
    return msgspec.json.encode(content) + b"\n"


# Ollama's paths about models: what is served, what it can do; pulling, for operators.
# Invariant: what is not known is left out, or empty where apps insist on a field.
# Never: generates; changes which model is served.


COMPATIBLE_VERSION = "0.14.2"
"""The compatible release of Ollama; apps refuse older ones."""
NEVER = "2318-01-01T00:00:00Z"
"""When a model leaves memory; Ollama's clients show a time so far away as `Forever`."""
RUNNING = "Ollama is running"
"""What Ollama says at `/`, and apps compare with."""
PULL = (sys.executable, "-P", "-m", "appliance.models.hub")
_RETRY_MS = 10_000
_BAD_GATEWAY = 502
_STATUSES = {3: 503, 4: 403, 5: 404, 78: 400}
"""What to answer, by the exit code of a pull: no hub, not for us, not there, not to be served."""
_HUBS = ("hf.co/", "huggingface.co/")
"""What Ollama's users write before a name on the hub."""
NOT_HERE = {
    ("POST", "/api/copy"): "the operator's setting `model_aliases` gives a model other names",
    ("DELETE", "/api/delete"): "`penstock rm NAME` removes a model from this machine",
    ("POST", "/api/create"): "the operator's setting `model` says what is served",
    ("POST", "/api/push"): "models are only read here",
}
"""Paths of Ollama that change its store of models, and what does so here."""


def ollama_routes() -> list[Route]:
    """List all routes but the two that generate."""
    api = _Pulls()
    return [
        Route("/", is_running),
        Route("/api/version", show_version),
        Route("/api/tags", tags),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/ps", running),
        Route("/api/pull", api.pull, methods=["POST"]),
        *(
            Route(path, _not_here(path, hint), methods=[method])
            for (method, path), hint in NOT_HERE.items()
        ),
    ]


def _not_here(path: str, hint: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def refuse(http: HttpRequest) -> Response:
        what = f"{path} is not served: there is no store of models to change"
        raise RequestError(what, code="not_implemented", status=501, hint=hint)

    return refuse


async def is_running(http: HttpRequest) -> Response:
    """Answer what Ollama's command asks before all else."""
    return PlainTextResponse(RUNNING)


async def show_version(http: HttpRequest) -> Response:
    """Return the release of Ollama that this is compatible with, and our own version."""
    return json_response({"version": COMPATIBLE_VERSION, "penstock": version("penstock")})


async def tags(http: HttpRequest) -> Response:
    """List the served model, and the models that a request may name instead."""
    model = appliance_of(http).model
    known = {model.model_id: model.facts, **model.others}
    return json_response({"models": [_listed(name, facts) for name, facts in known.items()]})


async def running(http: HttpRequest) -> Response:
    """List the loaded models, the served one first, with the memory of weights and KV pools."""
    appliance = appliance_of(http)
    model, frame = appliance.model, appliance.readings().frame
    pools_bytes = sum(pool.num_blocks * pool.block_bytes for pool in frame.pools)
    size_bytes = (model.facts.size_bytes if model.facts else 0) + pools_bytes
    on_gpu = any(worker.device.startswith("gpu") for worker in frame.workers)
    told = _listed(model.model_id, model.facts) | {
        "size": size_bytes,
        "size_vram": size_bytes if on_gpu else 0,
        "expires_at": NEVER,
        "context_length": model.max_model_len,
    }
    parked = [] if frame.swaps is None else frame.swaps.resident
    if frame.swaps is not None:
        told["expires_at"] = frame.swaps.expires_at or NEVER
    others = [
        _listed(one.model, model.others.get(one.model))
        | {"size": one.num_bytes, "size_vram": 0, "expires_at": one.expires_at or NEVER}
        for one in parked
    ]
    return json_response({"models": [told, *others]})


async def show(http: HttpRequest) -> Response:
    """Describe a model and what it can do."""
    appliance = appliance_of(http)
    body, model = decode_object(await http.body()), appliance.model
    asked = check(body, bodies.OllamaModelRequest)
    name = asked.name if asked.model is None else asked.model
    if name is not None and (plain := name.removesuffix(":latest")) in model.others:
        return json_response(_shown(plain, model.others[plain], None) | {"template": ""})
    check_model(name, model)
    template = appliance.tokenizer.chat_template
    told = _shown(model.model_id, model.facts, model.max_model_len)
    told |= {
        "template": "" if template is None else template.tool_source,
        "parameters": "\n".join(f"{key} {value:g}" for key, value in model.sampling.items()),
        "capabilities": _capabilities(appliance),
    }
    return json_response(told)


def _capabilities(appliance: Appliance) -> list[str]:
    """List in Ollama's words what clients may ask the served model for."""
    model, tokenizer = appliance.model, appliance.tokenizer
    can = ["completion"]
    if tokenizer.chat_template is not None:
        can.append("tools")
        if model.output_format.thoughts or model.output_format.tools.is_harmony:
            can.append("thinking")
    if infill_of(tokenizer) is not None:
        can.append("insert")
    return can


def _shown(name: str, facts: ModelFacts | None, max_model_len: int | None) -> Json:
    """Describe any model for /api/show.

    Args:
        name: what it is called here.
        facts: what its files say; None: they are not on this machine.
        max_model_len: tokens that are served; None: as many as the model was made for.
    """
    family = facts.family if facts else "penstock"
    info: Json = {"general.architecture": family, "general.basename": name}
    if facts is not None:
        info |= {
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": max_model_len or facts.context_length,
            f"{family}.embedding_length": facts.hidden_size,
            f"{family}.block_count": facts.num_layers,
            f"{family}.attention.head_count": facts.num_heads,
            f"{family}.attention.head_count_kv": facts.num_kv_heads,
            f"{family}.vocab_size": facts.vocab_size,
        }
    elif max_model_len is not None:
        info[f"{family}.context_length"] = max_model_len
    return {
        "modelfile": f"FROM {name}\n",
        "details": _details(facts),
        "model_info": info,
        "capabilities": ["completion"],
        "modified_at": iso_time(facts.modified if facts else 0),
    }


def _listed(name: str, facts: ModelFacts | None) -> Json:
    """Describe a model in a list; one that is not on this machine has no bytes here."""
    told = f"{name}\n{facts}".encode()
    return {
        "name": name,
        "model": name,
        "modified_at": iso_time(facts.modified if facts else 0),
        "size": facts.size_bytes if facts else 0,
        "digest": hashlib.sha256(told).hexdigest(),
        "details": _details(facts),
    }


def _details(facts: ModelFacts | None) -> Json:
    """List a model's details; apps read all of them, and take an empty text for unknown."""
    if facts is None:
        facts = ModelFacts("", "", 0, 0, "", 0, 0, 0, 0, 0, 0, 0)
    return {
        "parent_model": "",
        "format": facts.file_format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _in_millions(facts.num_parameters) if facts.num_parameters else "",
        "quantization_level": _DTYPES.get(facts.dtype, facts.dtype.upper()),
    }


_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _in_millions(count: int) -> str:
    """Write a number of parameters as `134.5M` or `8.0B`."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


class _Pulls:
    """Downloads that clients ask for, one at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._is_busy = False
        self._failed_status = _BAD_GATEWAY
        """HTTP status of the last failed pull."""

    async def pull(self, http: HttpRequest) -> Response:
        """Bring a model into the cache of this machine; what is served stays what it is."""
        require(http, Role.USER)
        body = check(decode_object(await http.body()), bodies.OllamaPullRequest)
        model = appliance_of(http).model
        asked, is_stream = body.model or body.name or "", body.stream is not False
        plain = asked.removesuffix(":latest")
        if plain == model.model_id or model.others.get(plain) is not None:
            lines = _is_here()
        else:
            require(http, Role.OPERATOR)
            lines = self._lines(_hub_name(asked), model.model_id)
            if self._is_busy:
                raise Unavailable(
                    "another model is being pulled", code="busy", retry_after_ms=_RETRY_MS
                )
        if is_stream:
            encoded = (msgspec.json.encode(line) + b"\n" async for line in lines)
            return StreamingResponse(encoded, media_type="application/x-ndjson")
        said = [line async for line in lines]
        last = said[-1]
        return json_response(last, status=self._failed_status if "error" in last else 200)

    async def _lines(self, name: HubName, served: str) -> AsyncIterator[Json]:
        """Yield what Ollama's clients show, status and bytes. The process ends with its reader."""
        self._is_busy = True
        process, digest = None, f"sha256:{hashlib.sha256(str(name).encode()).hexdigest()}"
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
                        "digest": digest,
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


async def _is_here() -> AsyncIterator[Json]:
    """Answer apps that pull a model before they use it."""
    yield {"status": "success"}


def _hub_name(asked: str) -> HubName:
    """Parse a model's name on the hub, as users of Penstock or of Ollama write it."""
    for prefix in _HUBS:
        asked = asked.removeprefix(prefix)
    try:
        name = a_model(asked)
    except (ConfigError, ValueError) as error:
        raise invalid_value("model", f"is no name of a model: {error}") from error
    if not isinstance(name, HubName):
        raise invalid_value("model", "must be a name on the hub, as OWNER/NAME")
    return name
