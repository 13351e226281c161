"""The HTTP surface: one table of routes.

Owns: paths, and the handlers of what is asked about the appliance itself.
Invariant: every route is in the document of openapi, and nothing else is.
Never: decides about requests; it asks the Appliance.
"""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.admission import AdmissionTurns
from appliance.api.appliance import Appliance
from appliance.api.authority import peer_of
from appliance.api.cache import cache_routes
from appliance.api.control import control_routes, switch_roles
from appliance.api.early_refusals import EarlyRefusals
from appliance.api.endpoints import ENDPOINTS, generating_routes
from appliance.api.every_route import Edge
from appliance.api.log import log_routes
from appliance.api.metrics import metrics
from appliance.api.model_names import model_not_found
from appliance.api.ollama_routes import ollama_routes
from appliance.api.openapi import document
from appliance.api.replies import model_object, other_model_object
from appliance.api.response_memory import ResponseStore, memory_routes
from appliance.api.tokenize import tokenize_routes
from appliance.api.wire import appliance_of, json_response
from appliance.frame.protocol import FRAME_VERSION
from engine.errors import Unavailable


def build_app(appliance: Appliance) -> Edge:
    """The ASGI application in front of an appliance."""
    edge = Edge(
        appliance,
        [
            *generating_routes(),
            *memory_routes(),
            *tokenize_routes(),
            *ollama_routes(),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
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
    edge.state.early = EarlyRefusals(appliance, ENDPOINTS, edge.state.http_counts)
    edge.state.turns = AdmissionTurns()
    edge.state.responses = ResponseStore()
    return edge


async def models(http: Request) -> Response:
    """The model that is served, and those that a request may name instead."""
    served = appliance_of(http).model
    listed = [model_object(served), *map(other_model_object, served.others)]
    return json_response({"object": "list", "data": listed})


async def model(http: Request) -> Response:
    """A model by its id, which may contain slashes."""
    served, asked = appliance_of(http).model, http.path_params["id"]
    if asked in served.others:
        return json_response(other_model_object(asked))
    if not served.is_called(asked):
        raise model_not_found(asked, served)
    return json_response(model_object(served))


async def health(http: Request) -> Response:
    """Liveness: the loop answers."""
    return json_response({"status": "ok"})


async def ready(http: Request) -> Response:
    """Readiness: a completion asked for now would be accepted."""
    reason = appliance_of(http).not_ready_reason()
    if reason is not None:
        raise Unavailable(reason, code="not_ready")
    if (reason := appliance_of(http).degraded_reason()) is not None:
        return json_response({"status": "degraded", "reason": reason})
    return json_response({"status": "ready"})


async def show_version(http: Request) -> Response:
    """What is running, and the frames that it speaks."""
    return json_response({"version": version("penstock"), "frame_version": FRAME_VERSION})


async def openapi(http: Request) -> Response:
    """What this server can be asked, as an OpenAPI document."""
    needs_key = peer_of(http).key is not None
    return json_response(document(version("penstock"), needs_key=needs_key))
