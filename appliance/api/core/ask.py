"""Describe a validated request of any API: model, prompt, sampling.

Invariant: an Ask asks for nothing that this daemon does not do.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec

from appliance.api.core import turns
from appliance.api.core.answer_forms import Constraint
from appliance.api.core.chat_messages import LEFT_OUT, Message, named
from appliance.api.core.tools import Tools
from appliance.api.core.tools_in_words import in_words, needs_words
from appliance.api.formats.format_choice import OutputFormat
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import INT64_MAX, invalid_value
from appliance.observe.frame.figures import things
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from engine.wire.sampling import SamplingParams

MAX_TRUNCATED = 1 << 20
"""Characters or tokens of a prompt of which the end alone is computed; all of it is tokenized."""

NO_SEED = (None, -1)
"""Front ends send -1 for a new seed with each request."""


class PromptText(NamedTuple):
    """A rendered prompt."""

    text: str
    changes: tuple[str, ...] = ()
    """What was changed of the messages for the template."""
    ignored: tuple[str, ...] = ()
    """Places of words that the template leaves out."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for an output token.

    Args:
        num_prompt_tokens: or fewer than it has, where it was not tokenized.
        param: the field that has the prompt.
        max_tokens: that were asked for; None: no limit was named.
    """

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, param: str, max_tokens: int | None = None
    ) -> None:
        super().__init__(
            f"this model's maximum context length is {max_model_len} tokens; "
            f"the prompt has {num_prompt_tokens}, and the answer needs at least 1",
            code="context_length_exceeded",
            param=param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens or 1


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how its template is to be rendered."""

    messages: list[Message]
    tools: Tools | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    marks: tuple[tuple[int, int], ...] = ()
    """Where the client expects other chats to part: a message, and characters of its content."""
    ignored: tuple[str, ...] = ()
    """Places of what was left out of it."""
    places: tuple[str, ...] = ()
    """Where the client has each message's words."""

    @property
    def echo(self) -> str:
        """Repeat the message that the answer continues; empty if it continues no message."""
        last = self.messages[-1]
        is_continued = last["role"] == "assistant" or not self.add_generation_prompt
        return str(last["content"]) if is_continued else ""

    @property
    def first_turn(self) -> int:
        """The index of the first message that gives no instructions; without one, the last."""
        said = (i for i, one in enumerate(self.messages) if one["role"] != "system")
        return next(said, len(self.messages) - 1)

    def shortened(self) -> list[Chat]:
        """Leave out more and more of the oldest turns; the instructions and the last turn stay."""
        first = self.first_turn
        users = (i for i, one in enumerate(self.messages) if one["role"] == "user" and i > first)
        kept = self.messages[:first]
        return [
            replace(
                self,
                messages=[*kept, *self.messages[start:]],
                places=(*self.places[:first], *self.places[start:]),
                marks=(),
            )
            for start in users
        ]

    def render(
        self, tokenizer: Tokenizer, output_format: OutputFormat, *, is_real: bool = True
    ) -> PromptText:
        """Render the prompt; a template may be slow, so call it in a thread.

        Args:
            is_real: the form that the template takes is remembered for such chats.

        Raises:
            RequestError: there is no template, or it refuses.
        """
        messages, tools = self.messages, self.tools.definitions if self.tools else None
        count = sum(one["content"].count(LEFT_OUT) for one in messages)
        changes = (f"{things(count, 'attachment')} left out",) if count else ()
        template, is_read = tokenizer.chat_template, True
        if template is not None:
            messages, is_read = turns.with_thoughts(messages, template.tool_source)
        if output_format.has_preamble and (tools or needs_words(messages)):
            messages, tools = in_words(messages, tools), None
        options = {
            "tools": tools,
            "variables": self.variables,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        if template is None:
            return PromptText(tokenizer.render_chat(messages, **options))
        known = template.known_forms
        try:
            rendered = turns.render(
                messages,
                lambda form: tokenizer.render_chat(form, **options),
                known if is_real else dict(known),
                has_tools=bool(tools),
            )
        except turns.LeftOut as error:
            place = self._place(error.index, messages)
            raise _left_out(place, template.where) from error
        lost = [named(self._place(index, messages)) for index in rendered.lost]
        if not is_read:
            lost.append("messages.reasoning_content")
        return PromptText(rendered.text, (*changes, *rendered.changes), tuple(lost))

    def _place(self, index: int, messages: list[Message]) -> str:
        """Find where the client has a message's words, unless messages were joined."""
        return self.places[index] if len(self.places) == len(messages) else "messages"


def _left_out(place: str, where: str) -> RequestError:
    """Refuse a conversation that the template does not take whole."""
    return RequestError(
        f"the chat template of {PurePath(where).name} leaves out `{place}`",
        code="invalid_value",
        param=place,
        hint="send the conversation in another order, or correct the template",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A validated body. Lengths are checked later, when the prompts are token ids."""

    chat: Chat | None
    """None: a completion of prompts."""
    prompts: list[str | list[int]]
    """Prompts of completions; empty for a chat."""
    suffix: str | None = None
    """What is to stand behind the output of a completion."""
    num_choices: int
    """Sequences for each prompt."""
    num_best: int | None = None
    """Number of likeliest answers to return; None: all."""
    max_tokens: int | None
    """The client's limit. 0 only for a completion with `is_echo`: the prompt is read and nothing
    written."""
    default_max_tokens: int | None = None
    """The limit where the client names none; None: the room left."""
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
    """Number of last prompt tokens to keep; -1: as many as leave room for the output."""
    cache_salt: str | None = None
    """Only prompts with the same one share what is cached."""
    prediction: str | None = None
    """The output that the client expects."""
    keep_alive_s: float | None = None
    """How long its model is to stay loaded after it; None: as set."""
    drops_oldest: bool = False
    """Where a chat does not fit, its oldest turns are left out until it does."""
    is_background: bool = False
    """It is answered at once, and generated behind that."""
    conversation: tuple[Any, ...] = ()
    """The items, by id and as JSON, with which a response is kept."""
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
        """True if the text continues the prompt, instead of beginning a message."""
        return self.chat is None or self.chat.continue_final_message

    @property
    def wants_tokens(self) -> bool:
        """True if each token is to be reported, also if its text comes later or never."""
        return self.logprobs is not None or self.return_token_ids

    def check_length(
        self, prompt: str | list[int], max_token_chars: int, max_model_len: int
    ) -> None:
        """Refuse what cannot fit, before it costs the time to tokenize it.

        Raises:
            PromptTooLong: it is longer than the context.
            RequestError: it is too long to be tokenized, though only its end is wanted.
        """
        if self.truncate is not None:
            if len(prompt) > MAX_TRUNCATED:
                what = "characters" if isinstance(prompt, str) else "tokens"
                raise invalid_value(self._prompt_param, f"has more than {MAX_TRUNCATED} {what}")
            return
        per_token = max_token_chars if isinstance(prompt, str) else 1
        if len(prompt) > max_model_len * per_token:
            num_tokens = -(-len(prompt) // per_token)
            raise PromptTooLong(num_tokens, max_model_len, self._prompt_param, self.max_tokens)

    def room(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Count the tokens that a prompt leaves for its answer.

        Raises:
            PromptTooLong: there are none.
            RequestError: the prompt has no tokens.
        """
        if not num_prompt_tokens:
            raise invalid_value(self._prompt_param, "has no tokens")
        if num_prompt_tokens >= max_model_len:
            param = self._prompt_param
            raise PromptTooLong(num_prompt_tokens, max_model_len, param, self.max_tokens)
        return max_model_len - num_prompt_tokens

    def sampling(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        replayed: Replayed,
        *,
        choice: int = 0,
        grammar: str | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Make the sampling of one choice, with max_tokens cut to the room that the prompt leaves.

        Raises:
            RequestError: as room().
        """
        room = self.room(num_prompt_tokens, max_model_len)
        wanted = self.default_max_tokens if self.max_tokens is None else self.max_tokens
        max_tokens = room if wanted is None else max(min(wanted, room), 1)
        most = self.base.output_offset + max_tokens
        if self.base.min_tokens > most:
            what = "max_tokens and output_offset together" if most > max_tokens else "max_tokens"
            raise invalid_value("min_tokens", f"is more than {what}, which is {most}")
        seed = replayed(secrets.randbits, 63) if self.seed in NO_SEED else self.seed + choice
        return msgspec.structs.replace(
            self.base,
            max_tokens=max_tokens,
            seed=seed & INT64_MAX,
            grammar=grammar,
            bad_words=bad_words,
        )

    def cannot_follow(self, why: str) -> RequestError:
        """Refuse what was found impossible to follow while the answer was written."""
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
