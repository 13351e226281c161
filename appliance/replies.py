"""What clients read, in OpenAI's words: completions, chunks, logprobs, usage and error objects.

Owns: the shapes of replies. Called by: generation, wire, api, server.
Invariant: a streamed reply's chunks add up to the whole reply.
Never: waits, or knows HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.openai import Ask
from appliance.request import ModelInfo, Request
from appliance.stream import Delta
from engine.errors import RequestError
from engine.sequence import Sequence, TokenLogprob
from engine.tokenizer import Tokenizer

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """The shape of one request's reply."""

    ask: Ask
    request: Request
    tokenizer: Tokenizer
    created: int
    """Unix seconds."""
    fingerprint: str

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """The reply in one piece; one delta per sequence."""
        choices = []
        for delta in deltas:
            choice = self._choice(delta)
            if self.ask.is_chat:
                choice["message"] = {
                    "role": "assistant",
                    "content": delta.text,
                    "refusal": None,
                }
            else:
                choice["text"] = delta.text
            if self.ask.return_token_ids:
                choice["prompt_token_ids"] = delta.sequence.prompt_token_ids
            choices.append(choice)
        return self._object("chat.completion", choices) | {"usage": self._usage()}

    def chunk(self, delta: Delta, is_first: bool) -> Json:
        """A part of a streamed reply."""
        choice = self._choice(delta)
        if self.ask.is_chat:
            choice["delta"] = {"content": delta.text} if delta.text or delta.token_ids else {}
        else:
            choice["text"] = delta.text
        if self.ask.return_token_ids and is_first:
            choice["prompt_token_ids"] = delta.sequence.prompt_token_ids
        return self._chunk([choice])

    def role_chunk(self, sequence: Sequence) -> Json:
        """What a chat's stream begins with."""
        delta = {"role": "assistant", "content": ""}
        choice: Json = {"index": sequence.index, "delta": delta, "finish_reason": None}
        return self._chunk([choice | {"logprobs": None}])

    def usage_chunk(self) -> Json:
        """What a stream ends with if the client asked for usage."""
        return self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._object("chat.completion.chunk", choices)
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
        choice: Json = {
            "index": delta.sequence.index,
            "finish_reason": delta.finish_reason,
            "logprobs": self._logprobs(delta),
        }
        if self.ask.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> Json | None:
        if self.ask.num_logprobs is None or not delta.token_ids:
            return None
        if not self.ask.is_chat:
            return completion_logprobs(self.tokenizer, delta)
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        entries = [chat_logprob(self.tokenizer, token_id, entry) for token_id, entry in pairs]
        return {"content": entries, "refusal": None}

    def _usage(self) -> Json:
        num_prompt = sum(sequence.num_prompt_tokens for sequence in self.request.sequences)
        num_output = sum(sequence.num_output_tokens for sequence in self.request.sequences)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }


def completion_logprobs(tokenizer: Tokenizer, delta: Delta) -> Json:
    """Log-probabilities as /v1/completions has them: columns, alternatives by their text."""
    return {
        "text_offset": delta.text_offsets,
        "token_logprobs": [finite(entry.logprob) for entry in delta.logprobs],
        "tokens": [token_key(tokenizer, token_id) for token_id in delta.token_ids],
        "top_logprobs": [
            {
                token_key(tokenizer, other): finite(logprob)
                for other, logprob in [
                    *zip(entry.top_ids, entry.top_logprobs, strict=True),
                    (token_id, entry.logprob),
                ]
            }
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
    }


def chat_logprob(tokenizer: Tokenizer, token_id: int, entry: TokenLogprob) -> Json:
    """Log-probabilities of one position as /v1/chat/completions has them."""
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return _token(tokenizer, token_id, entry.logprob) | {
        "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in top]
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": None if raw is None else list(raw),
    }


def token_key(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, or its bytes spelled out where it is only part of a character."""
    raw = tokenizer.token_bytes(token_id)
    if raw is None:
        return f"token_id:{token_id}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return max(logprob, -9999.0)


def fingerprint(model: ModelInfo) -> str:
    """The same as long as the same model is served with the same limits."""
    text = f"{model.model_id}\n{model.created}\n{model.max_model_len}\n{model.vocab_size}"
    return "fp_" + hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def model_object(model: ModelInfo) -> Json:
    """One entry of /v1/models."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "max_model_len": model.max_model_len,
        "note": model.note,
    }


def error_object(error: RequestError) -> Json:
    """OpenAI's error object; `code` is a string or null."""
    message = f"{error.what}; {error.hint}" if error.hint else error.what
    return {
        "error": {
            "message": message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }
