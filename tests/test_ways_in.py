"""The daemon's two doors: the Unix socket and loopback TCP."""

from __future__ import annotations

import re

import openai
import pytest

from appliance.http.keys import new_key


def make_keys(folder, **role_by_name):
    """A file of fresh keys, and the keys by name."""
    keys, lines = {}, []
    for name, role in role_by_name.items():
        keys[name], line = new_key(name, role)
        lines.append(line)
    path = folder / "api-keys"
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path, keys


def client_of(daemon, key):
    (url,) = re.findall(r"ready on .*(http://127\.0\.0\.1:\d+)", daemon.stderr)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_tcp_without_keys_is_refused_before_anything_starts(start_daemon, tiny_llama):
    daemon = start_daemon("--listen", "127.0.0.1:0", model=tiny_llama)
    assert daemon.process.wait(30) == 78
    assert "API keys" in daemon.stderr
    assert "penstock keys new" in daemon.stderr


def test_the_official_client_over_tcp(start_daemon, tiny_llama, tmp_path):
    path, keys = make_keys(tmp_path, laptop="user", wall="viewer")
    arguments = ("--listen", "127.0.0.1:0", "--api-keys", str(path))
    daemon = start_daemon(*arguments, model=tiny_llama).wait_ready()
    daemon.wait_for(lambda: "ready on" in daemon.stderr)
    laptop, wall = (client_of(daemon, keys[name]) for name in ("laptop", "wall"))
    asked = {"model": tiny_llama.name, "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    with laptop, wall:
        whole = laptop.completions.create(**asked)
        chunks = list(laptop.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert wall.models.list().data[0].id == tiny_llama.name
        with pytest.raises(openai.PermissionDeniedError, match="viewer"):
            wall.completions.create(**asked)
        with client_of(daemon, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert {row["user"] for row in daemon.log_rows()} == {"key:laptop"}
    assert keys["laptop"] not in str(daemon.log_rows())
