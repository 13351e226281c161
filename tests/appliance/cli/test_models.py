"""`penstock models`: folders found, described and read to the last byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from appliance.hub import cache
from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype
from engine.checkpoint.weights_layout import panels_layout
from engine.kernels.cpu import has_kernels
from tests.appliance.cli_process import penstock
from tests.appliance.model_folder import make_model
from tests.byte_tokenizer import write_tokenizer
from tests.gguf_files import write_gguf
from tests.hostile_models import HOSTILE, HOSTILE_TOKENIZERS, ODD_FILES
from tests.text_checkpoints import make_text_checkpoint
from tests.worlds.fake_daemon import FakeDaemon


def listed(environ: dict[str, str], *arguments: str) -> list[dict[str, Any]]:
    ended = penstock(environ, "models", "list", "-o", "json", *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    rows: list[dict[str, Any]] = json.loads(ended.stdout)["data"]
    return rows


def in_cache(home: Path, revision: str = "0123456789abcdef") -> Path:
    """A model as Hugging Face's tools store it: links to files that are named by their sums."""
    model = home / ".cache" / "huggingface" / "hub" / "models--owner--a--name"
    snapshot = model / "snapshots" / revision
    weights = make_model(snapshot)
    blob = model / "blobs" / hashlib.sha256(weights.read_bytes()).hexdigest()
    blob.parent.mkdir(exist_ok=True)
    weights.rename(blob)
    weights.symlink_to(os.path.relpath(blob, weights.parent))
    return snapshot


def test_models_are_found_where_people_keep_them(tmp_path: Path, environ: dict[str, str]) -> None:
    in_cache(tmp_path)
    make_model(tmp_path / "served")
    make_model(tmp_path / "mine" / "owner" / "deep")
    environ["PENSTOCK_MODEL"] = str(tmp_path / "served")
    rows = listed(environ, "--dir", str(tmp_path / "mine"), "--dir", str(tmp_path / "served"))
    names = [row["name"] for row in rows]
    assert names == ["served", STARTER_FOLDER.name, "owner/a--name@0123456", "owner/deep"]


