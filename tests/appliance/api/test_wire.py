""""""

from __future__ import annotations

from starlette.requests import Request

from appliance.api.wire import Arrival, arrival_of, client_request_id
from appliance.request import Peer


async def write_part(part: bytes) -> None:
    """Nothing is streamed here."""


def test_a_request_finds_what_was_kept_for_it():
    scope = {"type": "http", "headers": []}
    arrival = Arrival(write_part, Peer(key="ann"))
    arrival.keep(scope)
    assert arrival_of(Request(scope)) is arrival
    assert arrival.is_known()


def test_each_has_an_id_of_its_own_which_says_what_is_asked():
    first, second = Arrival(write_part), Arrival(write_part)
    assert first.request_id != second.request_id
    assert first.request_id.startswith("req-")
    first.generates("cmpl-")
    assert first.request_id.startswith("cmpl-")


def test_its_time_begins_when_its_body_is_whole():
    arrival = Arrival(write_part)
    before = arrival.arrived_ns
    arrival.has_body()
    assert arrival.arrived_ns > before
    assert arrival.received_at.endswith("Z")


def test_a_clients_own_id_is_kept_without_what_could_harm():
    scope = {"type": "http", "headers": [(b"x-request-id", b"job 7<script>/")]}
    assert client_request_id(Request(scope)) == "job7script"
    assert client_request_id(Request({"type": "http", "headers": []})) is None
