"""/v1/responses with a memory, and as Codex speaks it."""

from __future__ import annotations

import threading

import httpx
import msgspec
import openai
import pytest

from appliance.api.responses import store as store_file
from appliance.api.responses.store import MAX_CONVERSATION_BYTES, KeptItem, ResponseStore
from appliance.api.routes import build_app
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import DOORS, says, serving
from tests.appliance.peers import ALICE, BOB, client_of
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance, until

END = "!"
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Run it.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'


@pytest.fixture
def appliance():
    template = CHAT_TEMPLATE + "{# <think> #}"
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    appliance.model = appliance.model.__class__("m", 8192, 300, (), None, 0)
    return appliance


@pytest.fixture(params=DOORS)
async def served(request, appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock", request.param) as served:
        yield served


async def test_a_conversation_goes_on_from_an_id(served, appliance):
    says(appliance, "Paris" + END)
    client = served.openai
    first = await client.responses.create(model="m", input="The capital of France?")
    second = await client.responses.create(
        model="m", input="And of Italy?", previous_response_id=first.id
    )
    prompt = appliance.submitted[1].prompt_text
    for said in ("The capital of France?", "Paris", "And of Italy?"):
        assert said in prompt
    assert second.previous_response_id == first.id
    assert (await client.responses.retrieve(second.id)).output_text == "Paris"
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="x", previous_response_id=second.id)
    assert refused.value.code == "previous_response_not_found"


async def test_a_streamed_response_is_kept_unless_its_client_does_not_want_that(served, appliance):
    says(appliance, "Paris" + END)
    for store in (True, False):
        stream = await served.openai.responses.create(
            model="m", input="x", stream=True, store=store
        )
        events = [event async for event in stream]
        reply = await served.http.get(f"/v1/responses/{events[-1].response.id}")
        assert reply.status_code == (200 if store else 404)
        assert events[-1].response.store is store


async def test_a_response_is_its_owners(appliance):
    says(appliance, "Paris" + END)
    app = build_app(appliance)
    async with client_of(appliance, ALICE, app) as client:
        made = (await client.post("/v1/responses", json={"input": "x"})).json()
        assert (await client.get(f"/v1/responses/{made['id']}")).json() == made
    async with client_of(appliance, BOB, app) as client:
        gone = await client.get(f"/v1/responses/{made['id']}")
        assert gone.status_code == 404
        assert f"there is no response `{made['id']}`" in gone.json()["error"]["message"]
        assert (await client.delete(f"/v1/responses/{made['id']}")).status_code == 404
        body = {"input": "x", "previous_response_id": made["id"]}
        assert (await client.post("/v1/responses", json=body)).status_code == 400
    async with client_of(appliance, ALICE, app) as client:
        assert (await client.get(f"/v1/responses/{made['id']}")).json() == made


async def test_codex_is_understood(served, appliance):
    """A second turn of Codex 0.146: items, tools of each kind, encrypted reasoning."""
    says(appliance, "<think>\nI look.\n</think>\n\n" + CALL + END)
    body = {
        "model": "m",
        "instructions": "You are Codex.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "fix it"}],
            },
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "Look first."}],
                "encrypted_content": None,
            },
            {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command": ["cat"]}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "a file"},
            {
                "type": "custom_tool_call",
                "name": "apply_patch",
                "input": "*** Begin Patch",
                "call_id": "call_2",
                "status": "completed",
            },
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        ],
        "tools": [
            SHELL,
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x": "y"},
    }
    async with httpx.AsyncClient(
        base_url=served.url,
        transport=httpx.AsyncHTTPTransport(uds=served.uds),
        headers={"authorization": f"Bearer {served.key}"},
    ) as client:
        reply = await client.post("/v1/responses", json=body)
    assert reply.status_code == 200
    ignored = reply.headers["x-penstock-ignored"].split(", ")
    assert {one for one in ignored if one.startswith("tools")} == {"tools.1", "tools.2"}
    prompt = appliance.submitted[0].prompt_text
    for said in ("You are Codex.", "fix it", "a file", "*** Begin Patch", "Done"):
        assert said in prompt
    assert '"local_shell"' not in prompt
    kinds = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    assert "response.reasoning_summary_text.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    assert kinds[-1] == "response.completed"


