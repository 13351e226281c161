"""The daemon as Dynamo's adapter sees it: its card, requests as completions, tokens back.

Owns: how Dynamo's words become the daemon's, and which of its fields cannot be done; the one
connection of each request; which ends are answers, which are the client's fault, and which another
worker can make good.
Invariant: whatever goes wrong on the way is a LostError; hanging up makes the daemon cancel.
Never: tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import h11
import msgspec

from appliance.api.tool_format import FORMATS, THOUGHTS, output_format_of
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

# What Dynamo asks and is told of: a daemon's card, and its requests as bodies of /v1/completions.
# Invariant: a request that comes again after a death goes on exactly: its seed, penalties, minimum
# and grammar follow all of the output, however much of that stands in its prompt by now.
# Never: guesses: what would change the answer and is not done here is refused by name.


# What a daemon serves, as its adapter tells Dynamo.
# Invariant: two that are equal need one registration.
# Never: asks the daemon.


TOOL_PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "llama": "llama3_json",
    "pythonic": "pythonic",
    "harmony": "harmony",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "glm": "glm45",
    "gemma": "gemma4",
}
"""Our formats of tool calls, by the names of Dynamo's parsers; others it has none for."""
REASONING_PARSERS = {
    "think": "qwen3",
    "mistral": "mistral",
    "gemma": "gemma4",
    "granite": "granite",
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and how a daemon serves it."""

    model_id: str
    folder: Path
    """With its config.json, tokenizer and chat template, which the frontend reads."""
    max_model_len: int
    block_size: int
    num_blocks: int
    """Of all pools together."""
    tool_parser: str | None = None
    """Dynamo's names; None: the model writes no calls that it could read."""
    reasoning_parser: str | None = None


def served_model(models: dict[str, Any], frame: dict[str, Any]) -> ServedModel:
    """Read /v1/models and a frame.

    Raises:
        ConfigError: the model is of a kind that Dynamo's frontend cannot read.
    """
    model = models["data"][0]
    folder = Path(model["root"])
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            "Dynamo's frontend needs a folder with tokenizer.json and config.json",
            where=str(folder),
            hint="serve the model as safetensors in Hugging Face's form instead of a GGUF file",
        )
    pools = [pool for pool in frame["pools"] if pool["name"] != "ring"]
    tools, reasoning = _parsers(folder, model["tool_parser"], model["reasoning_parser"])
    return ServedModel(
        model_id=model["id"],
        folder=folder,
        max_model_len=model["max_model_len"],
        block_size=pools[0]["block_size"],
        num_blocks=sum(pool["num_blocks"] for pool in pools),
        tool_parser=tools,
        reasoning_parser=reasoning,
    )


def used_blocks(frame: dict[str, Any]) -> int:
    """Blocks that new work cannot have."""
    pools = [pool for pool in frame["pools"] if pool["name"] != "ring"]
    return sum(pool["num_blocks"] - pool["free"] - pool["cached"] for pool in pools)


def _parsers(folder: Path, tools: str, reasoning: str) -> tuple[str | None, str | None]:
    """Dynamo's names for how the model writes calls and reasoning."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.chat_template is None:
        return None, None
    found = output_format_of(tokenizer, tools, reasoning)
    tool = next((name for name, one in FORMATS.items() if one is found.tools), None)
    thought = next((name for name, one in THOUGHTS.items() if one is found.thoughts), None)
    if tool == "harmony":
        return "harmony", "gpt_oss"
    return TOOL_PARSERS.get(tool or ""), REASONING_PARSERS.get(thought or "")


# --------------------------------------------------------------------------------------------------


MAX_PROMPTS = 1 << 16
"""Requests of which is kept how long their prompts are; of the oldest it is forgotten."""

Json = dict[str, Any]


class UnsupportedRequest(Exception):
    """What was asked cannot be done; the message is for the client."""


class Prompts:
    """How long the prompt of each request was when it first came, here or at another worker.

    Whoever takes a dead worker's request gets prompt and output as one prompt: only who knows the
    prompt's length can tell them apart.
    """

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def came(self, request_id: str, num_tokens: int) -> bool:
        """Note a request; True if it is new."""
        is_new = request_id not in self._lengths
        self._lengths.setdefault(request_id, num_tokens)
        while len(self._lengths) > MAX_PROMPTS:
            self._lengths.popitem(last=False)
        return is_new

    def num_output(self, request_id: str, num_tokens: int) -> int:
        """How many of so many tokens are output already."""
        return max(num_tokens - self._lengths.get(request_id, num_tokens), 0)


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A body for the daemon."""

    body: Json
    num_alternatives: int | None
    """Log-probabilities that are wanted beside each token's own; None: not even that."""


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
}
_SAME = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_FORMS = ("json", "regex", "choice", "grammar")


