"""The unit on a booted systemd: installed, used, reloaded, killed, stopped, upgraded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests import booted_machine
from tests.booted_machine import Machine, build_wheel, needed_folders

pytestmark = pytest.mark.skipif(
    booted_machine.why_not() is not None, reason=str(booted_machine.why_not())
)
SETTINGS = "/etc/penstock/penstock.toml"
DROP_IN = """
[Service]
# tests have no time for the usual ones
WatchdogSec=3
RestartSec=100ms
"""
LONG = ("run", "--raw", "Once upon a time", "--max-tokens")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Two versions, which are built while the machine boots and the first one is tested."""
    with ThreadPoolExecutor(2) as pool:
        yield [
            pool.submit(build_wheel, tmp_path_factory.mktemp(f"wheel{version}"), version)
            for version in ("0.1.0", "0.1.1")
        ]


@pytest.fixture(scope="module")
def machine(wheels):
    """A machine on which the lines of docs/operating.md for the service have been done."""
    machine = Machine(needed_folders())
    try:
        machine.install(wheels[0].result())
        drop_in = machine.path("/etc/systemd/system/penstock.service.d/tests.conf")
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(DROP_IN)
        for user, groups in {"ada": "penstock-users", "ops": "penstock-admin", "eve": ""}.items():
            machine.run("useradd", user)
            if groups:
                machine.run("groupadd", "-f", "-r", groups)
                machine.run("usermod", "-aG", groups, user)
        make_nvidia_modprobe(machine)
        told = machine.penstock("install-service").stdout
        for unit in ("penstock.service", "penstock-gpu.service"):
            assert f"write /etc/systemd/system/{unit}" in told
        yield machine
    finally:
        machine.close()


MODPROBE = "/opt/nvidia-modprobe"
MODPROBE_DROP_IN = f"""
[Unit]
ConditionPathExists=
ConditionPathExists={MODPROBE}
[Service]
ExecStart=
ExecStart={MODPROBE} -u -c 0
"""
"""It has none of the unit's lines for the GPUs that a driver names: there is no driver."""
NODE = "/dev/nvidia-uvm"