async def test_reasoning_is_an_item_of_its_own(served, appliance):
    says(appliance, "<think>\nwell\n</think>\n\nhello" + END)
    whole = await served.openai.responses.create(model="m", input="x")
    thought, message = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "well")
    assert message.content[0].text == "hello"
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    stream = await served.openai.responses.create(model="m", input="x", stream=True)
    last = [event async for event in stream][-1]
    assert [item.type for item in last.response.output] == ["reasoning", "message"]


# The store


def written(*items):
    return [KeptItem.of(item) for item in items]


def kept(store, number, text="x", owner="ann"):
    store.add(owner, {"id": f"resp_{number}", "output": []}, written({"text": text}))


def test_the_oldest_go_beyond_the_bounds():
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for number in range(5):
        kept(store, number)
    assert [one.read() for one in store.items("resp_4", "ann")] == [{"text": "x"}]
    for number in (0, 1):
        with pytest.raises(RequestError):
            store.items(f"resp_{number}", "ann")
    kept(store, 5, "y" * 950)
    with pytest.raises(RequestError):
        store.items("resp_4", "ann")
    assert store.items("resp_5", "ann")
    kept(store, 6, "y" * 2000)
    with pytest.raises(RequestError):
        store.items("resp_6", "ann")


def test_what_is_used_again_stays():
    store = ResponseStore(max_responses=2)
    kept(store, 0)
    kept(store, 1)
    store.items("resp_0", "ann")
    kept(store, 2)
    assert store.items("resp_0", "ann")
    with pytest.raises(RequestError):
        store.response("resp_1", "ann")


def test_what_is_forgotten_makes_room():
    store = ResponseStore(max_bytes=100)
    for number in range(50):
        kept(store, number)
        store.delete(f"resp_{number}", "ann")
    kept(store, 99)
    assert store.response("resp_99", "ann")


def test_who_asks_for_one_item_or_for_all_as_they_are_has_no_other_read(monkeypatch):
    store, decode, sizes = ResponseStore(), msgspec.json.decode, []
    items = [{"id": "small"}, {"id": "large", "text": "x" * 10_000}]
    store.add("ann", {"id": "a", "output": [{"id": "out"}]}, written(*items))
    monkeypatch.setattr(
        msgspec.json, "decode", lambda data: sizes.append(len(data)) or decode(data)
    )
    assert store.item("small", "ann").read() == {"id": "small"}
    assert [decode(one.data) for one in store.asked("a", "ann")] == items
    store.delete("a", "ann")
    assert sizes == [len('{"id":"small"}')]


def test_a_conversation_that_is_too_long_is_not_kept_and_costs_nobody_else_theirs():
    store = ResponseStore()
    kept(store, 0)
    kept(store, 1, "y" * MAX_CONVERSATION_BYTES)
    with pytest.raises(RequestError):
        store.items("resp_1", "ann")
    assert store.items("resp_0", "ann")


# Items by their ids


