"""Vectors and scores from a real daemon: over its APIs, by its command line, and through a kill."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from tests.byte_tokenizer import write_tokenizer
from tests.daemons import ALONE, Daemon
from tests.text_checkpoints import (
    add_modules,
    hidden_states,
    load_text_oracle,
    make_text_checkpoint,
)

LONGEST = 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("texts")
    embedding = make_text_checkpoint(at / "tiny-embedding", "bert")
    add_modules(embedding, max_seq_length=LONGEST)
    rerank = make_text_checkpoint(at / "tiny-rerank", "xlm-roberta", "rerank")
    for folder in (embedding, rerank):
        write_tokenizer(folder)
    return embedding, rerank


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, folders, tiny_llama):
    models = ("--embedding-model", folders[0], "--rerank-model", folders[1])
    daemon = Daemon(
        tmp_path_factory.mktemp("doors"), *ALONE, *map(str, models), model=tiny_llama
    ).wait_ready()
    yield daemon
    daemon.assert_all_free()
    assert daemon.stop() == 0


def embedded(daemon, texts, **fields):
    reply = daemon.http.post("/v1/embeddings", json={"input": texts, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def penstock(daemon, *words, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "appliance.cli", *words],
        input=stdin.encode(),
        env={**daemon.env, "PENSTOCK_HOST": str(daemon.socket)},
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_vectors_are_transformers_and_leave_a_row(daemon, folders):
    texts = ["hello world", "wörld", "x" * 150]
    reply = embedded(daemon, texts)
    oracle = load_text_oracle(folders[0], "bert")
    assert reply["usage"]["prompt_tokens"] > 150
    ids = embedded(daemon, [[5, 6, 7]])["data"][0]["embedding"]
    wanted = torch.nn.functional.normalize(hidden_states(oracle, [5, 6, 7]).mean(0), dim=0)
    assert float((torch.tensor(ids) - wanted).norm()) < 1e-5
    row = daemon.wait_for(
        lambda: [one for one in daemon.log_rows() if one["endpoint"] == "/v1/embeddings"]
    )[-1]
    assert (row["prompt_tokens"], row["num_sequences"]) == (reply["usage"]["prompt_tokens"], 3)
    assert (row["model"], row["http_status"], row["finish_reason"]) == (
        folders[0].name,
        200,
        "computed",
    )
    assert row["e2e_ms"] == pytest.approx(row["tokenize_ms"] + row["prefill_ms"], abs=0.01)


def test_openais_client_reads_base64_by_default(daemon):
    with daemon.official_client() as client:
        found = client.embeddings.create(model="", input=["hello", "world"], dimensions=8)
    whole = embedded(daemon, ["hello", "world"], dimensions=8)
    for one, other in zip(found.data, whole["data"], strict=True):
        assert one.embedding == pytest.approx(other["embedding"], abs=1e-6)


def test_a_ranking_does_not_depend_on_its_neighbours(daemon):
    body = {"query": "hello", "documents": ["one", "two", "hello hello", ""]}
    together = daemon.http.post("/v1/rerank", json=body).json()["results"]
    scores = {one["index"]: one["relevance_score"] for one in together}
    for index, document in enumerate(body["documents"]):
        alone = daemon.http.post("/v1/score", json={"text_1": "hello", "text_2": document}).json()
        assert alone["data"][0]["score"] == pytest.approx(scores[index], rel=1e-4)


def test_the_command_line_writes_lines_and_arrays(daemon, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("".join(f"line {n}\n\n" for n in range(150)))
    ran = penstock(daemon, "embed", str(notes))
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["line"] for row in rows] == list(range(1, 300, 2))
    wanted = embedded(daemon, "line 149")["data"][0]["embedding"]
    assert rows[-1]["embedding"] == pytest.approx(wanted, abs=1e-6)

    path = tmp_path / "vectors.npy"
    assert penstock(daemon, "embed", str(notes), "-o", str(path)).returncode == 0
    data = path.read_bytes()
    (length,) = struct.unpack("<H", data[8:10])
    assert (10 + length) % 64 == 0
    assert eval(data[10 : 10 + length]) == {
        "descr": "<f4",
        "fortran_order": False,
        "shape": (150, 64),
    }
    assert struct.unpack("<64f", data[-256:]) == pytest.approx(wanted, abs=1e-6)
    assert penstock(daemon, "embed", str(notes), "-o", str(path)).returncode == 2  # it exists

    assert penstock(daemon, "embed", "-", stdin="x" * 300).returncode == 2
    assert penstock(daemon, "embed", "-", "--truncate", stdin="x" * 300).returncode == 0
    assert penstock(daemon, "embed", str(tmp_path / "absent")).returncode == 5
    ran = penstock(daemon, "rerank", "hello", str(notes), "--top", "3", "-o", "ndjson")
    scores = [json.loads(line)["score"] for line in ran.stdout.splitlines()]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_models_show_describes_them(daemon, folders):
    ran = penstock(daemon, "models", "show", str(folders[0]), "-o", "json")
    about = json.loads(ran.stdout)
    about = about.get("data", about)
    assert (about["num_dimensions"], about["max_model_len"]) == (64, LONGEST)
    ran = penstock(daemon, "models", "list", "--dir", str(folders[0].parent), "-o", "json")
    listed = {row["name"]: row for row in json.loads(ran.stdout)["data"]}
    assert [listed[folder.name]["problem"] for folder in folders] == [None, None]
    assert [listed[folder.name]["state"] for folder in folders] == ["served", "served"]


def test_a_chat_is_answered_while_many_texts_are_computed(daemon):
    texts = ["x" * 150] * 200
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(embedded, daemon, texts)
        daemon.wait_live()
        assert daemon.complete([5, 6, 7], max_tokens=4)["choices"]
        assert len(asked.result()["data"]) == len(texts)


def test_what_a_client_no_longer_waits_for_is_dropped(daemon):
    body = {"input": ["y" * 150] * 2048}
    with pytest.raises(httpx.TimeoutException):
        daemon.http.post("/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=0.5))
    row = daemon.wait_for(lambda: [one for one in daemon.log_rows() if one["http_status"] == 499])
    assert row[0]["cancelled_by"] == "client"
    daemon.wait_for(lambda: daemon.num_live() == 0)


def test_texts_survive_their_worker(daemon):
    texts = [f"{n} " + "z" * 100 for n in range(200)]
    wanted = embedded(daemon, texts[:1])["data"][0]["embedding"]
    (worker,) = daemon.state()["workers"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(embedded, daemon, texts)
        daemon.wait_live()
        os.kill(worker["pid"], signal.SIGKILL)
        reply = asked.result()
    assert reply["data"][0]["embedding"] == pytest.approx(wanted, abs=1e-5)
    assert len(reply["data"]) == len(texts)


def test_a_benchmark_tells_texts_in_a_second_and_how_long_requests_take(daemon):
    options = ("--seconds", "0.5", "--tokens", "20", "--texts", "4", "-o", "json")
    ended = penstock(daemon, "bench", "texts", *options)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)["figures"]
    assert figures["num_texts"] == 4 * figures["num_requests"] > 0
    assert 10 < figures["tokens_per_text"] < 40
    assert 0 < figures["latency_ms_p50"] <= figures["latency_ms_p99"]
    assert figures["texts_per_s"] > 0
    page = penstock(daemon, "bench", "texts", *options[:-2])
    assert page.returncode == 0, page.stderr
    assert len(page.stdout.splitlines()) == len(figures)
    assert penstock(daemon, "bench", "texts", "--model", "none").returncode == 5
