"""Hand a prepared request to the queue, and open the reply that its tokens go to."""

from __future__ import annotations

import copy
import dataclasses
import time

from starlette.requests import ClientDisconnect

from appliance.api.core.ask import Ask
from appliance.api.core.endpoint import Asked
from appliance.api.core.enter import Entry
from appliance.api.core.prepare import Prepared
from appliance.api.core.respond import Reply, ReplyForm
from appliance.api.core.wire import KeptWords, arrival_of, client_request_id
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journaled_inbox import JournaledInbox
from engine.errors import Unavailable
from engine.scheduler.sequences.sequence import Sequence, Stamps


def admit(entry: Entry, asked: Asked, prepared: Prepared) -> Reply:
    """Put a request in the queue; the reply must be sent from then on.

    Raises:
        ClientDisconnect: the client of a dead daemon's request has left.
        Unavailable: the daemon drains.
        QueueFull: too much waits.
        RequestError: no worker can serve it.
    """
    if prepared.ignored:
        ignored = (*asked.ask.ignored, *prepared.ignored)
        asked = asked._replace(ask=dataclasses.replace(asked.ask, ignored=ignored))
    ask, journal, endpoint = asked.ask, entry.journal, entry.endpoint
    request = _request(entry, ask, prepared)
    if journal is not None and journal.is_given_up:
        raise ClientDisconnect
    form = endpoint.form(asked, request, entry.http, entry.replayed)
    echoes, refusal = prepared.echoes, endpoint.refusal
    reply = Reply(entry.http, ask, request, echoes, form, refusal, entry.replayed)
    if journal is not None and ask.is_background:
        journal.close()  # no socket waits for it: it ends with this daemon
        journal = None
    if journal is not None:
        request.inbox = JournaledInbox(journal, request)
    entry.appliance.submit(request)
    if journal is not None:
        arrival_of(entry.http).keep(journal, _kept_words(request, form), entry.body)
    entry.keep_loaded(ask.keep_alive_s)
    return reply


def _request(entry: Entry, ask: Ask, prepared: Prepared) -> Request:
    """Make the request with its sequences, as the queue takes it."""
    http, appliance, arrival = entry.http, entry.appliance, arrival_of(entry.http)
    # What came before it entered is of the queue: the two stages change places.
    tokenized_ns = time.monotonic_ns() - (entry.entered_ns - arrival.arrived_ns)
    sequences = []
    for index, spec in enumerate(prepared.specs):
        place, choice = divmod(index, ask.num_choices)
        prefix = prepared.prefixes[place]
        sequences.append(
            Sequence(
                seq_id=appliance.next_seq_id(),
                request_id=arrival.request_id,
                index=index,
                prompt_token_ids=prepared.prompts[place],
                spec=spec,
                stamps=Stamps(arrived_ns=arrival.arrived_ns, tokenized_ns=tokenized_ns),
                prefix=prefix.copy() if prefix is not None and choice else prefix,
                branches=prepared.branches,
            )
        )
    is_cut = any(spec.sampling.max_tokens < (ask.max_tokens or 0) for spec in prepared.specs)
    return Request(
        request_id=arrival.request_id,
        endpoint=http.url.path,
        model=appliance.model.model_id,
        peer=arrival.peer,
        is_stream=ask.is_stream,
        received_at=arrival.received_at,
        sequences=sequences,
        prompt_text=prepared.text,
        client_request_id=client_request_id(http),
        swap_wait_ms=arrival.swap_wait_ns / 1e6,
        message_changes=prepared.changes,
        asked_max_tokens=ask.max_tokens if is_cut else None,
    )


def _kept_words(request: Request, form: ReplyForm) -> KeptWords:
    """Write the events that a later daemon may send in this one's place."""
    failure = ping = b""
    if request.is_stream:
        about = "the daemon was restarted and cannot continue this reply"
        failure = copy.copy(form).failure(Unavailable(about, code="daemon_died"))
        ping = form.alive(None)
    return KeptWords(request.request_id, request.model, failure, ping)
