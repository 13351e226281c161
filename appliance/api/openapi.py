"""Build the OpenAPI 3.1 document from the table of operations.

Invariant: it has every route that is served and no other; a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.api.core.dialects import Dialect, dialect_of
from appliance.api.ollama.models import NOT_HERE
from appliance.api.schema_words import COUNT, STRING, Json, listing, one_of, ref, shape, whole
from appliance.api.schemas import REPLIES as OTHER_REPLIES
from appliance.api.schemas import TOKEN_ID, TOKENIZE, WHEN, replies, requests
from appliance.observe.frame.protocol import FRAME_VERSION
from appliance.observe.log.query import MAX_DIGITS, MAX_ROWS, SEVERITIES, STAGES, USAGE_BY

EVENTS, LINES, JSON = "text/event-stream", "application/x-ndjson", "application/json"
TEXT = "text/plain"
RECORDING = "application/vnd.sqlite3"

_ANYWHERE = (400, 401, 403, 431, 500)
"""What any request can be answered with."""
_WITH_BODY = (413, 503)
_GENERATING = (404, 413, 429, 503)
_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or not valid.",
    403: "The role is not enough, or the request is another's.",
    404: "It is not there.",
    409: "It stops, has one worker, or the response has no end yet.",
    413: "The body is too large.",
    429: "The queue is full; the reply says when to come back.",
    431: "The headers are too large.",
    500: "Something failed here.",
    501: "There is no such thing to do here; the reply says what does it.",
    503: "Not now; the reply says when to come back.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, as the OpenAPI document describes it."""

    name: str
    """Its operationId."""
    summary: str
    reply: Json | None
    """None: it is refused, whatever is asked."""
    body: Json | None = None
    query: Json | None = None
    """Schemas of query parameters, none of which is required."""
    streams: tuple[str, ...] = ()
    """Media types besides JSON, or instead of it where `reply` is empty."""
    errors: tuple[int, ...] = ()
    is_open: bool = False
    """No key is needed."""


_ERRORS = {
    Dialect.OPENAI: "Error",
    Dialect.ANTHROPIC: "AnthropicError",
    Dialect.OLLAMA: "OllamaError",
    Dialect.COHERE: "CohereError",
}
_LOG_QUERY = {
    "since": WHEN,
    "until": WHEN,
    "limit": whole(1, MAX_ROWS),
    "after": whole(0, 10**MAX_DIGITS - 1),
}
_STATUS = shape({"status": STRING})
_ANY_MODEL: Json = {"anyOf": [ref("Model"), ref("TextModel")]}
_CANCELLED = shape({"id": STRING, "status": {"const": "cancelled"}})


def _generates(name: str, summary: str, reply: str, body: str, media: str = EVENTS) -> Operation:
    """Describe a POST that generates, whose reply may be streamed."""
    return Operation(
        name, summary, ref(reply), body=ref(body), streams=(media,), errors=_GENERATING
    )


def _takes(name: str, summary: str, reply: str, body: Json) -> Operation:
    """Describe a POST that answers a question about a body."""
    return Operation(name, summary, ref(reply), body=body, errors=(404, *_WITH_BODY))


def _computes(name: str, summary: str, reply: str, body: str) -> Operation:
    """Describe a POST that computes vectors or scores."""
    return Operation(name, summary, ref(reply), body=ref(body), errors=_GENERATING)


