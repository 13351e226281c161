"""penstock bench as its user runs it: on a scripted server, and with real daemons of its own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.appliance.cli_process import penstock
from tests.worlds.fake_openai import FakeOpenAI

SHORT = ["--seconds", "0.4", "--input-tokens", "5-9", "--output-tokens", "4"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeOpenAI]:
    with FakeOpenAI(tmp_path / "p.sock") as fake:
        fake.script.gap_s = 0.002
        yield fake


def test_run_measures_the_daemon_of_the_settings(
    server: FakeOpenAI, environ: dict[str, str]
) -> None:
    server.script.refuse = lambda index: index == 2
    ended = penstock(environ, "bench", "run", *SHORT, "--concurrency", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[:4] == ["P50", "P90", "P99", "MAX"]
    (refused,) = ended.stderr.splitlines()[1:]
    assert refused.startswith("penstock: 1 x ")
    facts = dict(line.split(maxsplit=1) for line in ended.stdout.split("\n\n")[1].splitlines())
    assert facts["refused"] == "1"
    assert facts["energy_per_token"] == "-"
    assert facts["requests"].endswith("/s")
    assert int(facts["offered"]) == int(facts["completed"]) + 1


def test_run_says_that_other_programs_took_the_cores_and_what_gaps_are_of_bursts(
    server: FakeOpenAI, environ: dict[str, str]
) -> None:
    server.script.power_w, server.script.starved = 40.0, "other programs use the cores"
    server.script.per_event = 2
    options = ["--seconds", "1.2", "--input-tokens", "5", "--output-tokens", "4"]
    ended = penstock(environ, "bench", "run", *options, "--concurrency", "1")
    assert ended.returncode == 0, ended.stderr
    assert "100" in ended.stderr
    assert "ps aux" in ended.stderr
    table, facts = ended.stdout.split("\n\n")
    assert table.splitlines()[-1].startswith("itl ")
    assert dict(line.split(maxsplit=1) for line in facts.splitlines())["starved_ratio"] == "100%"


def test_a_load_of_which_nothing_is_answered_is_a_failure(
    server: FakeOpenAI, environ: dict[str, str]
) -> None:
    server.script.refuse = lambda index: index > 0
    ended = penstock(environ, "bench", "run", *SHORT, "--concurrency", "1")
    assert ended.returncode == 7
    assert ["completed", "0"] in [line.split() for line in ended.stdout.splitlines()]
    assert "no reply" in ended.stderr


def test_json_and_the_kept_file_have_every_sample(
    server: FakeOpenAI, environ: dict[str, str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    options = ["--rate", "20", "--save", str(kept), "-o", "json"]
    ended = penstock(environ, "bench", "run", "--host", str(server.tcp), *SHORT, *options)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["schema"] == "penstock.bench/1"
    (turn,) = document["turns"]
    assert len(turn["samples"]) == document["figures"]["offered"] == len(server.script.bodies) - 1
    assert all(len(sample["itl_ms"]) == 3 for sample in turn["samples"])
    assert json.loads(kept.read_text())["turns"] == document["turns"]


def test_compare_prints_the_band_first(server: FakeOpenAI, environ: dict[str, str]) -> None:
    arms = [f"one={server.unix.path}", f"two={server.tcp}"]
    ended = penstock(environ, "bench", "compare", *arms, *SHORT, "--rounds", "2", "-o", "csv")
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    assert list(dict.fromkeys(row["arm"] for row in rows)) == ["A/A", "one", "two"]
    judged = [row for row in rows if row["arm"] == "two" and row["ratio"] and row["band_low"]]
    assert {row["verdict"] for row in judged} <= {"better", "worse", "same"}
    assert judged


def test_a_trace_can_be_run(server: FakeOpenAI, environ: dict[str, str], tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000 * n, "input_length": 900, "output_length": 9, "hash_ids": [n % 3, n + 3]}
        for n in range(9)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--trace", str(tmp_path / "trace.jsonl"), "--speed", "100", "-o", "json"]
    ended = penstock(environ, "bench", "run", *options, "--length-scale", "0.01")
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)["figures"]
    assert (figures["completed"], figures["failed"]) == (9, 0)
    assert 0 < figures["infinite_hit_ratio"] < 1


def test_interference_needs_no_more_than_two_arms(
    server: FakeOpenAI, environ: dict[str, str]
) -> None:
    arms = [f"one={server.unix.path}", f"two={server.tcp}"]
    options = ["--seconds", "0.4", "--every", "0.1", "--rounds", "1", "--prompt-tokens", "40"]
    ended = penstock(environ, "bench", "interference", *arms, *options)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[1].split()[:2] == ["A/A", "p99_loaded_over_p99_quiet"]
    assert sum(line.startswith("two") for line in lines) == 11


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "--rate", "1", "--concurrency", "1"], 2, "one of --concurrency"),
        (["run", "--input-tokens", "9-1"], 2, "512 or 128-1024"),
        (["run", "--trace", "/none"], 5, "cannot read"),
        (["run"], 3, "not running"),
        (["run", "--speed", "2"], 2, "are of a --trace"),
        (["compare", "foo"], 3, "static, colocated, elastic"),
        (["compare", "static", "static"], 78, "the same name"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    environ: dict[str, str], arguments: list[str], code: int, message: str
) -> None:
    ended = penstock(environ, "bench", *arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert message in ended.stderr


def test_arms_that_are_roles_are_daemons_of_its_own(
    tiny_llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    options = ["--rounds", "1", "--concurrency", "2", "--model", str(tiny_llama), "-o", "json"]
    ended = penstock(environ, "bench", "compare", "colocated", *SHORT, *options)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert [turn["arm"] for turn in document["turns"]] == ["colocated", "A/A"]
    samples = [sample for turn in document["turns"] for sample in turn["samples"]]
    assert samples
    assert all(sample["error"] is None for sample in samples)
    assert {sample["output_tokens"] for sample in samples} == {4}
    # a token that ends within a character comes with the next; if it is the first it has no gap
    for sample in samples:
        assert 3 - sample["merged_tokens"] <= len(sample["itl_ms"]) <= 3
    assert not (tmp_path / "state").exists(), "the user's own log is left alone"
