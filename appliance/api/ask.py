"""What a client asks, validated: of which model, and all that the APIs have in common.

Owns: the refusal; how an ask becomes sampling parameters, once its prompt is token ids.
Invariant: an Ask asks for nothing that this daemon does not do.
Never: knows fields' names beyond those that its own refusals name.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.api.prompts import Message
from appliance.api.tool_format import OutputFormat
from appliance.api.tools import Constraint, Tools, in_words, needs_words, without_system
from appliance.json_fields import INT64_MAX, invalid_type, invalid_value
from appliance.request import ModelInfo
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import SamplingParams

# Which model a client asks for, and what it is told when that is not here.
# Invariant: a refusal says every name that would have been served.
# Never: swaps a model; a request that generates has waited for its own before it comes here.


_MAX_NAMED = 20


def check_model(asked: object, model: ModelInfo) -> None:
    """Refuse another model than the one that is served; no name is the served one's."""
    if asked in (None, ""):  # clients that must name one may leave it empty
        return
    if not isinstance(asked, str):
        raise invalid_type("model", "a string", asked)
    if model.is_called(asked):
        return
    raise model_not_found(asked, model)


def model_not_found(asked: str, model: ModelInfo) -> RequestError:
    """Another model was asked for than the one that is served."""
    if asked.removesuffix(":latest") in model.others:
        what = f"`{asked}` is not served now, `{model.model_id}` is; a request that generates swaps"
    else:
        what = f"the model `{asked[:200]}` does not exist here; {_named(model)}"
    return RequestError(
        what,
        code="model_not_found",
        param="model",
        status=404,
        kind="not_found_error",
    )


def _named(model: ModelInfo) -> str:
    """The names that there are: `a`, `b` and `c` do."""
    names = [f"`{name}`" for name in (model.model_id, *model.others, *model.aliases)]
    if len(names) == 1:
        return f"{names[0]} does"
    names[_MAX_NAMED:] = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return f"{', '.join(names[:-1])} and {names[-1]} do"


# --------------------------------------------------------------------------------------------------


