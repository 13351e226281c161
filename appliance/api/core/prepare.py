"""Prepare a validated request: render, tokenize, hash, compile its grammar, and make its sequences.

Invariant: a request that is prepared can be served, whatever room there is.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from appliance.api.core.appliance import Appliance
from appliance.api.core.ask import Ask, Chat, PromptText
from appliance.api.core.branches import branches
from appliance.api.core.endpoint import Asked
from appliance.api.core.enter import Entry
from appliance.api.core.prompts import infill_of
from appliance.api.core.stream import PromptEcho
from appliance.api.core.tools import Tools
from appliance.daemon.requests.request import ModelInfo
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import invalid_value, unsupported
from appliance.observe.frame.figures import things
from engine.errors import RequestError, Unreadable
from engine.scheduler.cache.hashes import PrefixChain
from engine.text.tokenizer import Detokenizer, Tokenizer
from engine.wire.run_spec import RunSpec

MAX_INLINE_TOKENS = 4096
"""Longer prompts are prepared in a thread, as are all that are texts: a tokenizer may be slow."""
MAX_ECHOED_CHARS, MAX_ECHOED_LOGPROBS = 8 << 20, 1 << 20
"""Maximum that a reply repeats of its prompts, in all choices together."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's prompts as tokens, and what each of its sequences wants."""

    text: str | None
    """The prompts' text; None where they came as ids."""
    prompts: list[list[int]]
    prefixes: list[PrefixChain | None]
    """One for each prompt; None: the prefix cache is off."""
    specs: list[RunSpec]
    """One for each sequence: all choices of the first prompt, then of the next."""
    echoes: list[PromptEcho]
    """One for each prompt, if the ask wants them repeated."""
    changes: tuple[str, ...]
    """What was changed of the messages for the chat template."""
    ignored: tuple[str, ...]
    """Places of the body that have no effect."""
    branches: tuple[int, ...] = ()
    """Numbers of a chat's tokens after which other chats may continue differently."""


async def prepare(entry: Entry, asked: Asked) -> Prepared:
    """Do what takes time: templates, tokenizing, hashes, a grammar.

    Raises:
        RequestError: the request cannot be served, whatever room there is.
    """
    work = partial(prepared, entry.appliance, asked.ask, entry.owner, entry.replayed)
    if asked.ask.constraint or asked.ask.tools:
        return await entry.compile(work)
    return await entry.run(work, is_quick=_is_quick(asked.ask))


def _is_quick(ask: Ask) -> bool:
    """Tell whether the prompts of a small body are prepared at once."""
    has_text = ask.bad_words or ask.prediction or any(isinstance(one, str) for one in ask.prompts)
    return not (ask.is_chat or has_text) and sum(map(len, ask.prompts)) <= MAX_INLINE_TOKENS


def prepared(appliance: Appliance, ask: Ask, user: str, replayed: Replayed) -> Prepared:
    """Prepare a request of a user, from any thread.

    Raises:
        RequestError: the request cannot be served, whatever room there is.
    """
    tokenizer, model, hasher = appliance.tokenizer, appliance.model, appliance.hasher
    prompts, changes, ignored = ask.prompts, tuple[str, ...](), tuple[str, ...]()
    if ask.chat:
        rendered = _rendered(ask, ask.chat, tokenizer, model)
        prompts, changes, ignored = [rendered.text], rendered.changes, rendered.ignored
    if ask.suffix:
        prompts = [_infilled(prompt, ask.suffix, tokenizer) for prompt in prompts]
    ids = _token_ids(ask, prompts, tokenizer, model)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    _check_echoes(ask, prompts, ids)
    echoes = [_echo(ask, tokenizer, prompt) for prompt in prompts] if ask.is_echo else []
    grammar, unenforced = _grammar(ask, tokenizer, model)
    bad_words = _bad_words(ask, tokenizer, model)
    scope = None if hasher is None else hasher.scope(ask.cache_salt, user)
    prefixes = [None if hasher is None else hasher.chain(one, scope) for one in ids]
    parts_at = tuple[int, ...]()
    if ask.chat and model.has_records and hasher is not None:
        parts_at = branches(ask.chat, ids[0], tokenizer, model.output_format)
    predicted = _predicted(ask, tokenizer, model)
    sampling = partial(
        ask.sampling,
        max_model_len=model.max_model_len,
        replayed=replayed,
        grammar=grammar,
        bad_words=bad_words,
    )
    specs = [
        RunSpec(sampling(len(one), choice=choice), scope, user, predicted)
        for one in ids
        for choice in range(ask.num_choices)
    ]
    text = "\n".join(texts) or None
    ignored = (*ignored, *unenforced)
    return Prepared(text, ids, prefixes, specs, echoes, changes, ignored, parts_at)


def _token_ids(
    ask: Ask, prompts: list[str | list[int]], tokenizer: Tokenizer, model: ModelInfo
) -> list[list[int]]:
    """Tokenize the prompts, refusing what is too long before that costs time."""
    for prompt in prompts:
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
    for one in ids:
        ask.room(len(one), model.max_model_len)  # before time is spent on a grammar
    return ids