def make_nvidia_modprobe(machine):
    """A made-up one, where it can be written: it makes a node of NVIDIA's kind, and a log."""
    script = machine.path(MODPROBE)
    script.write_text(
        '#!/bin/sh -e\necho "$@" >> /opt/modprobe.log\n'
        f"[ -e {NODE} ] || mknod -m 666 {NODE} c 195 255\n"
    )
    script.chmod(0o755)
    drop_in = machine.path("/etc/systemd/system/penstock-gpu.service.d/tests.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(MODPROBE_DROP_IN)


@pytest.fixture
def settings(machine):
    """Write the configuration file; it is gone after the test, and the daemon has read that."""
    path = machine.path(SETTINGS)
    yield path.write_text
    path.unlink(missing_ok=True)


def asked(machine, path):
    """The reply to a GET, from here: the command would take the cores from a daemon that starts."""
    transport = httpx.HTTPTransport(uds=machine.socket)
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as http:
        return http.get(path)


def is_ready(machine):
    with contextlib.suppress(httpx.HTTPError):  # it may end just now
        is_active = machine.property("ActiveState") == "active"
        return is_active and asked(machine, "/ready").status_code == 200
    return False


def is_decoding(machine):
    return asked(machine, "/v1/penstock/state").json()["queue"]["decoding"]


def main_pid(machine):
    return int(machine.property("MainPID"))


def tell(machine, name, *pids):
    machine.run("kill", f"-{name}", *map(str, pids))


def events(machine, code):
    rows = json.loads(machine.penstock("events", "-o", "json").stdout)["data"]
    return [row["message"] for row in rows if row["code"] == code]


def test_it_is_ready_confined_and_open_to_whom_it_should_be(machine):
    assert machine.property("ActiveState") == "active"
    rated = machine.run("systemd-analyze", "security", "--no-pager", "penstock.service").stdout
    score = float(rated.rpartition("penstock.service: ")[2].split()[0])
    assert score <= 1.5
    who = {
        user: machine.penstock("whoami", "-o", "json", user=user, check=False)
        for user in ("ada", "ops", "eve")
    }
    assert json.loads(who["ada"].stdout)["role"] == "user"
    assert json.loads(who["ops"].stdout)["role"] == "operator"
    assert who["eve"].returncode == 4
    state = machine.path("/var/lib/penstock").stat()
    assert state.st_mode & 0o777 == 0o700
    assert machine.penstock("db", "path").stdout == "/var/lib/penstock/requests.db\n"
    shown = json.loads(machine.penstock("config", "show", "-o", "json").stdout)["data"]
    assert {row["name"]: row["value"] for row in shown}["state_dir"] == "/var/lib/penstock"
    text = machine.penstock("run", "Who are you?", user="ada").stdout
    assert "starter model" in text


def test_device_nodes_of_gpus_are_made_before_each_start(machine):
    if machine.run("mknod", "/dev/tried", "c", "195", "254", check=False).returncode:
        pytest.skip("no node may be made on this machine")
    assert machine.path("/opt/modprobe.log").read_text() == "-u -c 0\n"
    assert machine.path(NODE).is_char_device()
    times = {
        unit: int(machine.property(f"{what}TimestampMonotonic", unit))
        for unit, what in (
            ("penstock-gpu.service", "ExecMainExit"),
            ("penstock.service", "ExecMainStart"),
        )
    }
    assert times["penstock-gpu.service"] < times["penstock.service"]
    assert machine.property("Result", "penstock-gpu.service") == "success"


def test_a_reload_takes_keys_over_and_fails_on_a_wrong_file(machine, settings):
    keys = machine.path("/etc/penstock/keys")
    keys.write_text(machine.penstock("keys", "new", "laptop").stdout)
    machine.run("chown", "root:penstock", "/etc/penstock/keys")
    keys.chmod(0o640)
    settings('api_keys = "/etc/penstock/keys"\nmax_queued = 7\n')
    machine.run("systemctl", "reload", "penstock")
    (told,) = events(machine, "config.reloaded")
    assert "api_keys" in told
    assert "max_queued" in told
    settings('max_queued = "many"\n')
    refused = machine.run("systemctl", "reload", "penstock", check=False)
    assert refused.returncode != 0
    assert machine.property("ActiveState") == "active"
    said = [e for e in machine.journal() if f"{SETTINGS}:1: max_queued" in e["MESSAGE"]]
    assert said
    assert {each["PRIORITY"] for each in said} == {"3"}
    assert not any(each["MESSAGE"].startswith("penstock: ") for each in machine.journal())


def test_a_killed_worker_is_noticed_by_nobody(machine):
    stream = machine.start(booted_machine.PROGRAM, *LONG, "500")
    machine.wait_for(lambda: is_decoding(machine))
    workers = asked(machine, "/v1/penstock/state").json()["workers"]
    tell(machine, "KILL", *[worker["pid"] for worker in workers])
    out, err = stream.communicate(timeout=120)
    assert stream.returncode == 0, err
    assert len(out) > 100
    machine.wait_for(lambda: is_ready(machine))


def test_a_stream_goes_on_in_the_next_daemon(machine):
    """After a kill, and after a restart on purpose; with the same text as undisturbed."""
    machine.wait_for(lambda: is_ready(machine))
    words = (booted_machine.PROGRAM, *LONG, "1500", "--seed", "3")
    whole = machine.run(*words)
    for end in (lambda pid: tell(machine, "KILL", pid), lambda _: machine.penstock("restart")):
        stream, pid = machine.start(*words), main_pid(machine)
        machine.wait_for(lambda: is_decoding(machine))
        end(pid)
        out, err = stream.communicate(timeout=120)
        assert (stream.returncode, out, err) == (0, whole.stdout, whole.stderr)
        machine.wait_for(lambda pid=pid: main_pid(machine) not in (0, pid) and is_ready(machine))


def test_a_stopped_daemon_is_found_and_serves_again(machine):
    machine.wait_for(lambda: is_ready(machine))
    pid = main_pid(machine)
    tell(machine, "STOP", pid)
    machine.wait_for(lambda: main_pid(machine) not in (0, pid) and is_ready(machine))
    messages = [each["MESSAGE"] for each in machine.journal()]
    assert any("Watchdog timeout" in each for each in messages)
    assert any("most recent call first" in each for each in messages)  # its stacks


def test_a_stop_drains_for_a_while_and_tells_the_streams_that_it_cuts(machine, settings):
    settings("max_drain = 2\n")
    machine.run("systemctl", "reload", "penstock")
    stream = machine.start(booted_machine.PROGRAM, *LONG, "10000")
    machine.wait_for(lambda: is_decoding(machine))
    machine.run("systemctl", "restart", "penstock")
    _, said = stream.communicate(timeout=120)
    assert "is stopping" in said
    assert stream.returncode == 7
    assert any("max_drain" in each for each in events(machine, "drain.timeout"))


def test_clients_wait_through_an_upgrade(machine, wheels):
    is_over = False

    def keep_asking(*, keeps_alive):
        """Status codes, and what else came instead, of requests one after the other."""
        limits = httpx.Limits(max_keepalive_connections=int(keeps_alive))
        transport = httpx.HTTPTransport(uds=machine.socket, limits=limits)
        answers = []
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as http:
            while not is_over:
                body = {"prompt": "Hello", "max_tokens": 2}
                answers.append(http.post("/v1/completions", json=body).status_code)
                time.sleep(0.01)
        return answers

    machine.install(wheels[1].result())
    with ThreadPoolExecutor(2) as pool:
        askers = [pool.submit(keep_asking, keeps_alive=keeps) for keeps in (True, False)]
        began = time.monotonic()
        machine.penstock("install-service")
        took_s = time.monotonic() - began
        machine.wait_for(lambda: is_ready(machine))
        is_over = True
        answers = [answer for asker in askers for answer in asker.result()]
    assert set(answers) == {200}
    assert took_s < 60
    assert "0.1.1" in machine.penstock("version").stdout


def test_a_wrong_configuration_is_not_tried_again_and_a_stopped_unit_is_named(machine, settings):
    settings("max_drian = 2\n")
    machine.run("systemctl", "restart", "penstock", check=False)
    assert machine.property("ExecMainStatus") == "78"
    assert machine.property("ActiveState") == "failed"
    machine.run("systemctl", "stop", "penstock.socket", "penstock.service")
    machine.path(SETTINGS).unlink()
    asked = machine.penstock("status", user="ada", check=False)
    assert asked.returncode == 3
    assert "/run/penstock/penstock.sock" in asked.stderr
    assert "systemctl start penstock.socket penstock.service" in asked.stderr


def test_nothing_is_left_behind():
    """Whatever ends a machine, its cgroups and folders go with it."""
    machine = Machine(needed_folders())
    os.kill(machine._launcher.pid, signal.SIGTERM)
    machine.close()
    assert not machine._root.exists()
    assert not machine._cgroup.exists()