async def test_an_item_is_found_by_its_id(served, appliance):
    """As Vercel's SDK sends an earlier answer."""
    says(appliance, "Paris" + END)
    first = (await served.http.post("/v1/responses", json={"input": "France?"})).json()
    (asked,) = (await served.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    references = [asked["id"], first["output"][0]["id"]]
    items = [{"type": "item_reference", "id": one} for one in references]
    items[0] = {"id": asked["id"]}
    again = {"input": [*items, {"role": "user", "content": "Italy?"}]}
    second = await served.http.post("/v1/responses", json=again)
    assert second.status_code == 200, second.text
    assert "x-penstock-ignored" not in second.headers
    prompt = appliance.submitted[1].prompt_text
    for said in ("France?", "Paris", "Italy?"):
        assert said in prompt
    kept = (await served.http.get(f"/v1/responses/{second.json()['id']}/input_items")).json()
    assert [one["id"] for one in kept["data"]][1:] == references[::-1]


async def test_few_words_do_not_refer_to_many_megabytes(served, appliance, monkeypatch):
    monkeypatch.setattr(store_file, "MAX_CONVERSATION_BYTES", 7000)
    says(appliance, "Paris" + END)
    first = (await served.http.post("/v1/responses", json={"input": "x" * 2000})).json()
    (asked,) = (await served.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    reference = {"type": "item_reference", "id": asked["id"]}
    for count, status in ((2, 200), (4, 400)):
        body = {"input": [*[reference] * count, {"role": "user", "content": "Italy?"}]}
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            reply = await served.http.post(path, json=body)
            assert reply.status_code == status, reply.text


async def test_a_conversation_that_goes_on_is_read_once_and_beside_the_loop(
    served, appliance, monkeypatch
):
    says(appliance, "Paris" + END)
    read, threads = KeptItem.read, []
    monkeypatch.setattr(
        KeptItem, "read", lambda one: threads.append(threading.current_thread()) or read(one)
    )
    first = (await served.http.post("/v1/responses", json={"input": "x"})).json()
    body = {"input": "y", "previous_response_id": first["id"]}
    assert (await served.http.post("/v1/responses", json=body)).status_code == 200
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_items_are_forgotten_with_the_last_response_that_holds_them():
    store = ResponseStore(max_responses=2)
    for name in ("a", "b", "c"):
        items = written({"id": "shared"}, {"id": f"item {name}"})
        store.add("ann", {"id": name, "output": []}, items)
    assert store.item("item a", "ann") is None
    assert store.item("item b", "ann").read() == {"id": "item b"}
    assert store.item("shared", "ann").read() == {"id": "shared"}
    assert store.item("shared", "bob") is None
    for name in ("b", "c"):
        store.delete(name, "ann")
    assert store.item("shared", "ann") is None
    assert store._num_bytes == 0


def test_a_response_that_is_kept_again_takes_its_own_place():
    store = ResponseStore()
    for text in ("long" * 100, "short"):
        store.add("ann", {"id": "a", "output": [], "text": text}, [])
    once = ResponseStore()
    once.add("ann", {"id": "a", "output": [], "text": "short"}, [])
    assert store._num_bytes == once._num_bytes


# Behind a reply


async def test_a_background_response_is_queued_at_once_and_read_later(served, appliance):
    says(appliance, "Paris" + END)
    appliance.gate.clear()
    body = {"input": "x", "background": True}
    reply = await served.http.post("/v1/responses", json=body)
    queued = reply.json()
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    assert reply.headers["x-penstock-ends-with"] == "daemon"
    assert queued["usage"] is None
    place = f"/v1/responses/{queued['id']}"
    assert (await served.http.get(place)).json()["status"] == "in_progress"
    refused = await served.http.delete(place)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "response_not_ended")
    appliance.gate.set()
    await until(lambda: appliance.closed)
    ended = (await served.http.get(place)).json()
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "Paris"
    assert ended["usage"]["output_tokens"] > 0


async def test_a_background_response_names_what_has_no_effect(served, appliance):
    body = {"input": "x", "background": True, "tools": [{"type": "computer_use_preview"}]}
    reply = await served.http.post("/v1/responses", json=body)
    assert reply.headers["x-penstock-ignored"] == "tools.0"
    await until(lambda: appliance.closed)


async def test_a_background_response_is_cancelled(served, appliance):
    appliance.gate.clear()
    body = {"input": "x", "background": True}
    queued = (await served.http.post("/v1/responses", json=body)).json()
    place = f"/v1/responses/{queued['id']}"
    cancelled = (await served.http.post(f"{place}/cancel")).json()
    assert (cancelled["id"], cancelled["status"]) == (queued["id"], "cancelled")
    appliance.gate.set()
    await until(lambda: appliance.closed)
    assert (await served.http.get(place)).json()["status"] == "cancelled"
    assert (await served.http.post(f"{place}/cancel")).json()["status"] == "cancelled"
    assert (await served.http.delete(place)).json()["deleted"]
    assert (await served.http.get(place)).status_code == 404


async def test_a_background_response_that_fails_says_so(served, appliance):
    appliance.fail_after = 1
    body = {"input": "x", "background": True}
    queued = (await served.http.post("/v1/responses", json=body)).json()
    await until(lambda: appliance.closed)
    ended = (await served.http.get(f"/v1/responses/{queued['id']}")).json()
    assert ended["status"] == "failed"
    assert ended["error"]["code"] == "server_error"


async def test_a_background_response_that_is_too_long_to_be_kept_says_so(
    served, appliance, monkeypatch
):
    monkeypatch.setattr(store_file, "MAX_CONVERSATION_BYTES", 12_000)
    says(appliance, "Paris " * 1200 + END)
    body = {"input": "x", "background": True}
    queued = (await served.http.post("/v1/responses", json=body)).json()
    await until(lambda: appliance.closed)
    ended = (await served.http.get(f"/v1/responses/{queued['id']}")).json()
    assert (ended["status"], ended["error"]["code"]) == ("failed", "response_too_long")
    assert ended["output"] == []
    unread = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 12_000}
    body["input"] = [unread, {"role": "user", "content": "x"}]
    refused = await served.http.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert len(appliance.submitted) == 1
