"""The unit and its helpers are accepted by systemd without a word."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.errors import ConfigError

UNITS = Path(__file__).parents[1] / "systemd"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_systemd_accepts_the_unit_without_a_word(tmp_path: Path) -> None:
    # verify wants ExecStart to exist, and exits 0 on unknown keys: only silence is approval.
    text = (UNITS / "penstock.service").read_text()
    assert "ExecStart=/opt/penstock/.venv/bin/penstock serve\n" in text
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/.venv/bin/penstock", shutil.which("true") or ""))
    checked = run("systemd-analyze", "verify", "--man=no", unit)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_verify_would_speak_of_a_misspelt_key(tmp_path: Path) -> None:
    unit = tmp_path / "wrong.service"
    unit.write_text("[Service]\nExecStart=/bin/true\nRestrat=always\n")
    assert "Restrat" in run("systemd-analyze", "verify", "--man=no", unit).stderr


def test_the_unit_is_well_confined() -> None:
    unit = UNITS / "penstock.service"
    rated = run("systemd-analyze", "security", "--offline=yes", "--threshold=25", unit)
    assert rated.returncode == 0, rated.stdout


def test_the_unit_agrees_with_the_program() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNITS / "penstock.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == str(ConfigError.exit_code)
    assert service["KillMode"] == "mixed"
    assert service["RuntimeDirectory"] == "penstock"  # the socket's /run/penstock
    assert "PrivateUsers" not in service
    assert "WatchdogSec" not in service  # nothing sends WATCHDOG=1


def test_the_users_and_folders_can_be_made(tmp_path: Path) -> None:
    users = run(
        "systemd-sysusers", "--dry-run", f"--root={tmp_path}", UNITS / "penstock.sysusers.conf"
    )
    assert users.returncode == 0, users.stderr
    assert "Creating user 'penstock'" in users.stdout + users.stderr
    folders = run(
        "systemd-tmpfiles", "--create", f"--root={tmp_path}", UNITS / "penstock.tmpfiles.conf"
    )
    assert folders.returncode == 0, folders.stderr
    assert (tmp_path / "etc/penstock").stat().st_mode & 0o777 == 0o755
