"""The verbs on API keys find the file that a start would read."""

from __future__ import annotations

from pathlib import Path

from appliance.http.api_keys import add_key
from tests.appliance.cli_process import penstock, user_environ


def test_keys_are_listed_from_the_file_in_use_unless_one_is_named(tmp_path: Path) -> None:
    environ, file = user_environ(tmp_path), tmp_path / "keys"
    assert penstock(environ, "keys", "list").returncode == 2
    add_key(file, "ana", "user")
    named = penstock(environ, "keys", "list", "--file", str(file), "-o", "json")
    found = penstock(environ | {"PENSTOCK_API_KEYS": str(file)}, "keys", "list", "-o", "json")
    assert '"ana"' in named.stdout
    assert (found.returncode, found.stdout) == (0, named.stdout)
