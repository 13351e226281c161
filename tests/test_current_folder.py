"""No command runs code of the folder in which it is typed: strangers fill models' folders."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from appliance.cli.main import VERBS, build
from appliance.hub.names import STARTER_FOLDER
from tests.appliance.cli_process import ROOT, fork, user_environ

PACKAGES = ("appliance", "engine", "tui", "migrations", "torch", "numpy")
MODULES = (
    *(
        "torch",
        "numpy",
        "sitecustomize",
        "usercustomize",
        "json",
        "typing",
        "typer",
        "rich",
        "uvicorn",
    ),
    *("huggingface_hub", "jinja2", "tokenizers", "transformers", "triton", "flash_attn", "textual"),
    *(
        "uvicorn",
        "msgspec",
        "psutil",
        "pynvml",
        "sqlite_utils",
        "llguidance",
        "runpy",
        "encodings",
        "site",
    ),
)
RAN = "ran.txt"
HOSTILE = """
import os
with open({mark!r}, "a") as file:
    file.write(__name__ + "\\n")
"""
ENDS = "raise SystemExit('children of this test end where they import torch')"
MODEL = str(STARTER_FOLDER)
ARGUMENTS = {
    "run": ("hello",),
    "chat": (),
    "serve": (),
    "stop": (),
    "pull": ("owner/name",),
    "list": (),
    "rm": ("owner/name", "--yes"),
    "models pull": ("owner/name",),
    "models rm": ("owner/name", "--yes"),
    "models list": (),
    "models show": (MODEL,),
    "models verify": (MODEL,),
    "status": (),
    "ps": (),
    "show": ("someid",),
    "top": ("--once",),
    "log": (),
    "events": (),
    "usage": (),
    "metrics": (),
    "record": ("-o", "recording"),
    "cancel": ("someid",),
    "drain": (),
    "resume": (),
    "restart": (),
    "roles": (),
    "config show": (),
    "keys new": ("name",),
    "keys add": ("name", "--file", "keys"),
    "keys list": ("--file", "keys"),
    "cache stats": (),
    "cache verify": (),
    "cache clear": (),
    "db path": (),
    "db stats": (),
    "db export": ("copy.db",),
    "db prune": ("--yes",),
    "install-service": ("--dry-run",),
    "worker": ("--dynamo", "--discovery", "file:discovery"),
    "doctor": (),
    "devices": (),
    "profile show": (),
    "profile measure": (),
    "profile clear": (),
    "bench kernels": ("--small",),
    "bench steps": ("--small",),
    "bench transports": ("--small",),
    "bench run": ("static",),
    "bench texts": ("--seconds", "1"),
    "bench compare": ("static",),
    "bench interference": ("static",),
    "embed": (__file__,),
    "rerank": ("word", __file__),
    "whoami": (),
    "version": (),
    "completion": ("bash",),
    "dial-stdio": (),
}
"""Words for each command, with which it does something, and starts its children if it has any."""
SCRIPT = Path(sys.executable).with_name("penstock")
STARTED = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-P", "-m", "appliance.cli"]
AT_A_TERMINAL = ("run", "chat")
"""These start a daemon only for a person."""


@pytest.fixture
def hostile(tmp_path):
    """A folder whose modules tell that they were imported."""
    folder = tmp_path / "model"
    text = HOSTILE.format(mark=str(tmp_path / RAN))
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    for name in MODULES:
        (folder / f"{name}.py").write_text(text)
    (folder / "hostile.pth").write_text(f"import os; open({str(tmp_path / RAN)!r}, 'w')\n")
    (tmp_path / "ends").mkdir()
    (tmp_path / "ends" / "torch.py").write_text(ENDS)
    return folder


@pytest.fixture
def environ(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    path = f"{tmp_path / 'ends'}:{ROOT}"
    return user_environ(home) | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def ran(folder: Path) -> set[str]:
    mark = folder.with_name(RAN)
    return set(mark.read_text().split()) if mark.exists() else set()


def test_such_a_folder_does_run_in_a_python_that_is_started_as_usual(hostile, environ):
    for words in (("-c", "import numpy, torch"), ("-m", "appliance.cli")):
        subprocess.run([sys.executable, *words], cwd=hostile, env=environ, check=False, timeout=120)
    assert {"numpy", "torch", "appliance"} <= ran(hostile)


def commands() -> set[str]:
    """Every verb, and what each group of them holds."""
    found = set()
    for verb in VERBS:
        place, _, function = VERBS[verb].partition(".")
        made = getattr(import_module(f"appliance.cli.{place}"), function or verb.replace("-", "_"))
        group = typer.main.get_command(build(verb)).commands[verb]
        below = group.commands if isinstance(made, typer.Typer) else {}
        found |= {f"{verb} {name}" for name in below} or {verb}
    return found


def test_every_command_is_tried():
    assert set(ARGUMENTS) == commands()


def at_a_terminal(words: list[str], folder: Path, environ: dict[str, str]) -> None:
    """Run a command for a person, to its end."""
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen([*STARTED, *words], cwd=folder, env=environ, **streams):
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # how Linux says that the last writer is gone
            while True:
                said += os.read(ours, 4096)
    os.close(ours)
    assert b"starting one" in said


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_command_runs_nothing_of_the_current_folder(name, hostile, environ):
    words = [*name.split(), *ARGUMENTS[name]]
    if name in AT_A_TERMINAL:
        at_a_terminal(words, hostile, environ)
    else:
        asked = {"arguments": words, "environ": environ, "cwd": str(hostile)}
        with open(os.devnull, "r+b") as nothing:
            fork(asked, [nothing.fileno()] * 3)
    assert ran(hostile) == set()


def test_nor_do_the_commands_own_imports(hostile, environ):
    """Neither does a colon too many in PYTHONPATH bring it back, for what is imported late."""
    for words in (["--version"], ["doctor"]):
        ended = subprocess.run(
            [*STARTED, *words], cwd=hostile, env=environ, capture_output=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
    assert ran(hostile) == set()
