"""Prove a card in ten minutes, and write all that was found into one file to send.

    python -m tests.gpu report.json -m MODEL [--beside vllm=http://127.0.0.1:8123]

from a clone, with the Python that Penstock and the packages of tests/gpu/pytest.ini are installed
in. It ends with 8 if something is wrong, and with 0 else; a part that found no time is named.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from appliance.hub.names import STARTER_FOLDER

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
WRONG_EXIT_CODE = 8
_LONGEST_TEXT = 4000
_PACKAGES = ("penstock", "torch", "triton", "flash-attn", "transformers", "nvidia-ml-py")


@dataclass(frozen=True)
class Part:
    """A program whose result goes into the report."""

    name: str
    command: list[str]
    limit_s: float
    """It is ended after so long, or when the ten minutes are over."""
    is_pytest: bool = False


def parts_for(model, beside=None):
    """All parts, what matters most first."""
    penstock = [sys.executable, "-m", "appliance.cli"]
    tests = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "-q"]
    tests += ["-o", "junit_logging=system-out"]

    def tested(name, limit_s, *files):
        paths = [f"tests/gpu/test_{file}.py" for file in files]
        return Part(name, [*tests, *paths], limit_s, is_pytest=True)

    named = [*penstock, "doctor", "--self-test", "-m", str(model), "-o", "json"]
    parts = [
        Part("self-test", named, 90),
        tested("attention", 60, "attention_backends"),
        tested("graphs", 90, "one_worker"),
        tested("deaths and transports", 150, "two_workers", "two_gpus"),
        tested("memory after a hundred deaths", 120, "deaths"),
        Part("kernels", [*penstock, "bench", "kernels", "-o", "json"], 90),
        tested("kernels' exactness", 90, "triton_kernels"),
        tested("families", 180, "families"),
        Part("steps", [*penstock, "bench", "steps", str(model), "-o", "json"], 90),
        Part("copies", [*penstock, "bench", "transports", "-o", "json"], 60),
    ]
    if beside is not None:
        how = ["--concurrency", "1", "--seconds", "20", "--rounds", "2", "-o", "json"]
        compared = [*penstock, "bench", "compare", "elastic", beside, "-m", str(model), *how]
        parts.insert(1, Part("beside another server", compared, 180))
    return parts


def report_of(parts, limit_s=LIMIT_S):
    """Run the parts one after the other; one that finds no time is late."""
    until_s = time.monotonic() + limit_s
    found = [_found(part, min(part.limit_s, until_s - time.monotonic())) for part in parts]
    return {"machine": _machine(), "parts": found}


def is_wrong(report):
    """Whether a part found something wrong; one that had no time has found nothing."""
    return any(part["verdict"] == "wrong" for part in report["parts"])


def _found(part, limit_s):
    if limit_s <= 0:
        return {"name": part.name, "verdict": "late", "took_s": 0.0}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [*part.command, *([f"--junitxml={results}"] if part.is_pytest else [])]
        code, out, err = _ran(command, limit_s, folder)
        took_s = round(time.monotonic() - started_s, 1)
        result = {"name": part.name, "took_s": took_s, "command": part.command}
        if code is None:
            return result | {"verdict": "late", "said": _end_of(out + err)}
        if part.is_pytest:
            return result | _of_tests(code, results, out + err)
    return result | _of_program(code, out, err)


def _ran(command, limit_s, folder):
    """Run a program in a session of its own; its code is None if it was ended for its limit."""
    environ = {name: said for name, said in os.environ.items() if not name.startswith("PENSTOCK_")}
    environ |= {"PENSTOCK_SOCKET": f"{folder}/p.sock", "PENSTOCK_STATE_DIR": f"{folder}/state"}
    environ["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err
    return process.returncode, out, err


def _of_tests(code, results, said):
    """Each test with what came of it."""
    if not results.exists():
        return {"verdict": "wrong", "said": _end_of(said)}
    tests = [_of_test(case) for case in ET.parse(results).iter("testcase")]
    outcomes = {test["outcome"] for test in tests}
    if code not in (0, 5) or "failed" in outcomes:
        return {"verdict": "wrong", "tests": tests, "said": _end_of(said)}
    return {"verdict": "right" if "passed" in outcomes else "skipped", "tests": tests}


def _of_test(case):
    test = {"name": case.get("name"), "took_s": float(case.get("time")), "outcome": "passed"}
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        node = case.find(kind)
        if node is not None:
            about = node.get("message") if outcome == "skipped" else node.text
            test |= {"outcome": outcome, "about": _end_of(about or "")}
    out = case.find("system-out")
    return test if out is None else test | {"said": _end_of(out.text or "")}


def _of_program(code, out, err):
    """What a program printed as JSON; any code but 0 is wrong."""
    verdict = "wrong" if code else "right"
    try:
        return {"verdict": verdict, "found": json.loads(out)}
    except ValueError:
        return {"verdict": "wrong", "code": code, "said": _end_of(out + err)}


def _end_of(text):
    return text[-_LONGEST_TEXT:]


def _machine():
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    smi = _said(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"])
    return {"python": sys.version.split()[0], "packages": versions, "nvidia-smi": smi}


def _said(command):
    """What a program prints; None: it is not there, or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def main():
    asked = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    asked.add_argument("report", type=Path)
    asked.add_argument("-m", "--model", type=Path, default=STARTER_FOLDER)
    asked.add_argument("--beside", metavar="NAME=URL", help="a server of the same model")
    options = asked.parse_args()
    report = report_of(parts_for(options.model, options.beside))
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    for part in report["parts"]:
        print(f"{part['verdict']:8}{part['took_s']:6.0f} s  {part['name']}")
    print(f"written: {options.report}; please send it, whatever it says")
    sys.exit(WRONG_EXIT_CODE if is_wrong(report) else 0)


if __name__ == "__main__":
    main()
