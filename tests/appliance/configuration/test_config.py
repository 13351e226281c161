"""Flag over environment over file over default, and errors that say where."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.client.address import socket_path
from appliance.configuration import client_settings, config, paths, sources
from appliance.configuration.client_settings import explain
from appliance.configuration.config import changes, load, take_over
from appliance.configuration.folders import check_directories, prepare_directories
from appliance.configuration.setting_kinds import is_meant, parse_bytes
from appliance.configuration.settings import SETTINGS, ServeConfig
from appliance.configuration.sources import named_by_source
from engine.errors import (
    CheckpointError,
    ConfigError,
    SeveralWrong,
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing installed: all the places that are looked at, empty."""
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", tmp_path / "etc" / "penstock.toml")
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", tmp_path / "run" / "penstock.sock")
    monkeypatch.setattr(paths, "TEMPORARY_DIR", tmp_path / "tmp")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("etc", "run", "tmp", "home"):
        (tmp_path / folder).mkdir()
    return tmp_path


def write_toml(machine: Path, text: str) -> Path:
    path = machine / "etc" / "penstock.toml"
    path.write_text(text)
    return path


def test_nothing_set_gives_the_defaults(machine: Path) -> None:
    uid = os.getuid()
    assert load({}, {}) == ServeConfig(
        socket=machine / "tmp" / f"penstock-{uid}" / "penstock.sock",
        state_dir=machine / "home/.local/state/penstock",
    )


def test_a_flag_beats_the_environment_beats_the_file(machine: Path) -> None:
    write_toml(machine, 'dtype = "float16"\nroles = "colocated"\nmax_model_len = 512\n')
    environ = {"PENSTOCK_DTYPE": "bfloat16", "PENSTOCK_ROLES": "static"}
    found = load({"dtype": "float32", "roles": None}, environ)
    assert (found.dtype, found.roles, found.max_model_len) == ("float32", "static", 512)


def test_every_setting_can_come_from_the_file(machine: Path) -> None:
    write_toml(
        machine,
        'model = "/models/tiny"\ndtype = "bfloat16"\ntransport = "shm"\nroles = "static"\n'
        "slo_ttft_ms = 900\nslo_itl_ms = 50\n"
        'socket = "/s/p.sock"\nstate_dir = "/state"\n'
        'max_model_len = 4096\nkv_memory = "2GiB"\nlog_text = true\n',
    )
    assert load({}, {}) == ServeConfig(
        model=Path("/models/tiny"),
        dtype="bfloat16",
        transport="shm",
        roles="static",
        slo_ttft_ms=900,
        slo_itl_ms=50,
        socket=Path("/s/p.sock"),
        state_dir=Path("/state"),
        max_model_len=4096,
        kv_memory_bytes=2 << 30,
        log_text=True,
    )


def test_the_named_file_replaces_the_usual_ones(machine: Path) -> None:
    write_toml(machine, 'dtype = "float16"\n')
    other = machine / "other.toml"
    other.write_text('dtype = "float32"\n')
    assert load({}, {"PENSTOCK_CONFIG": str(other)}).dtype == "float32"
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot read"):
        load({}, {"PENSTOCK_CONFIG": str(machine / "absent.toml")})


def write_own_toml(machine: Path, text: str) -> None:
    path = machine / "home/.config/penstock/penstock.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


OF_SERVICE = {"STATE_DIRECTORY": "/var/lib/penstock"}


