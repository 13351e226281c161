"""verify computes fixed prompts in every way, and says where texts part and by how much."""

import contextlib
import json

import pytest
import typer

from appliance.cli import verify as verb
from appliance.cli.verify import Text, compare
from tests.appliance.cli_process import ROOT, penstock, user_environ
from tests.checkpoints import make_checkpoint

WAYS = ("cached", "in", "handed", "speculated", "transformers")


@pytest.mark.parametrize(("model", "code"), [("", 2), ("empty", 78)])
def test_verify_ends_otherwise_where_no_model_is_served(tmp_path, model, code):
    (tmp_path / "empty").mkdir()
    asked = str(tmp_path / model) if model else model
    ended = penstock(user_environ(tmp_path), "verify", asked)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_models_texts_are_equal_in_every_way_and_to_transformers(tmp_path):
    folder = make_checkpoint(tmp_path / "model", max_position_embeddings=512)
    environ = user_environ(tmp_path) | {"PYTHONPATH": str(ROOT)}  # transformers needs all of torch
    ended = penstock(environ, "verify", str(folder), "--tokens", "8", "-o", "json")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["data"]
    assert {row["result"] for row in rows} == {"equal"}
    ways = [row["way"].split()[0] for row in rows]
    assert [ways.count(way) for way in WAYS] == [4] * len(WAYS)
    assert {row["prompt_tokens"] for row in rows} == {5, 64, 65, 300}
    assert max(row["cached_tokens"] for row in rows if row["way"] == "cached") == 256


def test_a_text_that_parts_is_told_with_its_place_and_margin():
    cold = [Text([1, 2, 3], 0, (0.5, 0.25, 0.125)), Text([4, 5, 6], 0, (1.0, 1.0, 1.0))]
    cached = [Text([1, 7, 3], 64), Text([4, 5, 6], 64)]
    parted, same = compare({"cold": cold, "cached": cached}, [65, 100])
    assert (parted["equal_tokens"], parted["margin"], parted["result"]) == (1, 0.25, "DIFFERENT")
    assert (same["equal_tokens"], same["margin"], same["result"]) == (3, None, "equal")


class Client:
    """Answers with one text where the prompt is computed alone, and with another elsewhere."""

    def __init__(self, *_args, **_options):
        pass

    def get(self, path):
        if path == "/v1/models":
            return {"data": [{"max_model_len": 20}]}
        return {"model": "m", "dtype": "bfloat16", "workers": [{"device": "cpu 0"}]}

    def post(self, path, body):
        if path == "/tokenize":
            return {"tokens": list(range(100))}
        if path != "/v1/completions":
            return {}
        tokens = [1, 2] if body["cache_salt"] == "verify alone" else [1, 3]
        best = [{"a": -0.1, "b": -0.3}] * 2
        choice = {"token_ids": tokens, "logprobs": {"top_logprobs": best}}
        return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}


@pytest.fixture
def answered(monkeypatch):
    """Verify asks no daemon and no transformers; yields its calls of the latter."""
    asked = []
    monkeypatch.setattr(verb, "daemon", lambda *_: contextlib.nullcontext("nowhere"))
    monkeypatch.setattr(verb, "Client", Client)
    monkeypatch.setattr(verb, "_by_transformers", lambda *about: asked.append(about) or {})
    return asked


def test_verify_ends_with_1_where_a_text_differs(answered, tmp_path, capsys):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(typer.Exit) as ended:
        verb.verify(str(tmp_path / "m.gguf"), tokens=2)
    assert ended.value.exit_code == 1
    told = capsys.readouterr().out.splitlines()
    assert told[-1].count(" 1/1") == 1
    assert told[-1].count(" 0/1") == 3
    assert any("2.0e-01" in line for line in told)
    assert not answered


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"weights": "q8"}])
def test_only_what_is_computed_as_stored_is_compared_with_transformers(answered, tmp_path, options):
    make_checkpoint(tmp_path)
    with pytest.raises(typer.Exit):
        verb.verify(str(tmp_path), tokens=2, **options)
    assert len(answered) == (not options)
