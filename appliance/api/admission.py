"""Turn a request's body into sequences, with slow work in threads.

Owns: how many pieces are in work, who waits, and in which order; when a body is read; rendering,
tokenizing and the grammar; what the request's sequences are.
Invariant: what takes time is done in turns, so that the loop does not stand still for it, and
large bodies have turns of their own, so that small ones do not wait for them.
Never: touches the queue.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request as HttpRequest

from appliance.api.ask import Ask, Chat
from appliance.api.fair_threads import Turns
from appliance.api.prompts import infill_of
from appliance.api.stream import PromptEcho
from appliance.api.tool_format import OutputFormat, output_format_of
from appliance.api.tools import Constraint
from appliance.api.turns import Rendered
from appliance.api.wire import appliance_of, arrival_of, client_request_id, require
from appliance.frame.figures import things
from appliance.json_fields import Fields, invalid_value, unsupported
from appliance.request import ModelInfo, Request, Role
from engine.cache.hashes import PrefixChain
from engine.errors import RequestError
from engine.schedule.sequence import Sequence, Stamps
from engine.text.tokenizer import Detokenizer, Tokenizer

MAX_INLINE_BYTES = 16 << 10
"""Larger bodies are read in a thread."""
MAX_INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread."""
NUM_THREADS = 2
"""For small bodies, and for large ones."""
MAX_SMALL_WAITING = 1024
"""Small bodies cost little while they wait; how many may, the queue decides better."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An ask that the router may take."""

    ask: Ask
    request: Request
    echoes: list[PromptEcho]
    """One for each prompt, if the ask wants them repeated."""
    fields: Fields
    """The body."""


class AdmissionTurns:
    """Threads for what takes time; the application has one in its state."""

    def __init__(self) -> None:
        self.small = Turns(
            "admission",
            NUM_THREADS,
            max_waiting=MAX_SMALL_WAITING,
            max_waiting_each=MAX_SMALL_WAITING // 2,
        )
        self.large = Turns("large-body", NUM_THREADS)


@dataclass(frozen=True, slots=True)
class _Prepared:
    text: str | None
    """The prompts' text, None where they came as ids."""
    prompts: list[list[int]]
    prefixes: list[PrefixChain | None]
    """Of the prompts."""
    echoes: list[PromptEcho]
    grammar: str | None
    bad_words: tuple[tuple[int, ...], ...]
    changes: tuple[str, ...]
    """What was changed of the messages for the chat template."""


async def accept(http: HttpRequest, read: Callable[[Fields], Ask]) -> Accepted:
    """Read a body, and make what it asks for into sequences, if its peer may generate and we can.

    Args:
        http: what asks.
        read: validates the body; in a thread, if that is large.

    Raises:
        Forbidden: a viewer's.
        Unavailable: while loading or draining, or too busy.
        QueueFull: too much of this peer waits to be read.
        RequestError: it cannot be served, whatever there is room for.
    """
    require(http, Role.USER)
    body = await http.body()
    arrival_of(http).has_body()
    appliance_of(http).check_available()
    appliance_of(http).check_room(arrival_of(http).peer.name, len(body))
    fields, ask, prepared = await _read(http, body, read)
    request = _request(http, ask, prepared)
    return Accepted(ask, request, prepared.echoes, fields)


async def _read(
    http: HttpRequest, body: bytes, read: Callable[[Fields], Ask]
) -> tuple[Fields, Ask, _Prepared]:
    """The body, what it asks, and what that needs; on the loop only if all of it is quick."""
    appliance = appliance_of(http)
    tokenizer, model = appliance.tokenizer, appliance.model
    limits = appliance.max_per_request, appliance.max_tokens_per_request
    turns = cast(AdmissionTurns, http.app.state.turns)
    user = arrival_of(http).peer.name

    def prepare(ask: Ask) -> _Prepared:
        def hash_prompt(token_ids: list[int]) -> PrefixChain | None:
            return appliance.hash_prompt(token_ids, ask.cache_salt, user)

        return _prepare(ask, tokenizer, model, hash_prompt)

    def validate() -> tuple[Fields, Ask]:
        fields = Fields.of_body(body)
        ask = read(fields)
        _check_choices(ask, *limits)
        return fields, ask

    def do_all() -> tuple[Fields, Ask, _Prepared]:
        fields, ask = validate()
        return fields, ask, prepare(ask)

    if len(body) > MAX_INLINE_BYTES:
        return await turns.large.run(http, do_all)
    fields, ask = validate()
    is_quick = not (ask.is_chat or ask.constraint or ask.bad_words)
    if is_quick and sum(map(len, ask.prompts)) <= MAX_INLINE_CHARS:
        return fields, ask, prepare(ask)
    return fields, ask, await turns.small.run(http, lambda: prepare(ask))


