"""Describe a POST that generates: how its body is decoded, and what its replies look like."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from appliance.api.core.ask import Ask
from appliance.api.core.respond import Reply, ReplyForm
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import Json
from engine.errors import RequestError


class Asked(NamedTuple):
    """A decoded body."""

    ask: Ask
    fields: Json
    """The body's own words."""


class NothingToGenerate(Exception):
    """A request that only loads or unloads a model; it carries the whole reply."""

    def __init__(self, reply: Json, keep_alive_s: float | None) -> None:
        super().__init__("nothing to generate")
        self.reply = reply
        self.keep_alive_s = keep_alive_s

    def told(self, *, is_unloaded: bool) -> Json:
        """Return the reply, which says what becomes of the model."""
        return {**self.reply, "done_reason": "unload" if is_unloaded else "load"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One POST that generates."""

    id_prefix: str
    """Of its requests' ids."""
    decode: Callable[[Json, HttpRequest, Replayed], Ask]
    """Validates a body; called in a thread where that is large, or slow."""
    form: Callable[[Asked, Request, HttpRequest, Replayed], ReplyForm]
    """What its replies look like."""
    slow_words: re.Pattern[bytes] | None = None
    """Words of a small body for which reading it may take milliseconds; None: nothing does."""
    refusal: Callable[[RequestError], RequestError] = lambda error: error
    """A refusal of what was asked, in words that its clients know."""
    read: Callable[[Json, HttpRequest, Replayed], Json] = lambda fields, _http, _replayed: fields
    """Completes a body by what is kept here."""
    unloads: Callable[[bytes, str], NothingToGenerate | None] = lambda _body, _name: None
    """Answers a body that only unloads a model, given its name; None: it asks for more."""
    respond: Callable[[Reply], Reply | Response] = lambda reply: reply
    """Answers an admitted request, with its reply or before that."""
