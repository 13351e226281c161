"""The daemon's two doors: the Unix socket and loopback TCP."""

from __future__ import annotations

import openai
import pytest

from tests.daemons import ALONE, make_keys


def test_tcp_without_keys_is_refused_before_anything_starts(start_daemon, tiny_llama):
    daemon = start_daemon("--listen", "127.0.0.1:0", model=tiny_llama)
    assert daemon.process.wait(120) == 78
    assert "API keys" in daemon.stderr
    assert "penstock keys add" in daemon.stderr


def test_the_official_client_over_tcp(start_daemon, tiny_llama, tmp_path):
    path, keys = make_keys(tmp_path, laptop="user", wall="viewer")
    arguments = ("--listen", "127.0.0.1:0", "--api-keys", str(path))
    daemon = start_daemon(*ALONE, *arguments, model=tiny_llama).wait_ready()
    laptop, wall = (daemon.official_client(keys[name]) for name in ("laptop", "wall"))
    asked = {"model": tiny_llama.name, "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    with laptop, wall:
        whole = laptop.completions.create(**asked)
        chunks = list(laptop.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert wall.models.list().data[0].id == tiny_llama.name
        with pytest.raises(openai.PermissionDeniedError, match="viewer"):
            wall.completions.create(**asked)
        with daemon.official_client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert {row["user"] for row in daemon.log_rows()} == {"key:laptop"}
    assert keys["laptop"] not in str(daemon.log_rows())
