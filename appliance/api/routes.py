"""List every route of the HTTP API, and refuse bad requests before parsing.

Invariant: every route is in the document of openapi, and nothing else is.
"""

from __future__ import annotations

import contextlib
import functools

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.core.appliance import Appliance
from appliance.api.core.body_threads import BodyThreads
from appliance.api.core.model_choice import model_not_found
from appliance.api.core.wire import RUNNING_VERSION, appliance_of, json_response, peer_of
from appliance.api.edge import ApiApplication
from appliance.api.generation import generating_routes
from appliance.api.ollama.models import ollama_routes
from appliance.api.openai.replies import model_object, other_model_object, text_model_object
from appliance.api.openapi import document
from appliance.api.operator.cache import cache_routes, metrics
from appliance.api.operator.handlers import control_routes, log_routes, switch_roles
from appliance.api.responses.store import ResponseStore, memory_routes
from appliance.api.text_requests import text_routes
from appliance.api.tokenize import tokenize_routes
from appliance.observe.frame.protocol import FRAME_VERSION
from engine.errors import Unavailable


def build_app(appliance: Appliance) -> ApiApplication:
    """Build the ASGI application in front of an appliance."""
    edge = ApiApplication(
        appliance,
        [
            *generating_routes(),
            *memory_routes(),
            *tokenize_routes(),
            *text_routes(),
            *ollama_routes(),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/api/v0/models", lm_studio_models),
            Route("/props", props),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", show_version),
            Route("/openapi.json", openapi),
            Route("/metrics", metrics),
            *control_routes(),
            *cache_routes(),
            Route("/v1/penstock/roles", switch_roles, methods=["POST"]),
            *log_routes(),
        ],
    )
    edge.state.body_threads = BodyThreads()
    edge.state.responses = ResponseStore()
    return edge


async def models(http: Request) -> Response:
    """List the served model, and the models that a request may name instead."""
    appliance = appliance_of(http)
    served = appliance.model
    listed = [model_object(served)]
    listed += [
        other_model_object(name, is_loaded=_is_resident(appliance, name)) for name in served.others
    ]
    listed += [text_model_object(one, served) for one in appliance.text_encoders.values()]
    return json_response({"object": "list", "data": listed})


async def lm_studio_models(http: Request) -> Response:
    """Answer LM Studio's clients, which look for the state and the longest context."""
    appliance = appliance_of(http)
    served = appliance.model
    names = [served.model_id, *served.others]
    listed = [
        {"id": name, "object": "model", "type": "llm", "publisher": "penstock", "state": state}
        | ({"max_context_length": served.max_model_len} if name == served.model_id else {})
        for name in names
        for state in (
            "loaded" if name == served.model_id or _is_resident(appliance, name) else "not-loaded",
        )
    ]
    listed += [
        {
            "id": one.name,
            "object": "model",
            "type": {"embedding": "embeddings", "rerank": "rerank"}[one.kind],
            "publisher": "penstock",
            "state": "loaded",
            "max_context_length": one.max_tokens,
        }
        for one in appliance.text_encoders.values()
    ]
    return json_response({"object": "list", "data": listed})


async def props(http: Request) -> Response:
    """Answer llama.cpp's clients, which look for the context and the chat template."""
    appliance = appliance_of(http)
    template = appliance.tokenizer.chat_template
    return json_response(
        {
            "default_generation_settings": {"n_ctx": appliance.model.max_model_len},
            "model_alias": appliance.model.model_id,
            "chat_template": "" if template is None else template.tool_source,
        }
    )


def _is_resident(appliance: Appliance, name: str) -> bool:
    """Say whether a model that is not served is loaded."""
    return appliance.swaps is not None and appliance.swaps.is_resident(name)


async def model(http: Request) -> Response:
    """Return a model by its id, which may contain slashes."""
    appliance, asked = appliance_of(http), http.path_params["id"]
    served = appliance.model
    if asked in served.others:
        return json_response(other_model_object(asked, is_loaded=_is_resident(appliance, asked)))
    if (encoder := appliance.text_encoders.get(asked.removesuffix(":latest"))) is not None:
        return json_response(text_model_object(encoder, served))
    if not served.is_called(asked):
        raise model_not_found(asked, served)
    return json_response(model_object(served))


async def health(http: Request) -> Response:
    """Answer liveness: the loop runs."""
    return json_response({"status": "ok"})


async def ready(http: Request) -> Response:
    """Answer readiness: a completion asked for now would be accepted."""
    reason = appliance_of(http).not_ready_reason()
    if reason is not None:
        raise Unavailable(reason, code="not_ready")
    if (reason := appliance_of(http).degraded_reason()) is not None:
        return json_response({"status": "degraded", "reason": reason})
    return json_response({"status": "ready"})


async def show_version(http: Request) -> Response:
    """Return what is running, and its version of frames."""
    return json_response({"version": RUNNING_VERSION, "frame_version": FRAME_VERSION})


async def openapi(http: Request) -> Response:
    """Return what this server can be asked, as an OpenAPI document."""
    needs_key, vocab_size = peer_of(http).key is not None, None
    with contextlib.suppress(Unavailable):  # while a model is fetched
        vocab_size = appliance_of(http).tokenizer.vocab_size
    return Response(_encoded(needs_key, vocab_size), media_type="application/json")


@functools.lru_cache(maxsize=4)
def _encoded(needs_key: bool, vocab_size: int | None) -> bytes:
    """Encode the document once: it takes 20 ms of the loop."""
    told = document(RUNNING_VERSION, needs_key=needs_key, vocab_size=vocab_size)
    return bytes(json_response(told).body)
