"""The units and their helpers are accepted by systemd without a word."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.cli.install_service import PLACES
from appliance.configuration.paths import GPU_UNIT_NAME, SYSTEM_SOCKET
from appliance.configuration.settings import ServeConfig
from appliance.daemon.survival import keeper
from appliance.http.listeners import SOCKET_MODE
from appliance.http.server import NUM_RESERVED
from appliance.observe.telemetry.progress import LOOK_INTERVAL_S
from engine.errors import ConfigError

UNITS = Path(__file__).parents[1] / "systemd"
PROGRAM = "@PENSTOCK@"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_systemd_accepts_the_units_without_a_word(tmp_path: Path) -> None:
    # verify wants ExecStart to exist, and exits 0 on unknown keys: only silence is approval.
    units = (tmp_path / name for name in PLACES if name.endswith((".service", ".socket")))
    for unit in units:
        text = (UNITS / unit.name).read_text()
        for program in (PROGRAM, "/usr/bin/nvidia-modprobe"):
            text = text.replace(program, shutil.which("true") or "")
        unit.write_text(text)
    checked = run("systemd-analyze", "verify", "--man=no", *tmp_path.glob("*.service"))
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_verify_would_speak_of_a_misspelt_key(tmp_path: Path) -> None:
    unit = tmp_path / "wrong.service"
    unit.write_text("[Service]\nExecStart=/bin/true\nRestrat=always\n")
    assert "Restrat" in run("systemd-analyze", "verify", "--man=no", unit).stderr


def test_the_unit_is_well_confined() -> None:
    unit = UNITS / "penstock.service"
    rated = run("systemd-analyze", "security", "--offline=yes", "--threshold=15", unit)
    assert rated.returncode == 0, rated.stdout


def test_the_unit_agrees_with_the_program() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNITS / "penstock.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == str(ConfigError.exit_code)
    assert service["KillMode"] == "mixed"
    assert "RuntimeDirectory" not in service  # it would be removed with the socket in it
    assert "PrivateUsers" not in service
    assert int(service["WatchdogSec"]) == keeper.WATCHDOG_S >= 10 * LOOK_INTERVAL_S
    assert service["RestartForceExitStatus"] == str(keeper.RESTART_STATUS)
    max_connections = ServeConfig(socket=Path(), state_dir=Path()).max_connections + NUM_RESERVED
    assert int(service["FileDescriptorStoreMax"]) > 3 * max_connections
    assert f"FDSTORE={service['FileDescriptorStoreMax']}" in service["Environment"].split()
    assert (
        float(service["TimeoutStopSec"])
        > ServeConfig(socket=Path(), state_dir=Path()).max_drain_s + 10
    )
    assert unit["Unit"]["Requires"] == "penstock.socket"


def test_the_unit_lets_cuda_and_mps_in() -> None:
    lines = (UNITS / "penstock.service").read_text().splitlines()
    # PrivateTmp would hide the pipe of MPS; where there is none, that is no error.
    assert "PrivateTmp=yes" not in lines or "BindPaths=-/tmp/nvidia-mps" in lines


def test_a_unit_without_a_device_policy_makes_the_gpus_nodes_before_the_daemon() -> None:
    lines = (UNITS / GPU_UNIT_NAME).read_text().splitlines()
    assert "ExecStart=/usr/bin/nvidia-modprobe -u -c 0" in lines
    assert "Before=penstock.service" in lines
    assert not [line for line in lines if line.startswith(("Device", "PrivateDevices", "User="))]
    daemon = (UNITS / "penstock.service").read_text()
    assert f"\nWants={GPU_UNIT_NAME}\nAfter={GPU_UNIT_NAME}\n" in daemon
    assert "nvidia-modprobe" not in daemon


def test_every_gpu_that_the_driver_has_gets_its_node(tmp_path: Path) -> None:
    lines = (UNITS / GPU_UNIT_NAME).read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("ExecStart=/bin/sh -ec ")]
    shell, option, script = shlex.split(line.removeprefix("ExecStart="))
    made, gpus = tmp_path / "made", tmp_path / "gpus"
    modprobe = tmp_path / "nvidia-modprobe"
    modprobe.write_text(f'#!/bin/sh\necho "$@" >> {made}\n')
    modprobe.chmod(0o755)
    script = script.replace("$$", "$").replace("/usr/bin/nvidia-modprobe", str(modprobe))
    script = script.replace("/proc/driver/nvidia/gpus", str(gpus))
    assert run(shell, option, script).returncode == 0  # no GPU, no node
    for address, minor in (("0000:17:00.0", 0), ("0000:65:00.0", 1)):
        (gpus / address).mkdir(parents=True)
        about = f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n"
        (gpus / address / "information").write_text(about)
    assert run(shell, option, script).returncode == 0
    assert made.read_text() == "-c 0\n-c 1\n"


def test_the_socket_is_where_everybody_looks() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNITS / "penstock.socket")
    assert unit["Socket"]["ListenStream"] == str(SYSTEM_SOCKET)
    assert int(unit["Socket"]["SocketMode"], 8) == SOCKET_MODE


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
