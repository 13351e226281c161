"""What proves a card in ten minutes runs on cores too: its parts, its report, its deaths."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from engine.kernels.attention_backends import ATTENTION_BACKENDS
from tests.checkpoints import FAMILIES
from tests.engine.gpu_worker import DTYPES, check_family
from tests.gpu import __main__ as card
from tests.gpu.__main__ import Part, is_wrong, parts_for, report_of
from tests.gpu.test_attention_backends import CASES
from tests.gpu.test_deaths import die_often, settled
from tests.worlds.accelerator import FakeDevice

FILES = Path(card.__file__).parent


def program(name, script, limit_s=60.0):
    return Part(name, [sys.executable, "-c", script], limit_s)


def test_every_backend_in_every_dtype_and_every_file_has_a_part():
    assert [(row, dtype) for row in ATTENTION_BACKENDS for dtype in row.dtypes] == CASES
    assert len({row.name for row, _ in CASES}) == len(ATTENTION_BACKENDS)
    named = {Path(word).name for part in parts_for("m") for word in part.command}
    assert {path.name for path in FILES.glob("test_*.py")} <= named
    compared = parts_for("m", "vllm=http://127.0.0.1:1")
    assert any("vllm=http://127.0.0.1:1" in part.command for part in compared)


def test_a_report_has_what_each_part_found_and_says_which_had_no_time():
    parts = [
        program("right", "print('{\"data\": [1]}')"),
        program("bad", "print('{\"data\": []}'); raise SystemExit(8)"),
        program("broken", "raise RuntimeError('no such kernel')"),
        program("slow", "import time; time.sleep(600)", 0.2),
    ]
    report = report_of(parts)
    found = {part["name"]: part for part in report["parts"]}
    assert [found[part.name]["verdict"] for part in parts] == ["right", "wrong", "wrong", "late"]
    assert found["right"]["found"] == {"data": [1]}
    assert "no such kernel" in found["broken"]["said"]
    assert is_wrong(report)
    assert report["machine"]["packages"]["torch"]
    (late,) = report_of([parts[0]], limit_s=0)["parts"]
    assert late["verdict"] == "late"
    json.dumps(report)


def test_tests_are_reported_one_by_one(tmp_path):
    file = tmp_path / "test_one.py"
    file.write_text(
        "def test_right():\n    print('4 GB/s')\n\ndef test_wrong():\n    assert 1 == 2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    command += ["-c", os.devnull, "-o", "junit_logging=system-out"]
    (found,) = report_of([Part("two", command, 60.0, is_pytest=True)])["parts"]
    assert found["verdict"] == "wrong"
    assert [test["outcome"] for test in found["tests"]] == ["passed", "failed"]
    assert "4 GB/s" in found["tests"][0]["said"]


def test_without_a_gpu_the_tests_that_need_one_are_skipped_and_say_why():
    tests = [part for part in parts_for("m") if part.name == "memory after a hundred deaths"]
    (found,) = report_of(tests)["parts"]
    assert found["verdict"] == "skipped"
    (test,) = found["tests"]
    assert "finds no GPU" in test["about"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "qwen3_5_text"])
def test_a_family_is_proved_on_a_made_up_gpu_as_on_a_card(family, dtype, tmp_path):
    assert family in FAMILIES
    check_family(tmp_path / family, family, dtype, FakeDevice())


def hold(folder, ready_fd):
    """A process that holds something until it is killed."""
    (folder / str(os.getpid())).touch()
    os.write(ready_fd, b"1")
    time.sleep(600)


def end_at_once(_ready_fd):
    os._exit(0)


def test_each_death_is_of_a_process_that_had_begun_and_none_is_left(tmp_path):
    die_often((hold, tmp_path), 6)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 6
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(AssertionError, match="before it was killed"):
        die_often((end_at_once,), 1)
    values = iter([1, 2, 5])
    assert settled(lambda: next(values), 4) == 5
