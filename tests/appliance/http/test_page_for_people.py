"""The page asks for a key in its reader's words, and samples as `penstock chat` does."""

from __future__ import annotations

import json

from tests.appliance.http import test_page
from tests.worlds.browser import browser

served = test_page.served


async def test_a_missing_key_is_asked_for_where_it_is_typed(served, tmp_path):
    _, client, _ = served
    async with browser(tmp_path / "browser") as tab:
        await tab.open(f"{client.base_url}")
        await tab.until("!at('key-form').hidden")
        assert await tab.run("document.activeElement.id") == "key"
        await test_page.ask(tab, "too early")
        assert "Bearer" not in await tab.run("turns.at(-1).note")


async def test_what_neither_reader_nor_model_sets_is_sampled_as_in_a_chat(served, tmp_path):
    _, client, key = served
    async with browser(tmp_path / "browser") as tab:
        await tab.open(f"{client.base_url}")
        await tab.until("!at('key-form').hidden")
        await tab.run(f"(at('key').value = {json.dumps(key)}, at('key-form').requestSubmit())")
        await tab.until("model === 'fake/tiny-model'")
        unset = "JSON.parse(body({temperature: {source: 'default'}, top_p: {source: 'model'}}))"
        assert await tab.run(f"[{unset}.temperature, {unset}.top_p]") == [0.6, None]
        await tab.run("at('temperature').value = 0")
        assert await tab.run(f"{unset}.temperature") == 0
        await tab.run("at('max_tokens').value = 5")
        await test_page.ask(tab, "hello")
        assert await tab.run("turns.at(-1).failed") is None