def completion_body(
    request: Json, request_id: str, num_output: int, served: ServedModel
) -> CompletionBody:
    """The body for a request of Dynamo's.

    Args:
        request: a PreprocessedRequest of 1.6.
        request_id: the same when it comes again.
        num_output: of its token ids, how many at the end are output.
        served: what the daemon serves.

    Raises:
        Refused: it asks for what is not done here.
    """
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    options, routing = request.get("output_options") or {}, request.get("routing") or {}
    token_ids = request["token_ids"]
    _check(request, sampling, options, routing)
    max_tokens = stop.get("max_tokens")
    room = served.max_model_len - len(token_ids)
    if room < 1:
        what = f"the model's context is {served.max_model_len} tokens"
        raise UnsupportedRequest(f"{what}, and the prompt has {len(token_ids)}")
    body: Json = {
        "model": served.model_id,
        "prompt": token_ids,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "max_tokens": room if max_tokens is None else min(max_tokens, room),
        "seed": _seed_of(request_id) if sampling.get("seed") is None else sampling["seed"],
        **{name: sampling[name] for name in _SAME if sampling.get(name) is not None},
        **_constraint(sampling.get("guided_decoding") or {}),
    }
    if num_output:
        body["output_offset"] = num_output
    if stop.get("min_tokens"):  # of which Dynamo takes off what has come
        body["min_tokens"] = stop["min_tokens"] + num_output
    if stop.get("ignore_eos"):
        body["ignore_eos"] = True
    if ids := _stop_ids(request, stop):
        body["stop_token_ids"] = ids
    if salt := routing.get("cache_salt"):
        body["cache_salt"] = salt
    num_alternatives = options.get("logprobs")
    if num_alternatives is not None:
        body |= {"logprobs": num_alternatives, "return_tokens_as_token_ids": True}
    return CompletionBody(body, num_alternatives)


def _check(request: Json, sampling: Json, options: Json, routing: Json) -> None:
    for name, values in _NEUTRAL.items():
        if sampling.get(name) not in values:
            raise UnsupportedRequest(f"`{name}` is not supported")
    if options.get("prompt_logprobs") is not None:
        raise UnsupportedRequest("`prompt_logprobs` are not supported in a stream")
    if routing.get("lora_name"):
        raise UnsupportedRequest("there are no adapters (LoRA) here")
    if request.get("multi_modal_data"):
        raise UnsupportedRequest("the model takes text only")


def _constraint(guided: Json) -> Json:
    """The form that an answer must have."""
    if guided.get("structural_tag") is not None:
        raise UnsupportedRequest("`structural_tag` is not supported")
    forms = {name: guided[name] for name in _FORMS if guided.get(name) is not None}
    return {"structured_outputs": forms} if forms else {}