def _check_choices(ask: Ask, most: int, most_tokens: int) -> None:
    """Refuse what the queue would, before work is spent on it; texts it counts when it can."""
    num_sequences = max(len(ask.prompts), 1) * ask.num_choices
    if num_sequences > most:
        raise invalid_value(
            "n",
            f"asks for {num_sequences} choices in all; the queue takes {most} from one request",
        )
    num_ids = sum(len(prompt) for prompt in ask.prompts if isinstance(prompt, list))
    if num_sequences > 1 and num_ids * ask.num_choices > most_tokens:
        raise invalid_value(
            "prompt",
            f"has {num_ids * ask.num_choices} tokens in all its choices; "
            f"the queue takes {most_tokens} from one request",
        )


def _request(http: HttpRequest, ask: Ask, prepared: _Prepared) -> Request:
    """The request with its sequences."""
    appliance, arrival = appliance_of(http), arrival_of(http)
    model, peer = appliance.model, arrival.peer
    # A wait for a swap came before, and is of the queue: the two stages change places.
    tokenized_ns = time.monotonic_ns() - arrival.swap_wait_ns
    sequences = [
        Sequence(
            seq_id=appliance.next_seq_id(),
            request_id=arrival.request_id,
            index=index * ask.num_choices + choice,
            prompt_token_ids=token_ids,
            sampling=ask.sampling(
                len(token_ids),
                model.max_model_len,
                choice=choice,
                grammar=prepared.grammar,
                bad_words=prepared.bad_words,
            ),
            stamps=Stamps(arrived_ns=arrival.arrived_ns, tokenized_ns=tokenized_ns),
            owner=peer.name,
            prefix=prefix.copy() if prefix is not None and choice else prefix,
        )
        for index, (token_ids, prefix) in enumerate(
            zip(prepared.prompts, prepared.prefixes, strict=True)
        )
        for choice in range(ask.num_choices)
    ]
    is_cut = any(one.sampling.max_tokens < (ask.max_tokens or 0) for one in sequences)
    return Request(
        request_id=arrival.request_id,
        endpoint=http.url.path,
        model=model.model_id,
        peer=peer,
        is_stream=ask.is_stream,
        received_at=arrival.received_at,
        sequences=sequences,
        prompt_text=prepared.text,
        client_request_id=client_request_id(http),
        swap_wait_ms=arrival.swap_wait_ns / 1e6,
        message_changes=prepared.changes,
        asked_max_tokens=ask.max_tokens if is_cut else None,
    )


