"""Write OpenAI's replies: completions, chats, chunks, log-probabilities, errors.

Invariant: a streamed reply's chunks add up to the whole reply.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.api.core.ask import Ask
from appliance.api.core.stream import Delta
from appliance.api.core.wire import error_object
from appliance.api.formats.text_reading import CallDelta
from appliance.api.openai.logprobs import Json, chat_logprobs, completion_logprobs, prompt_logprobs
from appliance.daemon.requests.request import ModelInfo, Request
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.json.lines import encode_line
from appliance.observe.frame.protocol import iso_time
from engine.errors import RequestError
from engine.scheduler.sequences.sequence import Sequence
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from engine.wire.not_json import NOT_JSON

EVENTS = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_PLACE = "\x00"
"""Stands for a text to find its surroundings."""


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """The shape of one request's reply: whole, or as server-sent events."""

    ask: Ask
    request: Request
    tokenizer: Tokenizer
    created: int
    """Unix seconds."""
    fingerprint: str
    media_type: str = EVENTS
    _num_reasoning: dict[int, int] = field(default_factory=dict)
    """Tokens of reasoning, by choice."""
    _held: dict[int, dict[int, CallDelta]] = field(default_factory=dict)
    """Calls that are told at the end, by choice and number."""
    _around: dict[int, tuple[bytes, bytes] | None] = field(default_factory=dict)
    """Text around the next piece of each choice, for events of text alone.

    None: its events tell more."""

    def whole(self, deltas: Iterable[Delta]) -> Json:
        written = list(deltas)
        for delta in written:
            self._num_reasoning[delta.sequence.index] = delta.num_reasoning_tokens
        told = self._best(written)
        choices = [self._choice(delta) | {"index": index} for index, delta in enumerate(told)]
        for choice, delta in zip(choices, told, strict=True):
            if self.ask.is_chat:
                choice["message"] = self._in_its_form(_message(delta))
            else:
                choice["text"] = delta.text
            if self.ask.return_token_ids:
                choice["prompt_token_ids"] = delta.sequence.prompt_token_ids
        reply = self._object("chat.completion", choices) | {"usage": self._usage()}
        if self.ask.return_token_ids and self.ask.is_chat:
            reply["prompt_token_ids"] = told[0].sequence.prompt_token_ids
        if self.ask.prompt_logprobs is not None:
            of_prompts = [
                prompt_logprobs(self.tokenizer, one.sequence, self.ask.prompt_logprobs)
                for one in told
            ]
            if self.ask.is_chat:
                reply["prompt_logprobs"] = of_prompts[0]
            else:
                for choice, one in zip(choices, of_prompts, strict=True):
                    choice["prompt_logprobs"] = one
        return reply

    def _best(self, deltas: list[Delta]) -> list[Delta]:
        """Choose the answers to return: the likeliest by token per prompt, where not all are."""
        if self.ask.num_best is None:
            return deltas
        size = self.ask.num_choices
        groups = [deltas[start : start + size] for start in range(0, len(deltas), size)]
        ranked = [sorted(one, key=_mean_logprob, reverse=True) for one in groups]
        return [delta for one in ranked for delta in one[: self.ask.num_best]]

    def opening(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        """Write a delta for a stream; nothing while its text is held back."""
        self._num_reasoning[delta.sequence.index] = delta.num_reasoning_tokens
        if self._custom:
            self._hold_texts(delta)
        is_told = delta.text or delta.reasoning or delta.calls
        has_news = is_told or delta.finish_reason or self.ask.wants_tokens
        if not has_news:
            return b""
        index = delta.sequence.index
        around = self._around.get(index)
        is_plain = not delta.calls and not delta.reasoning and delta.finish_reason is None
        if around and delta.text and is_plain:
            return around[0] + encode_line(delta.text) + around[1]
        is_first = index not in self._around
        if is_first:
            self._around[index] = self._plain_event(delta.sequence)
        parts = delta.apart(tells_tokens=self.ask.wants_tokens)
        role = event(self._role_chunk(delta.sequence)) if is_first and self.ask.is_chat else b""
        return role + b"".join(event(self._delta_chunk(one, is_first)) for one in parts)

    def closing(self) -> bytes:
        if not self.ask.include_usage:
            return _DONE
        return event(self._object("chat.completion.chunk", []) | {"usage": self._usage()}) + _DONE

    def alive(self, place: int | None) -> bytes:
        """Keep a stream alive with a comment, which clients skip."""
        return keep_alive(place)

    def failure(self, error: RequestError) -> bytes:
        """End a stream that failed: its status has been sent."""
        return event(error_object(error)) + _DONE

    def _plain_event(self, sequence: Sequence) -> tuple[bytes, bytes] | None:
        if self.ask.wants_tokens or self.ask.has_running_usage:
            return None
        whole = event(self._delta_chunk(Delta(sequence, text=_PLACE), is_first=False))
        before, _, after = whole.rpartition(msgspec.json.encode(_PLACE))
        return before, after

    def _delta_chunk(self, delta: Delta, is_first: bool) -> Json:
        choice = self._choice(delta)
        if self.ask.is_chat:
            choice["delta"] = self._in_its_form(_chat_delta(delta))
        else:
            choice["text"] = delta.text
        if self.ask.return_token_ids and is_first:
            choice["prompt_token_ids"] = delta.sequence.prompt_token_ids
        return self._chunk(choice, delta.sequence, delta.num_tokens)

    def _role_chunk(self, sequence: Sequence) -> Json:
        """Begin a chat's stream, without content if there are calls."""
        delta = {"role": "assistant", "content": None if self.ask.tools else ""}
        choice: Json = {"index": sequence.index, "delta": delta, "finish_reason": None}
        chunk = self._chunk(choice | {"logprobs": None}, sequence, 0)
        if self.ask.return_token_ids:
            chunk["prompt_token_ids"] = sequence.prompt_token_ids
        return chunk

    def _chunk(self, choice: Json, sequence: Sequence, num_tokens: int) -> Json:
        chunk = self._object("chat.completion.chunk", [choice])
        if self.ask.has_running_usage:
            num_cached = None if sequence.prefix is None else sequence.num_cached_tokens
            return chunk | {"usage": usage(sequence.num_prompt_tokens, num_tokens, num_cached)}
        # Asked for usage, clients find the key in every chunk, null until the last.
        return chunk | {"usage": None} if self.ask.include_usage else chunk

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.request.request_id,
            "object": kind if self.ask.is_chat else "text_completion",
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _choice(self, delta: Delta) -> Json:
        has_called = delta.has_called and delta.finish_reason is FinishReason.STOP
        called = "function_call" if self._is_legacy else "tool_calls"
        choice: Json = {
            "index": delta.sequence.index,
            "finish_reason": called if has_called else delta.finish_reason,
            "logprobs": self._logprobs(delta),
        }
        if self.ask.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    @property
    def _custom(self) -> set[str]:
        """Names of tools that take a text."""
        origins = self.ask.tools.origins if self.ask.tools else {}
        return {name for name, one in origins.items() if one.is_custom}

    def _hold_texts(self, delta: Delta) -> None:
        """Hold back calls of tools that take a text, which stands within JSON, until the end."""
        held = self._held.setdefault(delta.sequence.index, {})
        told = []
        for call in delta.calls:
            if call.name in self._custom:
                held[call.index] = dataclasses.replace(call)
            elif call.index in held:
                held[call.index].arguments += call.arguments
            else:
                told.append(call)
        delta.calls = [*told, *held.values()] if delta.finish_reason else told

    @property
    def _is_legacy(self) -> bool:
        return self.ask.tools is not None and self.ask.tools.is_legacy

    def _in_its_form(self, said: dict[str, Any]) -> Json:
        """Tell a call as `function_call` to a client that asked with `functions`, a text as one."""
        for call in said.get("tool_calls", ()):
            if call.get("function", {}).get("name") in self._custom:
                function = call.pop("function")
                text = input_of(function["arguments"])
                call |= {"type": "custom", "custom": {"name": function["name"], "input": text}}
        if self._is_legacy and (calls := said.pop("tool_calls", None)):
            said["function_call"] = calls[0]["function"]
        return said

    def _logprobs(self, delta: Delta) -> Json | None:
        if self.ask.logprobs is None or not (delta.token_ids or delta.echo):
            return None
        if self.ask.is_chat:
            return chat_logprobs(self.tokenizer, delta)
        by_ids = self.ask.returns_tokens_as_ids
        return completion_logprobs(self.tokenizer, delta, self.ask.logprobs, by_ids=by_ids)

    def _usage(self) -> Json:
        """Count tokens; each prompt counts once, also where it has several choices."""
        sequences = self.request.sequences
        num_output = sum(sequence.num_output_tokens for sequence in sequences)
        used = usage(
            self.request.prompt_tokens,
            0 if self.ask.max_tokens == 0 else num_output,
            self.request.cached_tokens,
        )
        details = {}
        if num_reasoning := sum(self._num_reasoning.values()):
            details["reasoning_tokens"] = num_reasoning
        if self.ask.prediction is not None:
            guessed, right = self.request.drafts.of("prediction")
            details["accepted_prediction_tokens"] = right
            details["rejected_prediction_tokens"] = guessed - right
        if details:
            used["completion_tokens_details"] = details
        if missed := self.request.miss_usage:
            cached = {"cached_tokens": self.request.cached_tokens}
            used["prompt_tokens_details"] = cached | missed | self._parting_texts()
        return used | self.request.cut_usage

    def _parting_texts(self) -> Json:
        """Show where the prompt parts from an earlier one of the same owner and salt."""
        missed = self.request.sequences[0].cache_miss
        if missed is None or not missed.earlier_ids:
            return {}
        texts = {"prompt": missed.prompt_ids, "earlier": missed.earlier_ids}
        told = {name: self.tokenizer.decode(ids, False) for name, ids in texts.items()}
        return {"cache_miss_texts": told}


def _mean_logprob(delta: Delta) -> float:
    """Compute how likely an answer is by token, so that long ones do not lose."""
    entries = delta.logprobs
    return sum(one.logprob for one in entries) / len(entries) if entries else -math.inf


def _message(delta: Delta) -> dict[str, Any]:
    message: Json = {
        "role": "assistant",
        "content": None if delta.calls and not delta.text else delta.text,
        "refusal": None,
    }
    message |= _reasoning(delta)
    if delta.calls:
        message["tool_calls"] = [_call(call) for call in delta.calls]
    return message


def _chat_delta(delta: Delta) -> dict[str, Any]:
    said: Json = _reasoning(delta)
    if delta.text or (delta.token_ids and not (said or delta.calls or delta.has_called)):
        said["content"] = delta.text
    if delta.calls:
        said["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
    return said


def _reasoning(delta: Delta) -> Json:
    """Write reasoning under both names that clients look for."""
    text = delta.reasoning
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: CallDelta) -> Json:
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def input_of(arguments: str) -> str:
    """Take the text of a call out of its JSON; one that a limit has cut off is told as it came."""
    try:
        return str(msgspec.json.decode(arguments)["input"])
    except (*NOT_JSON, KeyError, TypeError):
        return arguments


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int | None) -> Json:
    """Tokens used; what is not counted, as cached tokens where the cache is off, is not there."""
    used: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
    if num_cached_tokens is not None:
        used["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    return used


def keep_alive(place: int | None) -> bytes:
    """Write a comment for a stream; for a waiting request, with its place in the queue."""
    return b": keep-alive\n\n" if place is None else b": keep-alive queue=%d\n\n" % place


def event(content: object, name: str | None = None) -> bytes:
    """Write a server-sent event with JSON content, as bytes."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode_line(content) + b"\n\n"


def fingerprint(model: ModelInfo) -> str:
    """Make `system_fingerprint`, which is constant for a model and its limits."""
    text = f"{model.model_id}\n{model.created}\n{model.max_model_len}\n{model.vocab_size}"
    return "fp_" + hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def other_model_object(model_id: str, *, is_loaded: bool) -> Json:
    """Write an entry of /v1/models that a request may name to have it swapped in."""
    return {"id": model_id, "object": "model", "owned_by": "penstock", "is_loaded": is_loaded}


def model_object(model: ModelInfo) -> Json:
    """Write the served model as an entry of /v1/models."""
    return {
        "id": model.model_id,
        "object": "model",
        "type": "model",  # Anthropic's word, as the next two
        "display_name": model.model_id,
        "created_at": iso_time(model.created),
        "created": model.created,
        "owned_by": "penstock",
        "root": model.folder,
        "max_model_len": model.max_model_len,
        "tool_parser": model.tool_parser,
        "reasoning_parser": model.reasoning_parser,
        "note": model.note,
        "sampling": {
            name: {"value": value, "source": "model" if name in model.sampling else "default"}
            for name, value in model.sampling_in_force.items()
        },
    }


def text_model_object(encoder: TextEncoder, model: ModelInfo) -> Json:
    """Write a model of texts as an entry of /v1/models.

    Args:
        model: the one beside which it is served, which knows its files.
    """
    facts = model.text_models.get(encoder.name)
    return {
        "id": encoder.name,
        "object": "model",
        "type": "model",
        "display_name": encoder.name,
        "created": facts.modified if facts else 0,
        "owned_by": "penstock",
        "root": model.text_folders.get(encoder.name),
        "max_model_len": encoder.max_tokens,
        "kind": encoder.kind,
        "num_dimensions": encoder.num_dimensions,
        "prompts": list(encoder.prompts),
    }