def _rendered(ask: Ask, chat: Chat, tokenizer: Tokenizer, model: ModelInfo) -> PromptText:
    """Render a chat; one that is too long without its oldest turns, if its client allows that."""

    def render(one: Chat) -> PromptText:
        return one.render(tokenizer, model.output_format)

    whole = render(chat)
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
        key=lambda one: (
            _num_tokens(one.render(tokenizer, model.output_format), tokenizer, model) <= most
        ),
    )
    if index == len(shorter):
        return whole  # which is refused with its length
    count = len(chat.messages) - len(shorter[index].messages)
    words = f"{things(count, 'oldest message')} left out"
    found = render(shorter[index])
    return found._replace(changes=(words, *found.changes))


def _num_tokens(rendered: PromptText, tokenizer: Tokenizer, model: ModelInfo) -> int:
    """Count a prompt's tokens; of one that is far too long only that it is."""
    fewest = len(rendered.text) // tokenizer.max_token_chars
    if fewest > model.max_model_len:
        return fewest
    return len(tokenizer.encode(rendered.text, add_special_tokens=False))


def _bad_words(ask: Ask, tokenizer: Tokenizer, model: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Find the tokens of forbidden texts, as vLLM does.

    A text is tokenized alone and, as within a sentence, after a space, if that makes other tokens
    of the same number.
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
    """Write the prompt that asks a model for the text before a suffix."""
    infill = infill_of(tokenizer)
    if infill is None:
        raise unsupported("suffix", "is not supported: this model has no fill-in-the-middle tokens")
    if not isinstance(prompt, str):
        raise invalid_value("suffix", "needs prompts that are texts")
    return infill.prompt(prompt, suffix)


def _predicted(ask: Ask, tokenizer: Tokenizer, model: ModelInfo) -> list[int]:
    """Tokenize the output that a client expects, up to a token that the model does not have."""
    if ask.prediction is None:
        return []
    text = ask.prediction[: model.max_model_len * tokenizer.max_token_chars]
    ids = tokenizer.encode(text, add_special_tokens=False)[: model.max_model_len]
    return list(takewhile(lambda token_id: token_id < model.vocab_size, ids))


def _grammar(
    ask: Ask, tokenizer: Tokenizer, model: ModelInfo
) -> tuple[str | None, tuple[str, ...]]:
    """Make the grammar of the output, compiled once to see that it can be; name what it lacks."""
    constraint, tools = ask.constraint, ask.tools
    if not model.eos_token_ids:
        if tools and not tools.is_required and constraint is None:
            return None, ()  # free text, in which calls are found if they come
        if constraint or tools:
            raise unsupported(
                constraint.param if constraint else "tools",
                "is not supported by this model: it has no end-of-text id",
            )
    answer = constraint.grammar() if constraint else None
    return _calls_grammar(tools, answer, tokenizer, model) if tools else (answer, ())


def _calls_grammar(
    tools: Tools, answer: str | None, tokenizer: Tokenizer, model: ModelInfo
) -> tuple[str | None, tuple[str, ...]]:
    """Make the grammar of calls: with the schemas, without their faults, or with any arguments.

    Raises:
        RequestError: calls must match schemas that cannot be enforced.
    """
    compiled = partial(Tools.grammar, output_format=model.output_format, tokenizer=tokenizer)
    try:
        return compiled(tools, answer=answer), ()
    except Unreadable:
        mended, left_out = tools.mended()
    has_any = model.output_format.tools.syntax.style == "json"
    tries = [(mended, left_out), *([(mended.loosened(), ("tools.parameters",))] if has_any else [])]
    for these, names in tries:
        try:
            return compiled(these, answer=answer), names
        except Unreadable as error:
            failure = error
    if tools.is_required or answer is not None:
        raise invalid_value("tools", f"cannot be compiled: {failure}") from failure
    return None, ("tools.parameters",)


def _echo(ask: Ask, tokenizer: Tokenizer, prompt: str | list[int]) -> PromptEcho:
    """Repeat a text as it was, token ids as their text, and of a chat its last message."""
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


def _check_echoes(ask: Ask, prompts: list[str | list[int]], ids: list[list[int]]) -> None:
    """Refuse a body that would be repeated many times over: choices cost few words."""
    num_chars = ask.num_choices * sum(map(len, prompts)) if ask.is_echo else 0
    if num_chars > MAX_ECHOED_CHARS:
        why = f"repeats {num_chars:,} characters in all choices, at most {MAX_ECHOED_CHARS:,}"
        raise invalid_value("echo", why)
    told = (ask.prompt_logprobs, ask.logprobs if ask.is_echo else None)
    num_each = sum(1 + each for each in told if each is not None)
    num_logprobs = ask.num_choices * num_each * sum(map(len, ids))
    if num_logprobs > MAX_ECHOED_LOGPROBS:
        why = (
            f"tells {num_logprobs:,} log-probabilities of prompts, at most {MAX_ECHOED_LOGPROBS:,}"
        )
        raise invalid_value("echo" if ask.is_echo else "prompt_logprobs", why)


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