COMPLETION_MAX_TOKENS = 16
CHAT_MAX_TOKENS = 2048
MAX_SALT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how its template is to be rendered."""

    messages: list[Message]
    tools: Tools | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def echo(self) -> str:
        """What an answer begins with that repeats the message it goes on from; empty if none is."""
        last = self.messages[-1]
        is_continued = last["role"] == "assistant" or not self.add_generation_prompt
        return str(last["content"]) if is_continued else ""

    def render(self, tokenizer: Tokenizer, output_format: OutputFormat) -> str:
        """The prompt; a template may be slow, so call it in a thread.

        Raises:
            RequestError: there is no template, or it refuses.
        """
        tools = self.tools.definitions if self.tools else None
        if not output_format.has_preamble or not (tools or needs_words(self.messages)):
            return self._rendered(tokenizer, self.messages, tools)
        messages = in_words(self.messages, tools)
        try:
            return self._rendered(tokenizer, messages, None)
        except RequestError:
            if self.messages[0]["role"] == "system":
                raise  # it is the client's own message that is refused
            return self._rendered(tokenizer, without_system(messages), None)

    def _rendered(
        self, tokenizer: Tokenizer, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> str:
        return tokenizer.render_chat(
            messages,
            tools=tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A validated body. Lengths are checked later, when the prompts are token ids."""

    chat: Chat | None
    """None: a completion of prompts."""
    prompts: list[str | list[int]]
    """Of completions; empty for a chat."""
    suffix: str | None = None
    """What is to stand behind the output of a completion."""
    num_choices: int
    """Sequences for each prompt."""
    num_best: int | None = None
    """Only so many of them, the likeliest, are told; None: all are."""
    max_tokens: int | None
    """0 only for a completion with `is_echo`: the prompt is read and nothing written."""
    seed: int | None
    base: SamplingParams
    """Complete but for max_tokens, seed, bad words and grammar."""
    logprobs: int | None = None
    """How many alternatives to each token of the output are told; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same of the prompt, apart from an echo; None: none."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not be in the output."""
    stop: tuple[str, ...]
    constraint: Constraint | None
    is_echo: bool
    is_stream: bool
    include_usage: bool
    has_running_usage: bool
    """Every chunk of a stream tells the usage so far."""
    return_token_ids: bool
    returns_tokens_as_ids: bool = False
    """Log-probabilities of a completion name tokens by their ids."""
    shows_special: bool = False
    """Special tokens have a text in the output."""
    shows_stop: bool = False
    """A stop string ends the output, instead of standing behind it."""
    truncate: int | None = None
    """Only so many last tokens of the prompt count; -1: as many as leave room for the output."""
    cache_salt: str | None = None
    """Only prompts with the same one share what is cached."""
    ignored: tuple[str, ...]
    """Names of the fields that have no effect."""

    @property
    def is_chat(self) -> bool:
        """True if there are messages instead of prompts."""
        return self.chat is not None

    @property
    def tools(self) -> Tools | None:
        """The functions that may be called."""
        return self.chat.tools if self.chat else None

    @property
    def is_continuation(self) -> bool:
        """True if the text goes on where the prompt ends, instead of beginning a message."""
        return self.chat is None or self.chat.continue_final_message

    @property
    def wants_tokens(self) -> bool:
        """True if each token is to be reported, also one whose text comes later or never."""
        return self.logprobs is not None or self.return_token_ids

    def check_length(
        self, prompt: str | list[int], max_token_chars: int, max_model_len: int
    ) -> None:
        """Refuse what cannot fit, before it costs the time to tokenize it.

        Raises:
            RequestError: `context_length_exceeded`.
        """
        per_token = max_token_chars if isinstance(prompt, str) else 1
        if len(prompt) > max_model_len * per_token:
            raise self._too_long(max_model_len, f"at least {len(prompt) // per_token}")

    def sampling(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        *,
        choice: int = 0,
        grammar: str | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Sampling for one choice; max_tokens fitted to what the prompt's length leaves.

        Raises:
            RequestError: `context_length_exceeded`, or a prompt without tokens.
        """
        if not num_prompt_tokens:
            raise invalid_value(self._prompt_param, "has no tokens")
        room = max_model_len - num_prompt_tokens
        if room < 1 or (self.max_tokens is not None and self.max_tokens > room):
            raise self._too_long(max_model_len, str(num_prompt_tokens))
        default = CHAT_MAX_TOKENS if self.is_chat else COMPLETION_MAX_TOKENS
        max_tokens = min(room, default) if self.max_tokens is None else max(self.max_tokens, 1)
        most = self.base.output_offset + max_tokens
        if self.base.min_tokens > most:
            what = "max_tokens and output_offset together" if most > max_tokens else "max_tokens"
            raise invalid_value("min_tokens", f"is more than {what}, which is {most}")
        seed = secrets.randbits(63) if self.seed is None else self.seed + choice
        return msgspec.structs.replace(
            self.base,
            max_tokens=max_tokens,
            seed=seed & INT64_MAX,
            grammar=grammar,
            bad_words=bad_words,
        )

    def cannot_follow(self, why: str) -> RequestError:
        """What was asked cannot be gone on with, as was found while the answer was written."""
        if self.constraint is not None:
            param = self.constraint.param
        elif self.tools:
            param = "tools"
        else:
            param = "bad_words" if self.bad_words else "allowed_token_ids"
        return invalid_value(param, f"cannot be followed to an end: {why}")

    @property
    def _prompt_param(self) -> str:
        return "messages" if self.is_chat else "prompt"

    def _too_long(self, max_model_len: int, prompt_tokens: str) -> RequestError:
        output_tokens = "at least 1" if self.max_tokens is None else str(self.max_tokens)
        return RequestError(
            f"the model's context is {max_model_len} tokens; this request needs more: "
            f"{prompt_tokens} for the prompt and {output_tokens} for the completion",
            code="context_length_exceeded",
            param=self._prompt_param,
        )


def checked_salt(salt: str | None) -> str | None:
    """A client's secret, which sets its prompts apart in the cache; an empty one would not."""
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise invalid_value("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters")
    return salt
