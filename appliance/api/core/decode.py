"""Decode a body to what its API asks for."""

from __future__ import annotations

from functools import partial

from appliance.api.core.ask import Ask
from appliance.api.core.endpoint import Asked, NothingToGenerate
from appliance.api.core.enter import Entry
from appliance.json.fields import decode_object, invalid_value


async def decode(entry: Entry) -> Asked:
    """Decode and validate a body; refuse more choices than the queue would take.

    Raises:
        NothingToGenerate: it only loads or unloads a model.
        RequestError: names the field that is wrong.
    """
    try:
        slow = entry.endpoint.slow_words
        is_quick = slow is None or slow.search(entry.body) is None
        return await entry.run(partial(_decoded, entry), is_quick=is_quick)
    except NothingToGenerate as ended:
        entry.keep_loaded(ended.keep_alive_s)
        raise


def _decoded(entry: Entry) -> Asked:
    endpoint, appliance = entry.endpoint, entry.appliance
    fields = endpoint.read(decode_object(entry.body), entry.http, entry.replayed)
    ask = endpoint.decode(fields, entry.http, entry.replayed)
    _check_choices(ask, appliance.max_per_request, appliance.max_tokens_per_request)
    return Asked(ask, fields)


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