@pytest.mark.parametrize(
    ("uid", "environ", "first"),
    [(0, {}, "float16"), (60001, OF_SERVICE, "float16"), (60001, {}, "float32")],
)
def test_root_and_the_service_read_the_services_file_first_and_users_their_own(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    environ: dict[str, str],
    first: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    write_own_toml(machine, 'dtype = "float32"\n')
    assert load({}, environ).dtype == "float32"
    write_toml(machine, 'dtype = "float16"\n')
    assert load({}, environ).dtype == first


def test_a_user_without_a_file_reads_the_services(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 60001)
    write_toml(machine, 'dtype = "float16"\n')
    assert load({}, {}).dtype == "float16"


@pytest.mark.parametrize(
    ("flags", "environ", "text", "words"),
    [
        ({"dtype": "int8"}, {}, "", ["--dtype", "int8", "bfloat16"]),
        ({"max_model_len": "1"}, {}, "", ["--max-model-len", "'1'", "2 or more"]),
        ({}, {"PENSTOCK_KV_MEMORY": "lots"}, "", ["PENSTOCK_KV_MEMORY", "lots", "2GiB"]),
        ({}, {"PENSTOCK_LOG_TEXT": "maybe"}, "", ["PENSTOCK_LOG_TEXT", "maybe", "true or false"]),
        ({}, {}, "kv_memory = 12\n", ["penstock.toml", "kv_memory", "12", "1MiB"]),
        ({}, {}, "max_model_len = true\n", ["penstock.toml", "max_model_len", "True"]),
        ({}, {}, "model = 3\n", ["penstock.toml", "model", "3", "a path"]),
        ({}, {}, "dtype = [1]\n", ["penstock.toml", "dtype", "[1]"]),
        ({}, {}, 'cors_origins = "ha"\n', ["penstock.toml:1", "'ha'", "https://"]),
        ({}, {}, 'cors_origins = ["https://a.example/"]\n', ["a.example/", "without a path"]),
        ({}, {}, 'model_aliases = "[[["\n', ["penstock.toml:1", "[[[", "claude-*"]),
        ({}, {}, '[models.""]\nmodel = "/a"\n', ["penstock.toml:1", "without a name"]),
        ({}, {}, 'colour = "red"\n', ["penstock.toml:1", "colour"]),
        ({}, {}, 'dtype = "auto"\n\n[server]\nport = 1\n', ["penstock.toml:3", "server"]),
        ({}, {}, '# dtype\n"max_queued" = 0\n', ["penstock.toml:2: max_queued", "0", "1 or more"]),
        ({"listen": "0.0.0.0:80"}, {}, "", ["--listen: ", "0.0.0.0", "TLS"]),
        ({"listen": "[::]:80"}, {}, "", ["listen", "::", "TLS"]),
        ({"auth": "false"}, {}, "", ["--no-auth", "loopback"]),
        (
            {"listen": "0.0.0.0:80", "auth": "false", "tls_cert": "c", "tls_key": "k"},
            {},
            "",
            ["--no-auth", "loopback"],
        ),
        ({"listen": "box.lan:80"}, {}, "", ["--listen", "box.lan", "IP address"]),
        ({"listen": "::1:80"}, {}, "", ["--listen", "::1", "IP address"]),
        ({"listen": "127.0.0.1:80", "tls_cert": "c.pem"}, {}, "", ["--tls-cert", "together"]),
        ({"listen": "127.0.0.1:65536"}, {}, "", ["--listen", "65535"]),
        ({}, {}, "operators = [1]\n", ["penstock.toml:1", "[1]", "user names"]),
        ({"config": "/no/such.toml"}, {}, "", ["/no/such.toml", "cannot read"]),
        ({}, {}, 'dtype = "a"\nroles = \n', ["penstock.toml", "line 2"]),
        ({"transport": "shm", "roles": "colocated"}, {}, "", ["--transport: ", "shm", "colocated"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_place(
    machine: Path,
    flags: dict[str, str | None],
    environ: dict[str, str],
    text: str,
    words: list[str],
) -> None:
    write_toml(machine, text)
    with pytest.raises(ConfigError) as caught:
        load(flags, environ)
    assert [word for word in words if word not in str(caught.value)] == []
    assert caught.value.exit_code == 78


def test_a_file_named_by_flag_beats_one_named_by_the_environment(machine: Path) -> None:
    write_toml(machine, 'dtype = "float16"\n')
    mine, theirs = machine / "mine.toml", machine / "theirs.toml"
    mine.write_text('roles = "colocated"\n')
    theirs.write_text('roles = "static"\n')
    found = load({"config": str(mine)}, {"PENSTOCK_CONFIG": str(theirs)})
    assert (found.roles, found.dtype) == ("colocated", "auto")


def test_lists_and_addresses_are_read_from_flag_and_file(machine: Path) -> None:
    path = write_toml(machine, 'operators = ["ana", "@wheel"]\nlisten = "[::1]:8000"\n')
    found = load({}, {"PENSTOCK_VIEWERS": "bo, @guests,"})
    assert (found.operators, found.viewers) == (("ana", "@wheel"), ("bo", "@guests"))
    assert found.listen == ("::1", 8000)
    origins = {name: origin for name, _, origin in explain({"dtype": "float16"}, {})}
    assert origins["operators"] == f"{path}:1: operators"
    assert origins["listen"] == f"{path}:2: listen"
    assert (origins["dtype"], origins["viewers"]) == ("--dtype", "default")
    assert origins.keys() == SETTINGS.keys()


def test_a_variable_that_sets_nothing_is_known_by_its_name() -> None:
    settings = {sources.variable(name): "x" for name in SETTINGS}
    clients = {"PENSTOCK_HOST": "x", "PENSTOCK_API_KEY": "x", "PENSTOCK_CONFIG": "x", "HOME": "x"}
    environ = {**settings, **clients, "PENSTOCK_DTYP": "x"}
    (sentence,) = config.unknown_variables(environ)
    assert "PENSTOCK_DTYP is set" in sentence
    assert "is PENSTOCK_DTYPE meant?" in sentence


def test_a_setting_that_is_misspelt_in_the_file_is_told_its_name(machine: Path) -> None:
    write_toml(machine, "kv_memmory = '2GiB'\n")
    with pytest.raises(ConfigError) as refused:
        load({}, {})
    assert refused.value.hint == "is kv_memory meant?"


def test_only_what_is_near_is_guessed() -> None:
    (nothing,) = config.unknown_variables({"PENSTOCK_NONSENSE": "1"})
    assert "meant" not in nothing
    assert is_meant("operatr", SETTINGS) == "is operators meant? "
    of_a_request = is_meant("temperatur", SETTINGS)
    assert "set by a request" in of_a_request
    assert is_meant("temperatur", ["temperature"]) == "is temperature meant? "


def test_a_setting_of_an_earlier_release_says_what_there_is_in_its_place(machine: Path) -> None:
    write_toml(machine, "max_queued = 9\ncache_dir = '/x'\n")
    with pytest.raises(ConfigError) as refused:
        load({}, {})
    assert refused.value.where.endswith(":2")
    assert refused.value.hint.startswith("cache_dir no longer exists")
    (told,) = config.unknown_variables({"PENSTOCK_CACHE_DIR": "/x"})
    assert "cache_dir no longer exists" in told


def test_priorities_are_weights_by_user_and_key(machine: Path) -> None:
    expected = (("ann", 4.0), ("key:batch", 0.5))
    assert load({"priorities": "ann=4, key:batch=0.5"}, {}).priorities == expected
    write_toml(machine, 'priorities = ["ann=4", "key:batch=0.5"]\n')
    assert load({}, {}).priorities == expected
    for wrong in ("ann", "ann=0", "ann=x", "=4", "ann=1000", 'ann=4,,bob="5"'):
        with pytest.raises(ConfigError, match=r"weights of 0\.01 to 100"):
            load({"priorities": wrong}, {})


def test_what_a_running_daemon_cannot_change_is_named_and_kept(machine: Path) -> None:
    write_toml(machine, 'max_queued = 8\nlog_max_size = "1GiB"\n')
    old = load({}, {})
    write_toml(machine, 'max_queued = 9\nlog_max_size = "3GiB"\nroles = "colocated"\n')
    new = load({}, {})
    assert changes(old, new) == (["max_queued", "log_max_size"], ["roles"])
    taken = take_over(old, new)
    assert (taken.max_queued, taken.log_max_bytes, taken.roles) == (9, 3 << 30, "auto")
    assert changes(taken, new) == ([], ["roles"])


def test_root_looks_for_the_socket_in_the_documented_order(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = {
        "PENSTOCK_SOCKET": "/env.sock",
        "RUNTIME_DIRECTORY": "/run/unit",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    file = write_toml(machine, 'socket = "/file.sock"\n')
    system = machine / "run" / "penstock.sock"
    system.touch()
    assert socket_path("/flag.sock", environ) == Path("/flag.sock")
    assert socket_path(None, environ) == Path("/env.sock")
    del environ["PENSTOCK_SOCKET"]
    assert socket_path(None, environ) == Path("/file.sock")
    file.unlink()
    assert socket_path(None, environ) == Path("/run/unit/penstock.sock")
    del environ["RUNTIME_DIRECTORY"]
    assert socket_path(None, environ) == system
    system.unlink()
    assert socket_path(None, environ) == Path("/run/user/7/penstock/penstock.sock")
    del environ["XDG_RUNTIME_DIR"]
    own = machine / "tmp" / f"penstock-{os.getuid()}" / "penstock.sock"
    assert socket_path(None, environ) == own
    assert load({}, environ).socket == own


def test_a_daemon_is_found_where_it_says_that_it_listens(machine: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": str(machine / "state")}
    usual = Path("/run/user/7/penstock/penstock.sock")
    lock = machine / "state" / "penstock" / "lock"
    lock.parent.mkdir(parents=True)
    other = machine / "tmp" / "s"
    lock.write_text(f"71 {other}\n")
    assert socket_path(None, environ) == usual
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other))
        assert socket_path(None, environ) == other
        if os.getuid() == 0:  # anybody may listen where a daemon was that has ended
            os.chown(other, 1234, 1234)
            assert socket_path(None, environ) == usual
        lock.write_bytes(b"\xff\n")
        assert socket_path(None, environ) == usual
    lock.unlink()
    os.mkfifo(lock)
    assert socket_path(None, environ) == usual


def test_a_user_serves_beside_the_service_and_asks_it_while_no_daemon_of_his_own_runs(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 60001)
    environ = {"XDG_RUNTIME_DIR": str(machine), "XDG_STATE_HOME": str(machine / "state")}
    service, own = machine / "run" / "penstock.sock", machine / "penstock" / "penstock.sock"
    service.touch()
    own.parent.mkdir()
    assert load({}, environ).socket == own
    assert socket_path(None, environ) == service
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(own))
        assert socket_path(None, environ) == own
    moved = own.rename(machine / "moved.sock")
    lock = machine / "state" / "penstock" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"71 {moved}\n")
    assert socket_path(None, environ) == moved


def test_a_socket_that_a_killed_daemon_left_hides_no_daemon_that_listens(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 60001)
    monkeypatch.setattr(paths, "check_own_socket", lambda _path: None)
    environ = {"XDG_RUNTIME_DIR": str(machine)}
    service, own = machine / "run" / "penstock.sock", machine / "penstock" / "penstock.sock"
    own.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as living:
        dead.bind(str(own))
        assert socket_path(None, environ) == own, "there is no other"
        living.bind(str(service))
        assert socket_path(None, environ) == own, "nobody listens on either"
        living.listen(1)
        assert socket_path(None, environ) == service
        assert socket_path(None, {**environ, "PENSTOCK_SOCKET": str(own)}) == own
        write_own_toml(machine, f'socket = "{own}"\n')
        assert socket_path(None, environ) == own


def test_a_daemon_of_the_users_own_that_listens_is_asked_also_if_it_is_busy(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 60001)
    monkeypatch.setattr(paths, "check_own_socket", lambda _path: None)
    environ = {"XDG_RUNTIME_DIR": str(machine)}
    own = machine / "penstock" / "penstock.sock"
    own.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as service, socket.socket(socket.AF_UNIX) as busy:
        service.bind(str(machine / "run" / "penstock.sock"))
        service.listen()
        busy.bind(str(own))
        busy.listen(0)
        assert [socket_path(None, environ) for _ in range(5)] == [own] * 5


def test_what_a_start_would_use_is_shown_by_the_users_file_though_the_service_is_asked(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 60001)
    (machine / "run" / "penstock.sock").touch()
    write_toml(machine, 'dtype = "float16"\n')
    assert shown("state_dir") == paths.SYSTEM_STATE_DIR
    write_own_toml(machine, 'dtype = "float32"\n')
    assert shown("dtype") == "float32"
    assert shown("state_dir") == machine / "home/.local/state/penstock"


def shown(name: str) -> object:
    return next(each.value for each in explain({}, {}) if each.name == name)


def test_a_shared_folder_in_tmp_must_be_ours_alone(machine: Path) -> None:
    folder = machine / "tmp" / f"penstock-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="0777"):
        socket_path(None, {})
    folder.rmdir()
    folder.symlink_to(machine / "etc")
    with pytest.raises(ConfigError, match="of this user"):
        socket_path(None, {})


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_folder_in_tmp_of_someone_else_is_refused(machine: Path) -> None:
    folder = machine / "tmp" / "penstock-0"
    folder.mkdir(mode=0o700)
    os.chown(folder, 1234, 1234)
    with pytest.raises(ConfigError, match="1234"):
        socket_path(None, {})


def test_systemd_and_xdg_choose_the_folders(machine: Path) -> None:
    xdg = {"XDG_STATE_HOME": "/xdg/state"}
    assert load({}, xdg).state_dir == Path("/xdg/state/penstock")
    relative = load({}, {"XDG_STATE_HOME": "relative"})
    assert relative.state_dir == machine / "home/.local/state/penstock"
    unit = {**xdg, "STATE_DIRECTORY": "/var/lib/p:/other"}
    assert load({}, unit).state_dir == Path("/var/lib/p")
    assert load({"state_dir": "/mine"}, unit).state_dir == Path("/mine")
    assert client_settings.state_dir(None, unit) == Path("/var/lib/p")
    assert client_settings.state_dir("/mine", unit) == Path("/mine")


@pytest.mark.parametrize("place", ["tmp", "runtime"])
def test_folders_are_made_for_their_owner_alone(machine: Path, place: str) -> None:
    environ = {"XDG_RUNTIME_DIR": str(machine / "runtime")} if place == "runtime" else {}
    found = load({}, environ)
    assert found.socket.is_relative_to(machine / place)
    prepare_directories(found, environ)
    prepare_directories(found, environ)
    for folder in (found.socket.parent, found.state_dir):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_group_can_enter_a_folder_that_is_named_for_the_socket(
    machine: Path, umask: int
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(machine)}
    found = load({"socket": str(machine / "shared" / "deep" / "p.sock")}, environ)
    before = os.umask(umask)
    try:
        prepare_directories(found, environ)
    finally:
        os.umask(before)
    for folder in (found.socket.parent, found.socket.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o750
    assert found.state_dir.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_there_keeps_its_mode(machine: Path) -> None:
    (machine / "run").chmod(0o755)
    prepare_directories(load({"socket": str(machine / "run" / "p.sock")}, {}), {})
    assert (machine / "run").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_made_is_named(machine: Path) -> None:
    (machine / "file").touch()
    found = load({"state_dir": str(machine / "file" / "below")}, {})
    with pytest.raises(ConfigError, match="file/below"):
        prepare_directories(found)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("4G", 4 << 30),
        ("1.5g", 3 << 29),
        ("2MB", 2_000_000),
        ("1048576", 1 << 20),
        ("1048576B", 1 << 20),
        (" 3 T ", 3 << 40),
        (1 << 30, 1 << 30),
    ],
)
def test_sizes_are_read_with_their_unit(text: object, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@given(st.one_of(st.text(), st.integers(), st.booleans(), st.floats(), st.just("9" * 400)))
def test_a_size_is_read_or_refused_with_words(value: object) -> None:
    try:
        num_bytes = parse_bytes(value)
    except ValueError as error:
        words = str(error)
    else:
        assert num_bytes >= 1 << 20
        return
    assert "a size" in words


def test_finding_the_socket_imports_nothing_slow() -> None:
    script = (
        "import sys, appliance.configuration.client_settings, appliance.client\n"
        "print(sorted(sys.modules.keys() & "
        "{'msgspec','tomllib','sqlite3','sqlite_utils','torch','textual','rich','asyncio'}))"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr


@pytest.mark.parametrize("devices", ["auto", "cpu", "gpu0", "gpu0, gpu1", "cuda:1,MIG-5eed"])
def test_devices_are_auto_the_cpu_or_gpus_by_name(devices):
    assert load({"devices": devices}, {}).devices == devices.replace(" ", "")


@pytest.mark.parametrize("devices", ["cuda", "gpu", "0", "gpu0,cpu", "gpu0;gpu1"])
def test_other_devices_are_refused(devices):
    with pytest.raises(ConfigError, match="gpu0"):
        load({"devices": devices}, {})


def test_all_that_is_wrong_is_told_at_once(machine: Path) -> None:
    write_toml(
        machine,
        'colour = "red"\ndtype = "int7"\nmax_queued = 0\n'
        '[models.small]\ndtype = "int9"\nport = 1\n[models.other]\nmodel = "/m"\nweights = "x"\n',
    )
    with pytest.raises(SeveralWrong) as caught:
        load({"max_model_len": "1"}, {})
    told = [str(error) for error in caught.value.errors]
    named = ["colour", "int7", "max_queued", "which `model`", "int9", "port", "weights"]
    for word in [*named, "--max-model-len"]:
        assert any(word in line for line in told), word
    assert len(told) == len(named) + 1
    assert all(line in str(caught.value) for line in told)
    assert caught.value.exit_code == 78


def test_every_statement_that_is_no_toml_is_told_with_its_line(machine: Path) -> None:
    path = write_toml(
        machine,
        'dtype = bfloat16\nmax_queued = 0\noperators = [\n  "ana",\n]\nviewers = ["bo"\n'
        "roles = \nkv_memory = 2GiB\n[models.small]\ndtype = auto\n[models.other\nport = 1\n",
    )
    with pytest.raises(SeveralWrong) as caught:
        load({}, {})
    lines = [error.where.removeprefix(f"{path}:").split(":")[0] for error in caught.value.errors]
    assert sorted(map(int, lines)) == [1, 2, 6, 7, 8, 9, 10, 11]
    told = str(caught.value)
    assert all(word in told for word in ("max_queued", "which `model`"))
    assert "port" not in told
    assert "quotes" in caught.value.errors[0].hint


def test_what_is_wrong_in_the_file_stops_no_client(machine: Path) -> None:
    told: list[ConfigError] = []
    path = write_toml(machine, 'dtyp = "auto"\nsocket = "/s.sock"\nroles = static\n')
    assert socket_path(None, {}, told.append) == Path("/s.sock")
    assert [error.where for error in told] == [f"{path}:3", f"{path}:1"]
    assert (
        client_settings.state_dir(None, {}, told.append) == machine / "home/.local/state/penstock"
    )
    assert client_settings.ssd_folder("/ssd", None, {}, told.append) == Path("/ssd")
    with pytest.raises(SeveralWrong):
        socket_path(None, {})


@pytest.mark.parametrize("line", ["socket = /s.sock", "socket = 3", "socket = ["])
def test_a_client_does_not_guess_a_socket_that_cannot_be_read(machine: Path, line: str) -> None:
    write_toml(machine, f'dtyp = "auto"\n{line}\ndtype = "auto"\n')
    with pytest.raises(ConfigError, match=r"penstock\.toml:2"):
        socket_path(None, {}, lambda error: None)


def test_one_thing_that_is_wrong_is_told_as_it_is(machine: Path) -> None:
    write_toml(machine, "max_queued = 0\n")
    with pytest.raises(ConfigError) as caught:
        load({}, {})
    assert not isinstance(caught.value, SeveralWrong)


def test_a_file_without_an_end_and_a_path_with_a_nul_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than"):
        config.load({"config": "/dev/zero"}, {})
    file = tmp_path / "penstock.toml"
    file.write_text('state_dir = "/tmp/a\\u0000b"\n')
    with pytest.raises(ConfigError, match="state_dir"):
        config.load({"config": str(file)}, {})


def test_an_error_names_what_set_the_setting(machine: Path) -> None:
    path = write_toml(machine, 'kv_memory = "2GiB"\n[models."a b"]\nmodel = "/a"\n')
    environ = {"PENSTOCK_PLACE": "2x1", "PENSTOCK_API_KEYS": "/keys", "PENSTOCK_MODEL": "a/b"}
    for where, told in [
        ("/keys", "PENSTOCK_API_KEYS: /keys"),
        ("a/b", "PENSTOCK_MODEL: a/b"),
        ("devices", "--devices"),
        ("place", "PENSTOCK_PLACE"),
        ("kv_memory", f"{path}:1: kv_memory"),
        ("models.a b: kv_memory", f"{path}:2: models.a b: kv_memory"),
        ("transport", "transport"),
        (str(machine), str(machine)),
    ]:
        with pytest.raises(CheckpointError) as caught, named_by_source({"devices": "cpu"}, environ):
            raise CheckpointError("it is wrong", where=where)
        assert (caught.value.where, caught.value.what) == (told, "it is wrong")
    several = SeveralWrong([ConfigError("a", where="devices"), ConfigError("b", where="place")])
    with (
        pytest.raises(SeveralWrong, match="--devices: a; PENSTOCK_PLACE: b"),
        named_by_source({"devices": "cpu"}, environ),
    ):
        raise several


def test_a_folder_that_is_named_for_the_socket_and_is_not_there_is_probably_a_typo(
    machine: Path,
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(machine / "runtime")}
    typo = load({"socket": str(machine / "rn" / "p.sock")}, environ)
    with pytest.raises(ConfigError, match="there is no such folder") as caught:
        check_directories(typo, environ)
    assert f"mkdir -p {machine / 'rn'}" in caught.value.hint
    for named in (None, str(machine / "runtime" / "mine" / "p.sock")):
        found = load({"socket": named}, environ)
        check_directories(found, environ)
        prepare_directories(found, environ)
        assert found.socket.parent.is_dir()


def test_what_fits_one_model_alone_is_not_said_of_those_in_tables(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        'dtype = "float32"\nweights = "q4"\nmax_model_len = 512\ntool_parser = "hermes"\n'
        'model_aliases = "gpt-*"\n[models.small]\nmodel = "/a"\ntool_parser = "llama"\n'
    )
    config = load({"config": str(path)}, {})
    (small,) = config.models.values()
    assert (config.weights, config.max_model_len, config.tool_parser) == ("q4", 512, "hermes")
    assert (small.weights, small.max_model_len, small.model_aliases) == ("stored", None, ())
    assert (small.tool_parser, small.dtype) == ("llama", "float32")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a pipe") as refused:
        load({"config": str(path)}, {})
    assert refused.value.where == str(path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder to a group")
def test_a_group_that_could_exchange_the_socket_is_refused(machine: Path) -> None:
    found = load({"socket": str(machine / "run" / "p.sock")}, {})
    (machine / "run").chmod(0o750)
    os.chown(machine / "run", -1, 60001)
    check_directories(found, {})
    (machine / "run").chmod(0o770)
    with pytest.raises(ConfigError, match="replace the socket") as refused:
        check_directories(found, {})
    assert refused.value.where == str(machine / "run")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder to a user")
def test_a_runtime_folder_of_another_user_is_refused(machine: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(machine / "other")}
    (machine / "other").mkdir()
    os.chown(machine / "other", 60001, -1)
    with pytest.raises(ConfigError, match="replace the socket") as refused:
        check_directories(load({}, environ), environ)
    assert refused.value.where == str(machine / "other" / "penstock")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a socket to a user")
def test_no_client_writes_to_the_socket_of_another_user_unasked(machine: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(machine)}
    path = machine / "penstock" / "penstock.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert paths.client_socket(environ) == path
        os.chown(path, 60001, -1)
        with pytest.raises(ConfigError) as refused:
            paths.client_socket(environ)
    assert refused.value.where == str(path)


def test_a_state_folder_on_a_read_only_file_system_is_told_with_that_cause(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load({}, {"XDG_RUNTIME_DIR": str(machine / "run")})
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(SeveralWrong, match="Read-only file system") as refused:
        check_directories(found, {"XDG_RUNTIME_DIR": str(machine / "run")})
    assert str(found.state_dir) in {each.where for each in refused.value.errors}


def test_folders_that_cannot_be_made_are_all_told_and_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    flags = {"socket": str(tmp_path / "file" / "p.sock"), "state_dir": str(tmp_path / "a" / "b")}
    with pytest.raises(ConfigError, match="it is not a folder"):
        check_directories(load(flags, {}))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    check_directories(load({**flags, "socket": str(tmp_path / "run" / "p.sock")}, environ), environ)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