def _may_be_missing(name: str, summary: str, reply: Json) -> Operation:
    """Describe what is done to one thing, named by its id."""
    return Operation(name, summary, reply, errors=(404,))


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): _generates(
        "createCompletion", "Continue prompts.", "Completion", "CompletionRequest"
    ),
    ("POST", "/v1/chat/completions"): _generates(
        "createChatCompletion", "Answer in a chat.", "ChatCompletion", "ChatRequest"
    ),
    ("POST", "/v1/responses"): _generates(
        "createResponse",
        "Answer in a chat, which may go on from an earlier response.",
        "Response",
        "ResponseRequest",
    ),
    ("POST", "/v1/responses/input_tokens"): _takes(
        "countInputTokens",
        "How long the prompt of a response would be.",
        "TokenCount",
        ref("CountedRequest"),
    ),
    ("GET", "/v1/responses/{id}"): _may_be_missing(
        "getResponse", "A response that is kept in memory.", ref("Response")
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        "deleteResponse",
        "Forget a response that has ended.",
        shape({"id": STRING, "deleted": {"const": True}}),
        errors=(404, 409),
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "listInputItems",
        "What a kept response answered to, the newest item first.",
        listing(shape({"id": STRING})),
        query={"order": one_of("asc", "desc")},
        errors=(404,),
    ),
    ("POST", "/v1/responses/{id}/cancel"): _may_be_missing(
        "cancelResponse",
        "End a response that is being written.",
        shape({"id": STRING, "object": {"const": "response"}, "status": STRING}),
    ),
    ("POST", "/v1/messages"): _generates(
        "createMessage", "Answer as Anthropic's API does.", "AnthropicReply", "MessagesRequest"
    ),
    ("POST", "/v1/messages/count_tokens"): _takes(
        "countMessageTokens",
        "How long the prompt of a message would be.",
        "TokenCount",
        ref("CountTokensRequest"),
    ),
    ("POST", "/api/chat"): _generates(
        "ollamaChat", "Answer as Ollama's API does.", "OllamaReply", "OllamaChatRequest", LINES
    ),
    ("POST", "/api/generate"): _generates(
        "ollamaGenerate",
        "Answer a prompt as Ollama's API does.",
        "OllamaReply",
        "OllamaGenerateRequest",
        LINES,
    ),
    ("GET", "/"): Operation("root", "What Ollama says at its root.", {}, streams=(TEXT,)),
    ("GET", "/api/version"): Operation(
        "ollamaVersion",
        "Return the release of Ollama that this is compatible with, and our own version.",
        shape({"version": STRING, "penstock": STRING}),
    ),
    ("GET", "/api/tags"): Operation(
        "ollamaTags", "The models that a request may name.", ref("OllamaModels")
    ),
    ("GET", "/api/ps"): Operation(
        "ollamaRunning", "The model that is served now.", ref("OllamaRunning")
    ),
    ("POST", "/api/show"): _takes(
        "ollamaShow", "What the model can do.", "OllamaModel", ref("OllamaModelRequest")
    ),
    ("POST", "/api/pull"): Operation(
        "ollamaPull",
        "Bring a model into this machine's cache; for operators.",
        shape({"status": STRING}),
        body=ref("OllamaPullRequest"),
        streams=(LINES,),
        errors=_WITH_BODY,
    ),
    **{
        (method, path): Operation(
            f"ollama{path.removeprefix('/api/').title()}", f"Not here: {hint}.", None, errors=(501,)
        )
        for (method, path), hint in NOT_HERE.items()
    },
    ("POST", "/v1/embeddings"): _computes(
        "createEmbeddings", "Make vectors of texts.", "Embeddings", "EmbeddingsRequest"
    ),
    ("POST", "/v1/rerank"): _computes(
        "rerank", "Sort documents by how well they answer a query.", "Ranking", "RerankRequest"
    ),
    ("POST", "/v2/rerank"): _computes(
        "rerankCohere",
        "Sort documents by relevance, as Cohere's API does.",
        "Ranking",
        "RerankRequest",
    ),
    ("POST", "/v1/score"): _computes(
        "score", "Score pairs of texts, as vLLM's API does.", "Scores", "ScoreRequest"
    ),
    ("POST", "/api/embed"): _computes(
        "ollamaEmbed",
        "Make vectors of texts, as Ollama's API does.",
        "OllamaVectors",
        "OllamaEmbedRequest",
    ),
    ("POST", "/api/embeddings"): _computes(
        "ollamaEmbeddings",
        "Make a vector of one text, as Ollama's older API does.",
        "OllamaVector",
        "OllamaEmbeddingsRequest",
    ),
    ("POST", "/tokenize"): _takes(
        "tokenize",
        "Turn a text, or the prompt that a chat becomes, into token ids.",
        "Tokens",
        TOKENIZE,
    ),
    ("POST", "/detokenize"): _takes(
        "detokenize", "Turn token ids into text.", "Text", ref("DetokenizeRequest")
    ),
    ("GET", "/v1/models"): Operation(
        "listModels", "The models that a request may name.", listing(_ANY_MODEL)
    ),
    ("GET", "/v1/models/{id}"): _may_be_missing(
        "getModel", "A model by its id, in which slashes may be encoded.", _ANY_MODEL
    ),
    ("GET", "/api/v0/models"): Operation(
        "lmStudioModels",
        "The models that a request may name, as LM Studio lists them.",
        listing(shape({"id": STRING, "state": STRING}, {"max_context_length": COUNT})),
    ),
    ("GET", "/props"): Operation(
        "props",
        "The longest context and the chat template, as llama.cpp's server tells them.",
        shape({"default_generation_settings": shape({"n_ctx": COUNT}), "chat_template": STRING}),
    ),
    ("GET", "/health"): Operation(
        "health", "Whether the daemon answers.", shape({"status": {"const": "ok"}}), is_open=True
    ),
    ("GET", "/ready"): Operation(
        "ready",
        "Whether new work would be accepted.",
        shape({"status": {"enum": ["ready", "degraded"]}}, {"reason": STRING}),
        errors=(503,),
    ),
    ("GET", "/version"): Operation(
        "version",
        "What is running.",
        shape({"version": STRING, "frame_version": {"const": FRAME_VERSION}}),
    ),
    ("GET", "/openapi.json"): Operation(
        "openapi", "This document.", shape({"openapi": STRING, "paths": {"type": "object"}})
    ),
    ("GET", "/metrics"): Operation(
        "metrics", "What Prometheus scrapes, also under vLLM's names.", {}, streams=(TEXT,)
    ),
    ("GET", "/v1/requests"): Operation(
        "listRequests",
        "Live requests, then the last finished ones.",
        listing(ref("RequestFrame")),
        query={"limit": whole(1, MAX_ROWS)},
    ),
    ("GET", "/v1/requests/{id}"): Operation(
        "getRequest", "One request, live or from the log.", ref("RequestFrame"), errors=(404, 503)
    ),
    ("DELETE", "/v1/requests/{id}"): _may_be_missing(
        "deleteRequest", "End a live request, as its owner or an operator.", _CANCELLED
    ),
    ("POST", "/v1/requests/{id}/cancel"): _may_be_missing(
        "cancelRequest", "End a live request, as its owner or an operator.", _CANCELLED
    ),
    ("GET", "/v1/penstock/state"): Operation("state", "Show the present state.", ref("Frame")),
    ("GET", "/v1/penstock/cache"): Operation(
        "cache",
        "What the prefix cache holds by tokens, and each change of that; for operators.",
        {},
        streams=(LINES,),
        errors=(403, 409),
    ),
    ("GET", "/v1/penstock/stream"): Operation(
        "stream",
        "A frame now, and each new one: as lines, or as events if those are accepted.",
        {},
        streams=(LINES, EVENTS),
    ),
    ("GET", "/v1/penstock/whoami"): Operation(
        "whoami", "Tell clients their name and role.", ref("Peer")
    ),
    ("POST", "/v1/penstock/drain"): Operation("drain", "Take no new work; for operators.", _STATUS),
    ("POST", "/v1/penstock/resume"): Operation(
        "resume", "Take work again; for operators.", _STATUS, errors=(409,)
    ),
    ("GET", "/v1/penstock/measure"): Operation(
        "measurement", "How far the model's profile is.", ref("Measurement")
    ),
    ("POST", "/v1/penstock/measure"): Operation(
        "measure", "Measure what the profile lacks, while idle; for operators.", ref("Measurement")
    ),
    ("POST", "/v1/penstock/roles"): Operation(
        "switchRoles",
        "Change what the workers are for, or the targets of elastic roles; for operators.",
        ref("Roles"),
        body=ref("RolesRequest"),
        errors=(409, *_WITH_BODY),
    ),
    ("GET", "/v1/penstock/log"): Operation(
        "log",
        "Finished requests, newest first; after a cursor, oldest first.",
        listing(ref("LogRow")),
        query={
            **_LOG_QUERY,
            "user": STRING,
            "errors": one_of("false", "true", "0", "1"),
            "slow": {
                "type": "string",
                "pattern": rf"^({'|'.join(STAGES)})[<>][0-9]{{1,12}}(ms|s)?$",
                "examples": ["ttft>500"],
            },
        },
        errors=(503,),
    ),
    ("GET", "/v1/penstock/events"): Operation(
        "events",
        "What operators should know, newest first; after a cursor, oldest first.",
        listing(ref("LogEvent")),
        query={**_LOG_QUERY, "severity": one_of(*SEVERITIES)},
        errors=(503,),
    ),
    ("GET", "/v1/penstock/usage"): Operation(
        "usage",
        "Requests, errors, tokens and time by user, model or day.",
        listing(ref("Usage")),
        query={"by": one_of(*USAGE_BY), "since": WHEN, "until": WHEN},
        errors=(503,),
    ),
    ("GET", "/v1/penstock/recording"): Operation(
        "recording",
        "Frames, requests and events of a span, as an SQLite file.",
        {},
        query={"since": WHEN, "until": WHEN},
        streams=(RECORDING,),
        errors=(404, 503),
    ),
}
"""HEAD is as GET without its body, and OPTIONS tells the methods, everywhere."""


