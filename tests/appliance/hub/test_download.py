"""A model from a hub on loopback into the cache, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.appliance.cli_process import ROOT, Typist, penstock, user_environ
from tests.appliance.model_folder import make_model
from tests.worlds.hub_server import Hub, Repository, folder_files, serving

SIZES = {"vocab_size": 4096, "hidden_size": 64}
WEIGHTS = "model.safetensors"
FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    make_model(folder, **SIZES)
    with (folder / WEIGHTS).open("r+b") as file:  # else all pieces look alike
        file.seek(-2_000_000, os.SEEK_END)
        file.write(os.urandom(2_000_000))
    return folder


@pytest.fixture
def hub(source: Path) -> Iterator[Hub]:
    extra: dict[str, bytes | Path] = {"README.md": b"about", "pytorch_model.bin": b"x" * 9000}
    with serving(owner__name=Repository(folder_files(source) | extra)) as hub:
        yield hub


@pytest.fixture
def environ(tmp_path: Path, hub: Hub) -> dict[str, str]:
    return user_environ(tmp_path) | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "secret"}


def snapshot(home: Path, name: str = "owner--name") -> Path:
    cache = home / ".cache" / "huggingface" / "hub"
    return cache / f"models--{name}" / "snapshots" / ("c" * 40)


def assert_whole(home: Path, source: Path) -> None:
    folder = snapshot(home)
    for path in source.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert not list((folder.parents[1] / "blobs").glob("*.incomplete"))


def test_only_what_serving_needs_comes_and_the_token_stays_here(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    ended = penstock(environ, "models", "pull", "owner/name")
    assert (ended.returncode, ended.stdout.strip()) == (0, str(snapshot(tmp_path)))
    assert_whole(tmp_path, source)
    assert sorted(path.name for path in snapshot(tmp_path).iterdir()) == sorted(
        path.name for path in source.iterdir()
    )
    tokens = {token for path, _, token in hub.asked if "/resolve/" in path or "/api/models" in path}
    assert tokens == {"Bearer secret"}
    assert {token for path, _, token in hub.asked if "/cdn/" in path} == {None}
    num_asked = len(hub.ranges_of(WEIGHTS))
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    assert len(hub.ranges_of(WEIGHTS)) == num_asked  # what is there does not come again


def test_a_model_without_tokenizer_json_comes_with_what_its_loader_reads(
    tmp_path: Path, environ: dict[str, str], source: Path
) -> None:
    files = folder_files(source)
    del files["tokenizer.json"]
    wanted: dict[str, bytes | Path] = {
        "tokenizer.model": FIXTURES / "sentencepiece" / "bpe.model",
        "additional_chat_templates/rag.jinja": b"{{ messages }}",
        "processor_config.json": b"{}",
    }
    left: dict[str, bytes | Path] = {"pytorch_model.bin": b"x" * 9000, "spiece.model": b"x"}
    with serving(owner__pieces=Repository(files | wanted | left)) as hub:
        environ = environ | {"HF_ENDPOINT": hub.url}
        ended = penstock(environ, "models", "pull", "owner/pieces")
        assert (ended.returncode, ended.stdout.strip()) == (
            0,
            str(snapshot(tmp_path, "owner--pieces")),
        )
        there = snapshot(tmp_path, "owner--pieces")
        names = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
        assert names == {*files, *wanted}
        num_asked = len(hub.asked)
    assert penstock(environ, "models", "show", "owner/pieces").returncode == 0
    assert len(hub.asked) == num_asked


def test_a_connection_that_is_cut_twice_goes_on_where_it_was(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    hub.cuts[WEIGHTS] = [700_001, 300_000]
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    assert hub.ranges_of(WEIGHTS) == [None, "bytes=700001-", "bytes=1000001-"]
    assert_whole(tmp_path, source)


def test_a_pull_that_was_killed_is_taken_up_by_the_next(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    hub.chunk_pause = threading.Event()
    command = [sys.executable, "-m", "appliance.hub.download", "owner/name"]
    pulling = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        blobs, deadline = snapshot(tmp_path).parents[1] / "blobs", time.monotonic() + 120
        while not any(path.stat().st_size > 500_000 for path in blobs.glob("*.incomplete")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        pulling.send_signal(signal.SIGKILL)
        pulling.wait()
        hub.chunk_pause.set()
    assert penstock(environ, "models", "show", "owner/name@ccccccc").returncode != 0
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    first, second = hub.ranges_of(WEIGHTS)
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").removesuffix("-")) > 500_000
    assert_whole(tmp_path, source)


def test_a_server_without_ranges_begins_again(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    hub.has_ranges = False
    hub.cuts[WEIGHTS] = [700_000]
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    assert_whole(tmp_path, source)


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    hub.failing = 1
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    assert_whole(tmp_path, source)


def test_wrong_bytes_are_thrown_away_and_named(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    hub.wrong.add(WEIGHTS)
    ended = penstock(environ, "models", "pull", "owner/name")
    assert ended.returncode == 1
    assert f"{WEIGHTS} came with the sum" in ended.stderr
    assert not (snapshot(tmp_path) / WEIGHTS).exists()
    hub.wrong.clear()
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    assert_whole(tmp_path, source)


@pytest.mark.parametrize("way", ["absolute", "up", "commit", "sum", "size"])
def test_nothing_that_a_hub_lists_leads_out_of_the_cache(
    tmp_path: Path, hub: Hub, environ: dict[str, str], way: str
) -> None:
    there, outside = hub.repositories["owner/name"], tmp_path / "outside"
    listing = there.listing
    paths = {"absolute": str(outside), "up": "../" * 7 + "outside"}
    if way in paths:
        there.files["model.safetensors.index.json"] = json.dumps(
            {"weight_map": {"a": paths[way]}}
        ).encode()
        there.files[paths[way]] = there.files.pop(WEIGHTS)
    if way == "commit":
        there.commit = "../" * 6 + "outside"
    changes = {"sum": {"blobId": "../" * 6 + "outside"}, "size": {"size": -1}}
    there.listing = lambda: _changed(listing(), changes.get(way, {}))  # type: ignore[method-assign]
    ended = penstock(environ, "models", "pull", "owner/name")
    assert ended.returncode == 1
    assert "the hub " in ended.stderr
    assert "Traceback" not in ended.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()]
    assert not left


def _changed(listing: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    for row in listing["siblings"]:
        row |= change
    return listing


@pytest.mark.parametrize("siblings", [5, [5], [{"size": 1}]])
def test_a_reply_that_is_no_listing_is_said(
    hub: Hub, environ: dict[str, str], siblings: object
) -> None:
    there = hub.repositories["owner/name"]
    listed = there.listing() | {"siblings": siblings}
    there.listing = lambda: listed  # type: ignore[method-assign]
    ended = penstock(environ, "models", "pull", "owner/name")
    assert ended.returncode == 1
    assert "no list of" in ended.stderr


def test_a_file_without_end_is_cut_at_its_size(
    tmp_path: Path, hub: Hub, environ: dict[str, str]
) -> None:
    hub.endless_bytes = 100_000_000
    ended = penstock(environ, "models", "pull", "owner/name")
    assert ended.returncode == 1
    assert "came with the sum" in ended.stderr or "more bytes arrived" in ended.stderr
    assert max(hub.sent_beyond) < hub.endless_bytes // 2


def test_a_hub_that_gives_nothing_more_is_given_up_and_what_came_is_kept(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    hub.cuts[WEIGHTS] = [400_000, 0, 0, 0, 0, 0]
    hasty = (
        "from appliance.hub import download as hub; hub.RETRY_PAUSE_S = 0; hub.main('owner/name')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", hasty], env=environ, cwd=ROOT, capture_output=True, timeout=120
    )
    assert "400000 of" in json.loads(ended.stdout.splitlines()[-1])["error"]["what"]
    assert penstock(environ, "models", "pull", "owner/name").returncode == 0
    assert hub.ranges_of(WEIGHTS)[-1] == "bytes=400000-"
    assert_whole(tmp_path, source)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/other", ["has no such model", "HF_TOKEN"]),
        ("owner/name@v9", ["no revision v9"]),
        ("owner/secret", ["has no such model"]),
        ("owner/gated", ["gated", "/owner/gated"]),
        ("owner/name:Q4_K_M", ["no quantisation 'Q4_K_M'"]),
        ("owner/strange", ["architectures"]),
        ("owner/old", ["no weights", "pytorch_model.bin"]),
    ],
)
def test_what_the_hub_does_not_give_is_said(
    hub: Hub, environ: dict[str, str], source: Path, name: str, words: list[str]
) -> None:
    files = folder_files(source)
    hub.repositories["owner/secret"] = Repository(files, token="other")
    hub.repositories["owner/gated"] = Repository(files, token="other", gated=True)
    strange = {"config.json": json.dumps({"architectures": ["Strange"]}).encode()}
    hub.repositories["owner/strange"] = Repository(files | strange)
    old = {path: each for path, each in files.items() if path != WEIGHTS}
    hub.repositories["owner/old"] = Repository(old | {"pytorch_model.bin": b"x"})
    ended = penstock(environ, "models", "pull", name)
    assert ended.returncode != 0
    assert [word for word in words if word not in ended.stderr] == []
    assert not hub.ranges_of(WEIGHTS)  # nothing large came before it was known


def test_a_token_opens_what_is_private(hub: Hub, environ: dict[str, str], source: Path) -> None:
    hub.repositories["owner/secret"] = Repository(folder_files(source), token="key")
    assert penstock(environ, "models", "pull", "owner/secret").returncode == 5
    assert penstock(environ | {"HF_TOKEN": "key"}, "models", "pull", "owner/secret").returncode == 0


def test_without_a_network_the_error_says_what_there_is(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    assert penstock(environ, "pull", "owner/name").returncode == 0
    hub.repositories["owner/other"] = Repository(folder_files(source))
    for change in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        ended = penstock(environ | change, "models", "pull", "owner/other")
        assert ended.returncode == 3
        assert "not on this machine" in ended.stderr
        assert "there is owner/name" in ended.stderr
        assert ("unset HF_HUB_OFFLINE" in ended.stderr) == ("HF_HUB_OFFLINE" in change)
        for verb in (["serve"], ["serve", "--check-config"]):
            assert penstock(environ | change, *verb, "owner/other").returncode == 3


def test_a_gguf_file_comes_by_its_quantisation(
    tmp_path: Path, hub: Hub, environ: dict[str, str]
) -> None:
    files: dict[str, bytes | Path] = {f"m-{q}.gguf": q.encode() * 9000 for q in ("Q4_K_M", "Q8_0")}
    hub.repositories["owner/gguf"] = Repository(files)
    assert penstock(environ, "models", "pull", "owner/gguf:Q8_0").returncode == 0
    folder = snapshot(tmp_path, "owner--gguf")
    assert [path.name for path in folder.iterdir()] == ["m-Q8_0.gguf"]
    listed = penstock(environ, "models", "list", "-o", "json").stdout
    row = next(r for r in json.loads(listed)["data"] if r["name"].startswith("owner/gguf"))
    assert row["name"].endswith(":m-Q8_0.gguf")
    assert row["problem"] == "not a GGUF file"  # these bytes are none


def test_a_folder_for_models_on_a_read_only_disk_is_named_before_anything_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from appliance.hub import download
    from appliance.hub.hub_http import RemoteFile
    from appliance.hub.hub_http import Repository as Listed
    from appliance.hub.names import HubName
    from engine.errors import ConfigError

    names = ("config.json", "tokenizer.json", WEIGHTS)
    files = {name: RemoteFile(name, 99, None, name) for name in names}
    listed = Listed(HubName("owner/name"), "c" * 40, files)
    monkeypatch.setattr(download, "look_up", lambda name: listed)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    root = Path("/sys/penstock")  # where root makes no folder either
    with pytest.raises(ConfigError, match="/sys: Read-only file system") as error:
        download.pull(HubName("owner/name"), root, lambda each: None)
    assert error.value.where == str(root)


def test_room_on_the_disk_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, source: Path
) -> None:
    from appliance.hub import download as door
    from appliance.hub import download as pulling
    from appliance.hub.hub_http import RemoteFile
    from appliance.hub.hub_http import Repository as Listed
    from appliance.hub.names import HubName
    from engine.errors import ConfigError

    names = ("config.json", "tokenizer.json", WEIGHTS)
    sizes = {WEIGHTS: 1 << 50}
    files = {name: RemoteFile(name, sizes.get(name, 99), None, name) for name in names}
    listed = Listed(HubName("owner/huge"), "c" * 40, files)
    monkeypatch.setattr(door, "look_up", lambda name: listed)
    with pytest.raises(ConfigError, match="are free"):
        pulling.pull(HubName("owner/huge"), tmp_path / "cache", lambda each: None)
    assert not (tmp_path / "cache").exists()


def test_a_process_of_its_own_says_how_far_it_is(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    command = [sys.executable, "-m", "appliance.hub.download"]
    ended = subprocess.run(
        [*command, "owner/name"], env=environ, cwd=ROOT, capture_output=True, check=True
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines[-1] == {"folder": str(snapshot(tmp_path))}
    total = (source / WEIGHTS).stat().st_size
    assert lines[-2]["done_bytes"] == lines[-2]["total_bytes"] == total
    refused = subprocess.run(
        [*command, "owner/none"], env=environ, cwd=ROOT, capture_output=True, timeout=120
    )
    assert refused.returncode == 1
    assert "no such model" in json.loads(refused.stdout)["error"]["what"]


def test_removing_frees_what_no_other_revision_has(
    tmp_path: Path, hub: Hub, environ: dict[str, str], source: Path
) -> None:
    assert penstock(environ, "pull", "owner/name").returncode == 0
    there = hub.repositories["owner/name"]
    there.commit = "d" * 40
    there.files["tokenizer_config.json"] = b"{}"
    assert penstock(environ, "pull", "owner/name").returncode == 0
    folder = snapshot(tmp_path)
    assert penstock(environ, "rm", "owner/name@ccccccc", "--yes").returncode == 0
    assert not folder.exists()
    assert penstock(environ, "models", "show", "owner/name").returncode == 0
    assert len(list((folder.parents[1] / "blobs").iterdir())) == len(folder_files(source))
    assert penstock(environ, "models", "rm", "owner/name", "--yes").returncode == 0
    assert not folder.parents[1].exists()
    assert penstock(environ, "rm", "owner/name", "--yes").returncode == 5


def test_a_model_is_pulled_by_its_short_name_and_removed_after_a_question(
    tmp_path: Path, hub: Hub, environ: dict[str, str]
) -> None:
    hub.repositories["owner/name"].files["model.safetensors"] = b"x" * 4096
    (tmp_path / "penstock.toml").write_text('[short_names]\n"tiny:q8" = "owner/name"\n')
    environ = {**environ, "PENSTOCK_CONFIG": str(tmp_path / "penstock.toml")}
    pulled = penstock(environ, "pull", "tiny:q8")
    assert pulled.returncode == 0, pulled.stderr
    first = pulled.stderr.splitlines()[0]
    where = tmp_path / ".cache" / "huggingface" / "hub"
    assert first == f"penstock: downloading owner/name, 4.0 KiB, from {hub.url} to {where}"
    folder = snapshot(tmp_path).parents[1]
    refused = penstock(environ, "rm", "tiny:q8")
    assert (refused.returncode, folder.exists()) == (2, True)
    assert "--yes" in refused.stderr
    for answer, code in (("", 1), ("n", 1), ("y", 0)):
        with Typist(environ, "rm", "tiny:q8", prompt="[y/N] ") as person:
            person.type(answer)
        assert (person.exit_code, folder.exists()) == (code, code == 1)
    assert "owner/name" in person.shown


@pytest.mark.parametrize("words", [("run", "owner/none"), ("chat",)])
def test_a_model_is_downloaded_before_a_daemon_is_started_for_a_chat(
    environ: dict[str, str], words: tuple[str, ...]
) -> None:
    environ = {**environ, "PENSTOCK_MODEL": "owner/none", "TERM": "dumb"}
    with Typist(environ, *words, prompt="no such model") as person:
        pass
    assert person.exit_code == 5
    assert "starting" not in person.shown
