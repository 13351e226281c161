"""The doctor says what self-tests found, and runs one in a process of its own."""

import sys

import pytest

from appliance.doctor import self_test
from appliance.doctor.self_test import kept_findings, prove_now
from appliance.fleet.kept_proofs import keep_proofs
from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.messages import Proof
from tests.checkpoints import make_checkpoint


def test_what_the_newest_start_refused_is_named(tmp_path):
    assert list(kept_findings(tmp_path)) == []
    keep_proofs(tmp_path, [Proof("a", {}, [], 9.0)])
    (finding,) = kept_findings(tmp_path)
    assert finding.verdict == "ok"
    keep_proofs(tmp_path, [Proof("b", {"norm": "row 3 of 16"}, ["torch's gated is wrong"], 9.0)])
    found = list(kept_findings(tmp_path))
    assert [each.verdict for each in found] == ["note", "note"]
    assert "norm" in found[0].found
    assert "--self-test" in found[0].hint


def test_a_self_test_of_this_machine_finds_its_kernels_right(tmp_path):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "one-layer", num_hidden_layers=1))
    machine, *backends = prove_now(checkpoint, "float32")
    assert "float32" in machine.found
    assert len(backends) == 2
    assert {each.verdict for each in (machine, *backends)} == {"ok"}


@pytest.mark.parametrize(
    ("script", "said"),
    [("raise SystemExit(3)", "3"), ("raise KeyError(77)", "77")],
)
def test_a_self_test_that_dies_is_bad_and_says_how(script, said, tmp_path, monkeypatch):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "one-layer", num_hidden_layers=1))
    monkeypatch.setattr(self_test, "python_command", lambda *_: [sys.executable, "-c", script])
    (finding,) = prove_now(checkpoint, "float32")
    assert finding.verdict == "bad"
    assert said in finding.found


def test_where_all_are_wrong_it_is_bad():
    report = {
        "device": "H100", "torch": "2.13.0", "dtype": "bfloat16", "block_size": 256,
        "num_steps": 21,
        "backends": [{"name": "flash", "wrong": {"attention": "row 1"}, "took_ms": 9}] * 2,
    }  # fmt: skip
    found = list(self_test._of_report(report))
    assert [each.verdict for each in found] == ["ok", "bad", "bad"]
    report["backends"][1] = report["backends"][1] | {"wrong": {}}
    assert [each.verdict for each in self_test._of_report(report)] == ["ok", "note", "ok"]
