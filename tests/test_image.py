"""The image's Containerfile agrees with the settings, the commands and the tree."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import typer

from appliance.cli.main import build
from appliance.configuration import paths
from appliance.configuration.settings import SETTINGS
from tests.test_docs import check_words
from tests.test_layout import FOLDERS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "packaging/Containerfile").read_text()
LINES = re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ").splitlines()
STEPS = [tuple(line.split(None, 1)) for line in LINES if line]
LAST = STEPS[max(i for i, (name, _) in enumerate(STEPS) if name == "FROM") :]
"""What makes the image itself; the stage before it is left behind."""


def told(name: str) -> str:
    (text,) = [text for each, text in LAST if each == name]
    return text


def test_it_runs_as_a_user_who_owns_its_folders_and_no_other() -> None:
    user = told("USER")
    (made,) = [text for name, text in LAST if name == "RUN" and "useradd" in text]
    steps = [shlex.split(step) for step in made.split("&&")]
    (added,) = [step for step in steps if step[0] == "useradd"]
    owned = [step for step in steps if step[0] == "install"]
    assert added[-1] == user
    assert int(added[added.index("--uid") + 1]) > 0
    assert {step[step.index("-o") + 1] for step in owned} == {user}
    assert {step[-1] for step in owned} == set(json.loads(told("VOLUME")))


def test_state_and_socket_lie_in_the_volumes_where_the_service_has_them_too() -> None:
    variables = dict(word.split("=", 1) for word in told("ENV").split())
    own = {name: value for name, value in variables.items() if name.startswith("PENSTOCK_")}
    assert own == {
        "PENSTOCK_SOCKET": str(paths.SYSTEM_SOCKET),
        "PENSTOCK_STATE_DIR": str(paths.SYSTEM_STATE_DIR),
    }
    assert {name.removeprefix("PENSTOCK_").lower() for name in own} <= SETTINGS.keys()
    folders = {str(paths.SYSTEM_SOCKET.parent), str(paths.SYSTEM_STATE_DIR)}
    assert set(json.loads(told("VOLUME"))) == folders


def test_what_it_starts_and_how_its_health_is_asked_are_commands() -> None:
    command = typer.main.get_command(build(""))
    health = json.loads(told("HEALTHCHECK").partition("CMD ")[2])
    for program, *words in (json.loads(told("ENTRYPOINT")), health):
        assert program == "penstock"
        check_words(words, "Containerfile", command)
    assert "STOPSIGNAL" not in dict(LAST), "SIGTERM drains"


def test_the_port_is_the_one_that_the_page_opens() -> None:
    assert f"--listen 0.0.0.0:{told('EXPOSE')} " in (ROOT / "docs/install.md").read_text()


def test_all_that_a_wheel_is_made_of_is_copied() -> None:
    copied = [text.split()[:-1] for name, text in STEPS if name == "COPY" and "--from" not in text]
    names = {name for each in copied for name in each}
    files = {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "setup.py"}
    files.add("packaging/leave_out.sh")
    assert names == files | FOLDERS - {"tests"}
    assert [name for name in names if not (ROOT / name).exists()] == []