def document(version: str, *, needs_key: bool, vocab_size: int | None = None) -> Json:
    """Build the OpenAPI 3.1 document of all operations.

    Args:
        needs_key: as on TCP; on the Unix socket the kernel identifies the client.
        vocab_size: of the model that is served; None: no model is loaded yet.
    """
    token_id = COUNT if vocab_size is None else whole(0, vocab_size - 1)
    paths: dict[str, Json] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _described(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {**requests(), TOKEN_ID: token_id, **replies(), **OTHER_REPLIES},
            "headers": {
                "RequestId": {"description": "The request's id, as in the log.", "schema": STRING}
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if needs_key else [],
    }


def _described(operation: Operation, path: str) -> Json:
    error = _ERRORS[dialect_of(path)]
    replies = {JSON: {"schema": operation.reply}} if operation.reply else {}
    replies |= {media_type: {} for media_type in operation.streams}
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": ({} if operation.reply is None else {"200": _response("It is done.", replies)})
        | {
            str(status): _response(_REASONS[status], {JSON: {"schema": ref(error)}})
            for status in sorted({*_ANYWHERE, *operation.errors})
        },
    }
    parameters = [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in (operation.query or {}).items()
    ]
    if "{id}" in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": STRING})
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": operation.body}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        described["security"] = []
    return described


def _response(description: str, content: Json) -> Json:
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    return {"description": description, "headers": headers, "content": content}
