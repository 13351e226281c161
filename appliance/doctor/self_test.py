"""Say what self-tests of kernels have found on this machine, and run one at will."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.doctor.finding import Finding
from appliance.fleet.kept_proofs import load_proofs
from engine.checkpoint.checkpoint import Checkpoint
from engine.system.python_child import python_command

_LIMIT_S = 600
_SEND = "send the output of penstock doctor --self-test -o json"


def kept_findings(state_dir: Path) -> Iterator[Finding]:
    """Yield what the newest start on a GPU has found; nothing where there was none."""
    for proof in load_proofs(state_dir)[-1:]:
        if not proof.refused and not proof.notes:
            yield Finding("self-test", "ok", "the GPU's kernels computed rightly")
        for name, about in proof.refused.items():
            yield Finding("self-test", "note", f"{name} is refused, another serves: {about}", _SEND)
        for note in proof.notes:
            yield Finding("self-test", "note", note, _SEND)


def prove_now(checkpoint: Checkpoint, dtype: str) -> Iterator[Finding]:
    """Run the self-test for a model now, and yield what it finds."""
    command = python_command("-m", "engine.worker.self_test_report")
    try:
        ran = subprocess.run(
            [*command, str(checkpoint.folder), dtype],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding("self-test", "bad", f"no result within {_LIMIT_S} s", "see nvidia-smi")
        return
    if ran.returncode:
        about = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        yield Finding("self-test", "bad", f"it failed: {about}", _SEND)
        return
    yield from _of_report(json.loads(ran.stdout))


def _of_report(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for the machine, and one for each backend."""
    what = f"{report['num_steps']} steps of attention in {report['dtype']}, blocks of"
    about = f"{what} {report['block_size']}, torch {report['torch']}: {report['device']}"
    yield Finding("self-test", "ok", about)
    are_all_wrong = all(backend["wrong"] for backend in report["backends"])
    for backend in report["backends"]:
        name, took = backend["name"], f"{backend['took_ms']} ms"
        if not backend["wrong"]:
            yield Finding("self-test", "ok", f"{name}: all right, {took}")
        for operation, about in backend["wrong"].items():
            verdict = "bad" if are_all_wrong else "note"
            yield Finding("self-test", verdict, f"{name}: {operation} is wrong, {about}", _SEND)
