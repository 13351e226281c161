"""The page at /: open to every browser, and nothing else is; what it shows is text."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re

import httpx
import msgspec
import pytest
from msgspec import structs

from appliance.http.listeners import bind_tcp
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import one_key, started, url_of
from tests.tiny_tokenizers import CHATML, byte_level
from tests.tui.frames import busy
from tests.worlds.browser import browser
from tests.worlds.daemon_parts import FakeAppliance


class Watched(FakeAppliance):
    """One that has whole frames."""

    def frame_json(self) -> bytes:
        frame = structs.replace(busy(self.frame_seq), model=self.model.model_id)
        return msgspec.json.encode(frame)


HTML = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture
async def served(tmp_path):
    """A server on TCP whose model repeats its prompt, a client, and a key."""
    key, policy = one_key(tmp_path, "ann")
    listeners = bind_tcp("127.0.0.1", 0)
    appliance = Watched(Tokenizer(byte_level(), chat_template=CHATML), max_model_len=8192, burst=40)
    async with (
        started(appliance, listeners, policy) as server,
        httpx.AsyncClient(base_url=url_of(listeners[0]), verify=False) as client,
    ):
        yield server, client, key


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_browser_gets_the_page_without_a_key(served, method):
    _server, client, _key = served
    reply = await client.request(method, "/", headers=HTML)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert (b"<title>Penstock</title>" in reply.content) == (method == "GET")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/v1/models"), ("GET", "/v1/penstock/state"), ("GET", "/metrics")),
        *(("GET", "//"), ("GET", "/page.html"), ("GET", "/index.html")),
        *(("POST", "/"), ("DELETE", "/"), ("PUT", "/"), ("GET", "/v1")),
    ],
)
async def test_no_other_path_is_open_to_a_browser(served, method, path):
    server, client, _key = served
    answers = []
    for has_page in (True, False):
        server.policy = dataclasses.replace(server.policy, has_page=has_page)
        url = httpx.URL(str(client.base_url), raw_path=path.encode())
        reply = await client.request(method, url, headers=HTML)
        answers.append(reply.status_code)
    assert answers == [401, 401]


async def test_the_page_can_be_turned_off_and_other_programs_get_ollamas_answer(served):
    server, client, key = served
    assert (await client.get("/")).status_code == 401
    shown = {"authorization": f"Bearer {key}"}
    assert (await client.get("/", headers=shown)).text == "Ollama is running"
    server.policy = dataclasses.replace(server.policy, has_page=False)
    assert (await client.get("/", headers=HTML)).status_code == 401
    assert (await client.get("/", headers=HTML | shown)).text == "Ollama is running"


async def test_the_policy_names_the_hash_of_all_that_runs_and_nothing_is_loaded(served):
    _server, client, _key = served
    reply = await client.get("/", headers=HTML)
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r'https?://|\bsrc=|\bstyle=|\bon\w+="', reply.text)
    writes_markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\("
    assert not re.search(writes_markup, reply.text)


HOSTILE = [
    *(f"<{tag} onerror=alert(1) onload=alert(1) src=x>" for tag in
      ("img", "svg", "iframe", "video", "body", "object", "embed", "input", "audio", "link")),
    *(f"<script{attributes}>window.hit=1</script>" for attributes in
      ("", " type=module", " src=//evil.example/x.js", " async", "/x")),
    *(f"{quote}{close}><script>window.hit=1</script>" for quote in ("", '"', "'", "`") for close in
      ("</pre>", "</div>", "</script>", "</style>", "-->")),
    *("javascript:window.hit=1", "[x](javascript:window.hit=1)", "![x](//evil.example/y.png)"),
    *("<a href=javascript:window.hit=1>x</a>", "<base href=//evil.example/>"),
    *("<meta http-equiv=refresh content=0>", "<form action=//evil.example><button>x"),
    *("<style>*{display:none}</style>", "<template><script>window.hit=1</script>"),
    *("\u202egnp.exe", "\u2066\u2067abc\u2069", "\u05d0\u05d1\u05d2 abc"),
    *("\u0001\u001b[2J", "\ufeff\ufffex"),
    *("x" * 3000, "\u0301" * 300, "\n" * 300 + "x", " " * 1000 + "x", "\t" * 200 + "x"),
    *("${window.hit=1}", "{{constructor.constructor('window.hit=1')()}}"),
    *("data: [DONE]", '"}]}\n\ndata: [DONE]', "data:text/html,<script>window.hit=1</script>"),
    *("</title><script>window.hit=1</script>", "&lt;script&gt;", "<!--", "]]>"),
]  # fmt: skip


async def enter(tab, client, key):
    """Open the page, and give it a key."""
    await tab.open(f"{client.base_url}")
    await tab.until("!at('key-form').hidden")
    await tab.run(f"(at('key').value = {json.dumps(key)}, at('key-form').requestSubmit())")
    await tab.until("at('key-form').hidden && model === 'fake/tiny-model'")


async def ask(tab, text):
    await tab.run(f"(at('text').value = {json.dumps(text)}, ask())")
    await tab.until("sending === null")


async def test_a_chat_in_the_browser(served, tmp_path):
    """A key, a reply, its end by Escape, another one, a reload, and answers made to do harm."""
    server, client, key = served
    async with browser(tmp_path / "browser") as tab:
        await enter(tab, client, key)

        assert await tab.run("at('greeting').innerText.includes('fake/tiny-model answers here')")
        await tab.run("at('max_tokens').value = 20")
        await tab.run("at('example').click()")
        await tab.until("sending === null")
        assert await tab.run("turns.map((turn) => turn.role)") == ["user", "assistant"]
        assert await tab.run("at('greeting').hidden")
        await tab.run("at('clear').click()")
        assert not await tab.run("at('greeting').hidden")

        appliance = server._app.state.appliance
        appliance.interval_s = 0.05
        await tab.run("at('max_tokens').value = 8000")
        await tab.run("(at('text').value = 'forever', ask())")
        await tab.until("turns.at(-1).content.length > 100")
        await tab.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        await tab.until("sending === null")
        assert await tab.run("[turns.at(-1).note, turns.at(-1).failed]") == ["stopped", False]

        appliance.interval_s, appliance.burst = 0.0, 1000
        await tab.run("at('max_tokens').value = 200")
        await tab.run("at('again').click()")
        await tab.until("sending === null")
        assert await tab.run("turns.length") == 2
        await tab.open(f"{client.base_url}")
        assert await tab.run("turns.length") == 2
        await tab.until("model === 'fake/tiny-model'")

        fenced = "a\n```py\nx = 1\n```\nb"
        await tab.run(f"made = written({json.dumps(fenced)}), 0")
        parts = "[made.textContent, made.children[1].textContent]"
        assert await tab.run(parts) == [fenced, "x = 1\n"]

        assert len(HOSTILE) >= 60
        await tab.run("at('clear').click()")
        await tab.run("at('max_tokens').value = 800")
        for text in HOSTILE:
            await ask(tab, text)
            shown, said = await tab.run(
                "[at('turns').lastChild.querySelector('.text').textContent, turns.at(-1).content]"
            )
            assert shown == said
            assert not await tab.run(
                "at('turns').querySelector('script,img,svg,iframe,a,form,style')"
            )
            await tab.run("at('clear').click()")
        assert await tab.run("typeof hit") == "undefined"
        for width in (390, 820, 1280):
            await tab.size(width, 800)
            await ask(tab, "x" * 3000)
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert tab.problems == []


async def test_figures_of_another_version_are_told_and_the_page_goes_on(served, tmp_path):
    server, client, key = served
    appliance = server._app.state.appliance
    whole = json.loads(appliance.frame_json())
    async with browser(tmp_path / "browser") as tab:
        await tab.open(f"{client.base_url}")
        await tab.run(f"(at('key').value = {json.dumps(key)}, at('key-form').requestSubmit())")
        for wrong in ({"alerts": None}, {"queue": None}, {"requests": [None]}):
            appliance.frame_json = lambda wrong=wrong: json.dumps(whole | wrong).encode()
            await tab.until("at('state').textContent.includes('reload the page')")
            del appliance.frame_json
            await tab.until("at('state').className === 'good'")
        assert tab.problems == []


async def test_a_missing_key_is_asked_for_where_it_is_typed(served, tmp_path):
    _, client, _ = served
    async with browser(tmp_path / "browser") as tab:
        await tab.open(f"{client.base_url}")
        await tab.until("!at('key-form').hidden")
        assert await tab.run("document.activeElement.id") == "key"
        await ask(tab, "too early")
        assert "Bearer" not in await tab.run("turns.at(-1).note")


async def test_what_neither_reader_nor_model_sets_is_sampled_as_in_a_chat(served, tmp_path):
    _, client, key = served
    async with browser(tmp_path / "browser") as tab:
        await enter(tab, client, key)
        unset = "JSON.parse(body({temperature: {source: 'default'}, top_p: {source: 'model'}}))"
        assert await tab.run(f"[{unset}.temperature, {unset}.top_p]") == [0.6, None]
        await tab.run("at('temperature').value = 0")
        assert await tab.run(f"{unset}.temperature") == 0
        await tab.run("at('max_tokens').value = 5")
        await ask(tab, "hello")
        assert await tab.run("turns.at(-1).failed") is None
