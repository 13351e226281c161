"""Translate Dynamo's requests into bodies of /v1/completions."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from appliance.dynamo.served_model import ServedModel

MAX_PROMPTS = 1 << 16
"""Maximum requests with a remembered prompt length; the oldest is forgotten."""

Json = dict[str, Any]


class UnsupportedRequest(Exception):
    """The request is unsupported; the message is for the client."""


class Prompts:
    """Remember the prompt length of each request when it first came, here or at another worker.

    The worker that takes over a dead worker's request gets prompt and output as one prompt. Only
    the prompt's length tells them apart.
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
        return max(num_tokens - self._lengths.get(request_id, num_tokens), 0)


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A request body for the daemon."""

    body: Json
    num_alternatives: int | None
    """Alternatives wanted beside each token's log-probability; None: no log-probabilities."""


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
    """Build the daemon's request for a request of Dynamo's.

    Args:
        request: a PreprocessedRequest of 1.6.
        request_id: stays unchanged when the request comes again.
        num_output: the number of its token ids, at the end, that are output.

    Raises:
        UnsupportedRequest: it asks for something unsupported.
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
    """Build the required form of an answer."""
    if guided.get("structural_tag") is not None:
        raise UnsupportedRequest("`structural_tag` is not supported")
    forms = {name: guided[name] for name in _FORMS if guided.get(name) is not None}
    return {"structured_outputs": forms} if forms else {}


def _stop_ids(request: Json, stop: Json) -> list[int]:
    """Collect the token ids that end the output, besides the model's own."""
    eos = set(request.get("eos_token_ids") or ())
    hidden = (one for one in stop.get("stop_token_ids_hidden") or () if one not in eos)
    asked = (*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_visible") or ()))
    return sorted({*asked, *hidden})


def _seed_of(request_id: str) -> int:
    """Derive a request's seed from its id, so that it continues exactly elsewhere."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1