@pytest.mark.parametrize(
    ("environ", "there"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_hubs_cache_is_where_its_own_tools_put_it(environ: dict[str, str], there: str) -> None:
    assert str(cache.hub_cache(environ)) == there


def test_a_name_will_do_while_it_is_one_models(tmp_path: Path, environ: dict[str, str]) -> None:
    in_cache(tmp_path)
    assert penstock(environ, "models", "show", "owner/a--name").returncode == 0
    in_cache(tmp_path, "fedcba9876543210")
    ended = penstock(environ, "models", "show", "owner/a--name")
    assert ended.returncode == 2
    assert "2 models" in ended.stderr
    assert penstock(environ, "models", "show", "owner/a--name@fedcba9").returncode == 0
    for verb in ("show", "verify"):
        assert penstock(environ, "models", verb, "nothing").returncode == 5


def test_the_starter_is_always_there(environ: dict[str, str]) -> None:
    assert [row["name"] for row in listed(environ)] == [STARTER_FOLDER.name]
    assert penstock(environ, "models", "verify", STARTER_FOLDER.name).returncode == 0


def test_the_starter_is_not_removed_but_said_to_be_built_in(environ: dict[str, str]) -> None:
    ended = penstock(environ, "rm", "--yes", "penstock-starter-1")
    assert (ended.returncode, "built in" in ended.stderr) == (2, True)
    assert (STARTER_FOLDER / "config.json").exists()


def test_the_model_that_a_daemon_serves_is_listed_wherever_it_is(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    shutil.copytree(STARTER_FOLDER, tmp_path / "elsewhere")
    model = {"id": "mine", "root": str(tmp_path / "elsewhere")}
    with FakeDaemon(tmp_path / "p.sock") as daemon:
        daemon.script.replies = {"GET /v1/models": (200, {"data": [model]})}
        listed = penstock({**environ, "PENSTOCK_SOCKET": str(tmp_path / "p.sock")}, "list")
    assert listed.stdout.splitlines()[1].split()[:2] == ["mine", "served"]


def test_a_tokenizer_that_is_much_too_small_is_asked_about(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_model(tmp_path / "m", vocab_size=4096)
    ended = penstock(environ, "models", "show", str(tmp_path / "m"))
    assert ended.returncode == 0
    assert "4096 tokens" in ended.stderr


def test_tools_are_said_to_work_only_where_the_daemon_would_take_them(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = tmp_path / "model"
    make_model(folder)
    shown = json.loads(penstock(environ, "models", "show", str(folder), "-o", "json").stdout)
    assert (shown["chat_template"], shown["tools"]) == (True, True)
    template = "{% if tools %}{{ tools }}{% endif %}"  # in no format that can be read back
    (folder / "chat_template.jinja").write_text(template)
    shown = json.loads(penstock(environ, "models", "show", str(folder), "-o", "json").stdout)
    assert (shown["chat_template"], shown["tools"]) == (True, False)


def verified(environ: dict[str, str], folder: Path) -> tuple[int, list[str]]:
    ended = penstock(environ, "models", "verify", str(folder), "-o", "ndjson")
    return ended.returncode, [json.loads(line)["result"] for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("sums", ["SHA256SUMS", "model.safetensors.sha256", "the sum alone"])
def test_sums_beside_the_weights_are_compared(
    tmp_path: Path, environ: dict[str, str], sums: str
) -> None:
    weights = make_model(tmp_path / "m")
    assert verified(environ, tmp_path / "m") == (0, ["no checksum to compare"])
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    if sums == "the sum alone":
        (tmp_path / "m" / "model.safetensors.sha256").write_text(digest)
    else:
        (tmp_path / "m" / sums).write_text(f"{digest} *model.safetensors\n")
    assert verified(environ, tmp_path / "m") == (0, ["ok"])
    corrupt(weights)
    assert verified(environ, tmp_path / "m") == (78, ["WRONG"])


def test_the_hubs_cache_says_itself_what_its_files_should_be(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    snapshot = in_cache(tmp_path)
    assert verified(environ, snapshot) == (0, ["ok"])
    corrupt(snapshot / "model.safetensors")
    ended = penstock(environ, "models", "verify", "owner/a--name")
    assert ended.returncode == 78
    assert "model.safetensors" in ended.stderr.splitlines()[0]


def in_memory(path: Path) -> int:
    """Bytes of a quantised file's weights, as the workers hold them."""
    checkpoint = Checkpoint.open(path)
    layout = panels_layout(checkpoint, choose_dtype("auto", checkpoint.stored_dtype))
    assert layout is not None
    return layout.num_bytes


def test_a_gguf_file_is_listed_shown_and_verified(tmp_path: Path, environ: dict[str, str]) -> None:
    make_model(tmp_path / "m")
    (tmp_path / "files").mkdir()
    path = write_gguf(tmp_path / "m", tmp_path / "files" / "tiny.gguf", "Q8_0")
    (row,) = (r for r in listed(environ, "--dir", str(tmp_path)) if r["name"] == "files/tiny.gguf")
    assert (row["family"], row["problem"]) == ("llama", None)
    for name in (path, path.parent):
        shown = penstock(environ, "models", "show", str(name), "-o", "json")
        about = json.loads(shown.stdout)
        assert about["num_parameters"] == row["num_parameters"]
        assert about["fits"][0]["verdict"] == "yes"
        assert not has_kernels() or about["fits"][0]["weights_bytes"] == in_memory(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (path.parent / "SHA256SUMS").write_text(f"{digest} *tiny.gguf\n")
    assert verified(environ, path) == (0, ["ok"])
    corrupt(path)
    assert verified(environ, path) == (78, ["WRONG"])
    os.truncate(path, path.stat().st_size - 64)
    ended = penstock(environ, "models", "show", str(path))
    assert ended.returncode == 78
    assert "truncated" in ended.stderr


def test_a_gguf_file_of_vectors_is_listed_and_shown_as_what_it_is(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_text_checkpoint(tmp_path / "m", "qwen3")
    write_tokenizer(tmp_path / "m")
    (tmp_path / "files").mkdir()
    path = write_gguf(tmp_path / "m", tmp_path / "files" / "tiny.gguf", qwen3__pooling_type=3)
    (row,) = (r for r in listed(environ, "--dir", str(tmp_path)) if r["name"] == "files/tiny.gguf")
    assert (row["family"], row["problem"]) == ("qwen3 (embedding)", None)
    shown = json.loads(penstock(environ, "models", "show", str(path), "-o", "json").stdout)
    assert (shown["pooling"], shown["num_dimensions"]) == ("lasttoken", 64)


def corrupt(weights: Path) -> None:
    """Change the last byte, which no header knows of."""
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def test_a_truncated_file_fails_before_it_is_summed(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    weights = make_model(tmp_path / "m")
    os.truncate(weights, weights.stat().st_size - 1)
    assert verified(environ, tmp_path / "m") == (78, [])
    assert listed(environ, "--dir", str(tmp_path / "m"))[-1]["problem"].endswith("truncated")


def test_a_folder_whose_name_is_not_text_is_no_obstacle(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/m\xff"))
    make_model(folder, vocab_size=300)
    for verb in ("show", "verify"):
        ended = penstock(environ, "models", verb, str(folder))
        assert (ended.returncode, ended.stderr) == (0, "")
    assert penstock(environ, "models", "list", "-o", "csv", "--dir", str(folder)).returncode == 0


def test_what_is_wrong_in_the_config_file_is_said_and_models_are_listed(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_model(tmp_path / "served")
    path = tmp_path / "penstock.toml"
    path.write_text(
        f'modle = "x"\nmax_queued = 0\n[models.small]\nmodel = "{tmp_path / "served"}"\n'
        "[models.bad]\nmodel = 3\n"
    )
    environ["PENSTOCK_CONFIG"] = str(path)
    ended = penstock(environ, "models", "list", "-o", "json")
    assert ended.returncode == 0
    assert {"small", "penstock-starter-1"} <= {
        row["name"] for row in json.loads(ended.stdout)["data"]
    }
    assert f"warning: {path}:1: unknown setting 'modle'" in ended.stderr
    assert "models.bad" in ended.stderr
    assert "max_queued" not in ended.stderr, "which has nothing to do with models"
    path.write_text("models = 3\n")
    assert penstock(environ, "models", "show", str(tmp_path / "served")).returncode == 0


def test_models_that_requests_may_name_are_known_by_those_names(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_model(tmp_path / "served")
    snapshot = in_cache(tmp_path)
    (tmp_path / "penstock.toml").write_text(
        f'[models.small]\nmodel = "{tmp_path / "served"}"\n'
        '[models.hub]\nmodel = "owner/a--name@0123456"\ndtype = "float32"\n'
        '[models.later]\nmodel = "nobody/has-it"\n'
        f'[short_names]\n"tiny:q8" = "{tmp_path / "served"}"\n'
    )
    environ["PENSTOCK_CONFIG"] = str(tmp_path / "penstock.toml")
    rows = {row["name"]: row["folder"] for row in listed(environ)}
    assert rows["small"] == str(tmp_path / "served")
    assert rows["hub"] == str(snapshot)
    assert "later" not in rows
    for name in ("small", "hub"):
        assert penstock(environ, "models", "show", name).returncode == 0
    assert penstock(environ, "models", "show", "tiny:q8").returncode == 0
    shown = penstock(environ, "config", "show", "-o", "wide").stdout
    lines = {line.split()[0]: line.split() for line in shown.splitlines()}
    assert lines["models.hub.dtype"][1] == "float32"
    assert f"{tmp_path / 'penstock.toml'}:3:" in lines["models.hub.dtype"]


def test_files_that_claim_too_much_are_a_problem_of_their_model_alone(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "all").mkdir()
    make_model(tmp_path / "all" / "good")
    made = [make(tmp_path / "all" / f"m{at}") for at, make in enumerate(HOSTILE.values())]
    rows = listed(environ, "--dir", str(tmp_path / "all"))
    by_folder = {row["folder"]: row["problem"] for row in rows}
    assert by_folder[str(tmp_path / "all" / "good")] is None
    assert all(by_folder[str(path)] for path in made)
    for path in (made[0], HOSTILE_TOKENIZERS["text that doubles"](tmp_path / "tokenizer")):
        ended = penstock(environ, "models", "show", str(path))
        assert ended.returncode == 78
        assert "Traceback" not in ended.stderr
    ended = penstock(environ, "doctor", "--model", str(made[0]), "-o", "json")
    found = {each["check"]: each["verdict"] for each in json.loads(ended.stdout)["data"]}
    assert found["model"] == "bad"
    assert found["reader"] == "ok"


@pytest.mark.parametrize("kind", ["pipe", "endless link"])
def test_what_is_no_file_in_the_place_of_one_holds_up_no_command(
    tmp_path: Path, environ: dict[str, str], kind: str
) -> None:
    snapshot = in_cache(tmp_path)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    ODD_FILES[kind](refs / "main")
    asked = {
        "config.json": "show",
        "tokenizer_config.json": "show",
        "model.safetensors": "show",
        "SHA256SUMS": "verify",
        "model.safetensors.sha256": "verify",
    }
    for name in asked:
        make_model(folder := tmp_path / "all" / name)
        (folder / name).unlink(missing_ok=True)
        ODD_FILES[kind](folder / name)
    rows = listed(environ, "--dir", str(tmp_path / "all"))
    assert "owner/a--name@0123456" in {row["name"] for row in rows if row["problem"] is None}
    for name, verb in asked.items():
        ended = penstock(environ, "models", verb, str(tmp_path / "all" / name))
        assert ended.returncode == 78, (name, ended.stderr)
        assert "Traceback" not in ended.stderr
