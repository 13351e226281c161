"""Ollama's paths about models: what is served, what it can do; pulling, for operators.

Owns: /api/version, tags, show, ps and pull.
Invariant: what is not known is left out, never made up.
Never: generates; changes which model is served.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from appliance.api.appliance import Appliance
from appliance.api.authority import require
from appliance.api.infill import infill_of
from appliance.api.model_names import check_model
from appliance.api.output_format import output_format_of
from appliance.api.replies import fingerprint
from appliance.api.wire import appliance_of, json_response
from appliance.frame.protocol import iso_time
from appliance.json_fields import Fields, invalid_value
from appliance.models.names import HubName, a_model
from appliance.request import Role
from engine.errors import ConfigError, Unavailable

PULL = (sys.executable, "-P", "-m", "appliance.models.pull")
_RETRY_MS = 10_000
_BAD_GATEWAY = 502
_STATUSES = {3: 503, 4: 403, 5: 404, 78: 400}
"""What to answer, by the exit code of a pull: no hub, not for us, not there, not to be served."""

Json = dict[str, Any]


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


async def show_version(http: Request) -> Response:
    """Ours: no version of Ollama is claimed."""
    return json_response({"version": version("penstock")})


async def tags(http: Request) -> Response:
    """The model that is served, and those that a request may name instead."""
    appliance = appliance_of(http)
    others = [{"name": n, "model": n, "details": {}} for n in appliance.model.others]
    return json_response({"models": [_model(appliance), *others]})


async def running(http: Request) -> Response:
    """The one that is served."""
    appliance = appliance_of(http)
    return json_response(
        {"models": [_model(appliance) | {"context_length": appliance.model.max_model_len}]}
    )


async def show(http: Request) -> Response:
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

    async def pull(self, http: Request) -> Response:
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