def _prepare(
    ask: Ask,
    tokenizer: Tokenizer,
    model: ModelInfo,
    hash_prompt: Callable[[list[int]], PrefixChain | None],
) -> _Prepared:
    """The part that may take time: templates, tokenizing, hashes, compiling a grammar."""
    output_format = output_format_of(tokenizer, model.tool_parser, model.reasoning_parser)
    prompts, changes = ask.prompts, tuple[str, ...]()
    if ask.chat:
        rendered = _rendered(ask, ask.chat, output_format, tokenizer, model)
        prompts, changes = [rendered.text], rendered.changes
    if ask.suffix:
        prompts = [_infilled(prompt, ask.suffix, tokenizer) for prompt in prompts]
    for prompt in prompts if ask.truncate is None else ():
        ask.check_length(prompt, tokenizer.max_token_chars, model.max_model_len)
    ids = [
        tokenizer.encode(prompt, not ask.is_chat) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    if ask.truncate is not None:
        output = min(ask.max_tokens or 1, model.max_model_len // 2)
        most = model.max_model_len - output if ask.truncate < 0 else ask.truncate
        ids = [one[max(len(one) - most, 0) :] for one in ids]
    _check_vocabulary(ids, model.vocab_size)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    echoes = [_echo(ask, tokenizer, prompt) for prompt in prompts] if ask.is_echo else []
    grammar = _grammar(ask, output_format, tokenizer, model)
    bad_words = _bad_words(ask, tokenizer, model)
    prefixes = [hash_prompt(one) for one in ids]
    return _Prepared("\n".join(texts) or None, ids, prefixes, echoes, grammar, bad_words, changes)


def _rendered(
    ask: Ask, chat: Chat, output_format: OutputFormat, tokenizer: Tokenizer, model: ModelInfo
) -> Rendered:
    """Render a chat; one that is too long without its oldest turns, if its client allows that."""
    whole = chat.render(tokenizer, output_format)
    if not ask.drops_oldest or len(whole.text.encode()) < model.max_model_len:
        return whole  # no token is shorter than a byte
    if _num_tokens(whole, tokenizer, model) < model.max_model_len:
        return whole
    quarter = model.max_model_len // 4  # an answer wants room, too
    most = model.max_model_len - min(ask.max_tokens or quarter, quarter)
    shorter = chat.shortened()
    index = bisect_left(
        shorter,
        True,
        key=lambda one: _num_tokens(one.render(tokenizer, output_format), tokenizer, model) <= most,
    )
    if index == len(shorter):
        return whole  # which is refused with its length
    count = len(chat.messages) - len(shorter[index].messages)
    words = f"{things(count, 'oldest message')} left out"
    found = shorter[index].render(tokenizer, output_format)
    return found._replace(changes=(words, *found.changes))


def _num_tokens(rendered: Rendered, tokenizer: Tokenizer, model: ModelInfo) -> int:
    """Count a prompt's tokens; of one that is far too long only that it is."""
    fewest = len(rendered.text) // tokenizer.max_token_chars
    if fewest > model.max_model_len:
        return fewest
    return len(tokenizer.encode(rendered.text, add_special_tokens=False))


def _bad_words(ask: Ask, tokenizer: Tokenizer, model: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """The tokens of texts that may not come, as vLLM finds them.

    Each as it is, and with a space before it, as it stands within a text, where that makes other
    tokens of the same number.
    """
    found: list[tuple[int, ...]] = []
    for word in ask.bad_words:
        bare, spaced = (
            tuple(tokenizer.encode(before + word.lstrip(), add_special_tokens=False))
            for before in ("", " ")
        )
        if not bare:
            raise invalid_value("bad_words", f"has a word without tokens: {word!r}")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    if max(map(max, found), default=0) >= model.vocab_size:
        raise invalid_value("bad_words", "has tokens that the model does not have")
    return tuple(found)


def _infilled(prompt: str | list[int], suffix: str, tokenizer: Tokenizer) -> str:
    """The prompt that asks a model for what stands before a suffix."""
    infill = infill_of(tokenizer)
    if infill is None:
        raise unsupported("suffix", "is not supported: this model has no fill-in-the-middle tokens")
    if not isinstance(prompt, str):
        raise invalid_value("suffix", "needs prompts that are texts")
    return infill.prompt(prompt, suffix)


def _grammar(
    ask: Ask, output_format: OutputFormat, tokenizer: Tokenizer, model: ModelInfo
) -> str | None:
    """What the output must match, compiled once to see that it can be."""
    constraint = ask.constraint
    if ask.tools:
        if not model.eos_token_ids and not ask.tools.is_required and constraint is None:
            return None  # free text, in which calls are found if they come
        answer = constraint.grammar if constraint else None
        grammar = ask.tools.grammar(output_format, tokenizer, answer)
        constraint = Constraint(grammar, "tools") if grammar else None
    if constraint is None:
        return None
    if not model.eos_token_ids:
        raise unsupported(
            constraint.param, "is not supported by this model: it has no end-of-text id"
        )
    constraint.check()
    return constraint.grammar


def _echo(ask: Ask, tokenizer: Tokenizer, prompt: str | list[int]) -> PromptEcho:
    """A text comes back as it was, token ids as what they say; of a chat its last message."""
    if ask.chat:
        return PromptEcho(ask.chat.echo, [])
    if isinstance(prompt, str):
        starts = [start for start, _end in tokenizer.spans(prompt)] if ask.wants_tokens else []
        return PromptEcho(prompt, starts)
    detokenizer = Detokenizer(tokenizer)
    text, offsets = "", []
    for token_id in prompt:
        offsets.append(len(text))
        if tokenizer.is_silent(token_id):  # it was sent by its id, and comes back by its name
            text += detokenizer.flush() + tokenizer.token_text(token_id)
        else:
            text += detokenizer.push(token_id)
    return PromptEcho(text + detokenizer.flush(), offsets)


def _check_vocabulary(prompts: list[list[int]], vocab_size: int) -> None:
    """Refuse what the tokenizer knows and the model does not: an id without an embedding."""
    for token_ids in prompts:
        if max(token_ids, default=0) >= vocab_size:
            raise RequestError(
                f"the prompt has token {max(token_ids)}, the model has {vocab_size} tokens",
                code="invalid_value",
                param="prompt",
                hint="the tokenizer does not fit the model",
            )
