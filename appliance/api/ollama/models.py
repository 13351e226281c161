"""Answer Ollama's paths about models: what is served, what it can do, pulling.

Invariant: an unknown fact is left out, or empty where apps insist on a field.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from appliance.api.core.appliance import Appliance
from appliance.api.core.model_choice import check_model
from appliance.api.core.prompts import infill_of
from appliance.api.core.wire import (
    RUNNING_VERSION,
    appliance_of,
    json_response,
    require,
    small_object,
    streamed,
)
from appliance.api.ollama import fields as bodies
from appliance.daemon.requests.request import ModelInfo, Role
from appliance.hub.facts import ModelFacts
from appliance.hub.names import HubName, a_model
from appliance.json.fields import Json, check, invalid_value
from appliance.json.lines import encode_line
from appliance.observe.frame.protocol import iso_time
from engine.errors import ConfigError, RequestError, Unavailable
from engine.system.python_child import python_command

COMPATIBLE_VERSION = "0.14.2"
"""The compatible release of Ollama; apps refuse older ones."""
NEVER = "2318-01-01T00:00:00Z"
"""When a model leaves memory; Ollama's clients show a time so far away as `Forever`."""
RUNNING = "Ollama is running"
"""What Ollama says at `/`, and apps compare with."""
PULL = python_command("-m", "appliance.hub.download")
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
    return json_response({"version": COMPATIBLE_VERSION, "penstock": RUNNING_VERSION})


async def tags(http: HttpRequest) -> Response:
    """List the served model, and the models that a request may name instead."""
    model = appliance_of(http).model
    known = {model.model_id: model.facts, **model.others, **model.text_models}
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
    texts = [
        _listed(name, facts)
        | {"size": facts.size_bytes, "size_vram": 0, "expires_at": NEVER}
        | {"context_length": facts.context_length}
        for name, facts in model.text_models.items()
    ]
    return json_response({"models": [told, *others, *texts]})


async def show(http: HttpRequest) -> Response:
    """Describe a model and what it can do."""
    appliance = appliance_of(http)
    body, model = await small_object(http), appliance.model
    asked = check(body, bodies.OllamaModelRequest)
    name = asked.name if asked.model is None else asked.model
    if name is not None and (plain := name.removesuffix(":latest")) in model.others:
        return json_response(_shown(plain, model.others[plain], None) | {"template": ""})
    if name is not None and (plain := name.removesuffix(":latest")) in model.text_models:
        return json_response(_text_model_shown(plain, model, appliance))
    check_model(name, model)
    template = appliance.tokenizer.chat_template
    told = _shown(model.model_id, model.facts, model.max_model_len)
    told |= {
        "template": "" if template is None else template.tool_source,
        "parameters": "\n".join(f"{key} {value:g}" for key, value in model.sampling.items()),
        "capabilities": _capabilities(appliance),
    }
    return json_response(told)


def _text_model_shown(name: str, model: ModelInfo, appliance: Appliance) -> Json:
    """Describe a model that makes vectors or scores."""
    encoder, facts = appliance.text_encoders[name], model.text_models[name]
    told = _shown(name, facts, encoder.max_tokens)
    if encoder.num_dimensions is not None:
        told["model_info"][f"{facts.family}.embedding_length"] = encoder.num_dimensions
    return told | {"template": "", "capabilities": [encoder.kind]}


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
        body = check(await small_object(http), bodies.OllamaPullRequest)
        model = appliance_of(http).model
        asked, is_stream = body.model or body.name or "", body.stream is not False
        plain = asked.removesuffix(":latest")
        is_beside = plain in model.text_models or model.others.get(plain) is not None
        if plain == model.model_id or is_beside:
            lines = _is_here()
        else:
            require(http, Role.OPERATOR)
            lines = self._lines(_hub_name(asked), model.model_id)
            if self._is_busy:
                raise Unavailable(
                    "another model is being pulled", code="busy", retry_after_ms=_RETRY_MS
                )
        if is_stream:
            encoded = (encode_line(line) + b"\n" async for line in lines)
            return streamed(encoded, "application/x-ndjson")
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
