"""What install-service would do, and whom it refuses; a booted machine shows that it works."""

import sys
import tempfile
from pathlib import Path

import pytest

from appliance.cli import install_service
from engine.errors import ConfigError


@pytest.fixture
def places(tmp_path, monkeypatch):
    moved = {name: str(tmp_path / place.replace("/", "-")) for name, place in PLACES.items()}
    monkeypatch.setattr(install_service, "PLACES", moved)
    return moved


PLACES = dict(install_service.PLACES)


def test_files_come_first_and_name_the_command_of_this_environment(places):
    steps = list(install_service.install_steps(Path("/opt/penstock/bin/penstock")))
    written = [step for step in steps if step.path is not None]
    assert [str(step.path) for step in written] == list(places.values())
    assert steps[: len(written)] == written
    assert "ExecStart=/opt/penstock/bin/penstock serve\n" in written[0].text
    assert "@PENSTOCK@" not in written[0].text
    assert steps[-1].command[:3] == ("systemctl", "enable", "--now")


def test_an_update_writes_what_differs_and_restarts(places):
    program = Path("/opt/penstock/bin/penstock")
    for step in install_service.install_steps(program):
        if step.path is not None:
            install_service.do_step(step)
    assert not [step for step in install_service.install_steps(program) if step.path is not None]
    Path(places["penstock.socket"]).write_text("[Socket]\n")
    steps = list(install_service.install_steps(program))
    assert [str(step.path) for step in steps if step.path] == [places["penstock.socket"]]
    assert steps[-1].command == (str(program), "restart")


def test_a_dry_run_shows_the_plan_and_then_what_would_be_refused(monkeypatch, capsys):
    def refuse(program):
        raise ConfigError("the service's user cannot enter it")

    monkeypatch.setattr(install_service, "check_reach", refuse)
    with pytest.raises(ConfigError):
        install_service.install_service(dry_run=True)
    assert "penstock.socket" in capsys.readouterr().out


def test_an_install_that_is_refused_does_nothing(monkeypatch, capsys):
    def refuse(program):
        raise ConfigError("the service's user cannot enter it")

    monkeypatch.setattr(install_service, "check_program", refuse)
    monkeypatch.setattr(install_service, "do_step", lambda step: pytest.fail(f"did {step}"))
    with pytest.raises(ConfigError):
        install_service.install_service(dry_run=False)
    assert capsys.readouterr().out == ""


@pytest.fixture
def open_folder():
    """A folder that everybody may enter; pytest's own ones shut others out."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_python_that_others_cannot_run_is_refused_by_the_folder_that_shuts_them_out(
    open_folder, monkeypatch
):
    home = open_folder / "home"
    program = home / "venv" / "bin" / "penstock"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    for name in ("prefix", "executable", "base_prefix"):
        monkeypatch.setattr(sys, name, str(program))
    install_service.check_reach(program)
    home.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot enter") as refused:
        install_service.check_reach(program)
    assert refused.value.where == str(home)
    assert refused.value.hint