def _stop_ids(request: Json, stop: Json) -> list[int]:
    """Those that end the output beside the model's own ends."""
    eos = set(request.get("eos_token_ids") or ())
    hidden = (one for one in stop.get("stop_token_ids_hidden") or () if one not in eos)
    asked = (*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_visible") or ()))
    return sorted({*asked, *hidden})


def _seed_of(request_id: str) -> int:
    """Of a request without a seed: another for each, and the same wherever it goes on."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1


# --------------------------------------------------------------------------------------------------


# What the daemon streams, as Dynamo reads it: outputs of token ids, and how they end.
# Invariant: every token id that came is told once, in order.
# Never: reads a socket.


_DATA = b"data:"
_DONE = b"[DONE]"
_PREFIX = "token_id:"
_ENDS = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": "cancelled"}


class LostError(Exception):
    """The daemon cannot go on with this; another worker can."""


def output_of(line: bytes) -> Json | None:
    """The output in a line of the stream; None: it has none.

    Raises:
        Refused: the daemon found that what was asked cannot be done.
        LostError: the daemon failed, or ends.
    """
    if not line.startswith(_DATA):
        return None
    data = line[len(_DATA) :].strip()
    if not data or data == _DONE:
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise_error(event["error"])
    output: Json = {}
    if usage := event.get("usage"):
        output["completion_usage"] = usage
    for choice in event["choices"]:
        output["token_ids"] = choice.get("token_ids") or []
        if choice.get("logprobs"):
            output |= _logprobs(choice["logprobs"])
        if reason := choice.get("finish_reason"):
            output["finish_reason"] = _ENDS.get(reason, "stop")
    return output or None


def raise_error(error: Json) -> None:
    """What an error object of the daemon's means for whoever asked.

    Raises:
        Refused: the client can mend it.
        LostError: nobody but another worker can.
    """
    message = str(error.get("message") or "the daemon failed")
    if error.get("type") in ("invalid_request_error", "not_found_error"):
        raise UnsupportedRequest(message)
    raise LostError(message)


def _logprobs(columns: Json) -> Json:
    """Each token's own, and those of the likeliest at its place, the likeliest first."""
    told: Json = {"log_probs": columns["token_logprobs"]}
    if any(columns.get("top_logprobs") or ()):
        told["top_logprobs"] = [_ranked(place or {}) for place in columns["top_logprobs"]]
    return told


def _ranked(place: dict[str, float]) -> list[Json]:
    ordered = sorted(place.items(), key=lambda one: -one[1])
    return [
        {
            "rank": rank,
            "token_id": int(key.removeprefix(_PREFIX)),
            "token": key,
            "logprob": logprob,
        }
        for rank, (key, logprob) in enumerate(ordered, 1)
    ]


# --------------------------------------------------------------------------------------------------


_READ_BYTES = 1 << 16
CONNECT_S = 5.0


class DaemonExchange:
    """One exchange; use it as a context manager.

    Args:
        socket: of the daemon.
        silence_s: of a reply that is more than that is taken for a death; None: it may wait.
    """

    def __init__(self, socket: Path, silence_s: float | None = None) -> None:
        self._socket = socket
        self._silence_s = silence_s
        self._parser = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_hung_up = False
        self.status = 0

    async def __aenter__(self) -> DaemonExchange:
        """Connect."""
        try:
            async with asyncio.timeout(CONNECT_S):
                opened = await asyncio.open_unix_connection(str(self._socket))
        except (OSError, TimeoutError) as error:
            raise LostError(f"no daemon answers on {self._socket}") from error
        self._reader, self._writer = opened
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hang up."""
        self.hang_up()

    def hang_up(self) -> None:
        """End it now; whoever reads it gets a LostError."""
        self._is_hung_up = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def ask(self, method: str, target: str, body: object = None) -> None:
        """Send a request and read the head of the reply into `status`."""
        assert self._writer is not None
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [("host", "localhost"), ("content-length", str(len(content)))]
        headers += [("content-type", "application/json"), ("connection", "close")]
        request = h11.Request(method=method, target=target, headers=headers)
        for part in (request, h11.Data(data=content), h11.EndOfMessage()):
            self._writer.write(self._parser.send(part) or b"")
        while not isinstance(event := await self._next_event(), h11.Response):
            if isinstance(event, h11.ConnectionClosed | h11.EndOfMessage):
                raise LostError("the daemon closed the connection without an answer")
        self.status = event.status_code

    async def lines(self) -> AsyncIterator[bytes]:
        """The reply's body, line by line as they come, without empty ones."""
        rest = b""
        while isinstance(event := await self._next_event(), h11.Data):
            *lines, rest = (rest + bytes(event.data)).split(b"\n")
            for line in lines:
                if line:
                    yield line
        if rest:
            yield rest

    async def body(self) -> Any:
        """Read the whole reply, decoded."""
        return msgspec.json.decode(b"\n".join([line async for line in self.lines()]) or b"null")

    async def _next_event(self) -> h11.Event:
        assert self._reader is not None
        try:
            while (event := self._parser.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(self._silence_s):
                    data = await self._reader.read(_READ_BYTES)
                if self._is_hung_up:
                    raise LostError("hung up")
                self._parser.receive_data(data)
        except (OSError, TimeoutError) as error:
            raise LostError("the daemon is silent or gone") from error
        except h11.RemoteProtocolError as error:  # an end inside a reply
            raise LostError("the daemon went away") from error
        if isinstance(event, h11.ConnectionClosed):
            raise LostError("the daemon went away")
        if not isinstance(event, h11.Event):
            raise LostError("this is not the daemon")
        return event


async def get(socket: Path, target: str, silence_s: float = 10.0) -> Any:
    """GET one answer of the daemon's, decoded.

    Raises:
        LostError: there is none, or it is a refusal.
    """
    with contextlib.suppress(msgspec.DecodeError):
        async with DaemonExchange(socket, silence_s) as line:
            await line.ask("GET", target)
            body = await line.body()
            if line.status == 200:
                return body
            error = body.get("error", {}) if isinstance(body, dict) else {}
            raise LostError(error.get("message") or f"the daemon answers {line.status}")
    raise LostError("the daemon's answer cannot be read")
