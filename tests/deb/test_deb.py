"""What the Debian package is made of fits the program; `python -m tests.deb` makes and tries it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from appliance.cli.install_service import PLACES
from appliance.cli.main import VERBS
from appliance.configuration.settings import SETTINGS
from tests.deb import proof
from tests.deb.__main__ import HERE, LEAVE_OUT, ROOT, requirements, write_debian

DEBIAN = HERE / "debian"
SCRIPTS = [HERE / "make.sh", LEAVE_OUT, DEBIAN / "penstock.postinst", DEBIAN / "penstock.postrm"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_accepts_each_script(script: Path) -> None:
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0


def test_debhelper_gets_every_file_of_systemd_with_our_command(tmp_path: Path) -> None:
    write_debian(tmp_path / "debian", "trixie")
    written = {path.name: path.read_text() for path in (tmp_path / "debian").iterdir()}
    made = written.keys() - {path.name for path in DEBIAN.iterdir()}
    assert made == {
        *("changelog", "penstock.service", "penstock.socket", "penstock.penstock-gpu.service"),
        *("penstock.sysusers", "penstock.tmpfiles"),
    }
    assert len(made) == 1 + len(PLACES)
    assert "ExecStart=/usr/bin/penstock serve\n" in written["penstock.service"]
    assert not [name for name in (*made, "control") if re.search(r"@[A-Z]+@", written[name])]
    assert re.match(r"penstock \([\d.]+-1~deb13\) trixie; ", written["changelog"])


def test_a_purge_removes_each_user_and_group_that_an_install_makes() -> None:
    lines = (ROOT / "systemd/penstock.sysusers.conf").read_text().splitlines()
    made = {line.split()[1] for line in lines if line.startswith(("u ", "g "))}
    (loop,) = re.findall(r"for group in (.*); do", (DEBIAN / "penstock.postrm").read_text())
    assert set(loop.split()) == made


def test_the_settings_that_it_shows_are_there_and_all_are_comments() -> None:
    text = (DEBIAN / "penstock.toml").read_text()
    assert tomllib.loads(text) == {}
    shown = tomllib.loads(re.sub(r"(?m)^#(?=\w)", "", text))
    assert len(shown) > 2
    assert shown.keys() <= SETTINGS.keys()


def test_every_verb_gets_a_manual_page() -> None:
    command = [sys.executable, str(DEBIAN / "verbs.py")]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = dict(line.split("\t") for line in listed.splitlines())
    assert {f"penstock {verb}" for verb in VERBS} - pages.keys() == {"penstock dial-stdio"}
    assert {"penstock", "penstock models show"} <= pages.keys()
    assert all(pages.values())


def test_a_torch_for_cpus_takes_the_place_of_cuda(tmp_path: Path) -> None:
    assert requirements(CONSTRAINTS, tmp_path) == CONSTRAINTS
    (tmp_path / "torch-2.13.0+cpu-cp313-cp313-linux_x86_64.whl").write_bytes(b"a wheel")
    lines = requirements(CONSTRAINTS, tmp_path).splitlines()
    names = {line.split("==")[0] for line in lines if re.match(r"[a-z]", line)}
    assert not {name for name in names if name.startswith(("cuda-", "triton", "nvidia-c"))}
    assert {"torch", "numpy", "nvidia-ml-py"} <= names
    (torch,) = (line for line in lines if line.startswith("torch"))
    assert re.fullmatch(r"torch==2\.13\.0\+cpu --hash=sha256:[0-9a-f]{64}", torch)


def test_what_only_compiles_or_tests_is_left_out(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.13/site-packages"
    kept = {
        *("torch/__init__.py", "torch/bin/torch_shm_manager", "torch/lib/libtorch_cpu.so"),
        *("torch/testing/__init__.py", "triton/backends/nvidia/include/cuda.h"),
        *("nvidia/cu13/lib/libcudart.so.13", "numpy/testing/__init__.py", "numpy/ma/core.py"),
        *("networkx/classes/graph.py", "sympy/core/core.py"),
    }
    left_out = {
        *("torch/bin/test_api", "torch/bin/protoc", "torch/test/Dict_test", "torch/include/a.h"),
        *("torch/share/cmake/Torch.cmake", "torch/lib/libtorchbind_test.so"),
        *("nvidia/cu13/lib/libcudart_static.a", "numpy/ma/tests/test_core.py"),
        *("networkx/classes/tests/test_graph.py", "sympy/core/tests/test_core.py"),
    }
    for name in kept | left_out:
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    subprocess.run(["sh", "-e", str(LEAVE_OUT), str(tmp_path)], check=True)
    files = [each for each in site.rglob("*") if each.is_file()]
    assert {str(each.relative_to(site)) for each in files} == kept


def test_nothing_that_is_left_out_is_loaded_by_a_worker() -> None:
    loaded = (
        "import sys, appliance.cli.main, engine.worker.loop, engine.worker.runner; "
        "print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)), "
        "*(line.split()[-1] for line in open('/proc/self/maps')), sep='\\n')"
    )
    command = [sys.executable, "-c", loaded]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "/libtorch_cpu.so" in paths
    out = (
        r"/torch/(include|share|test)/|/torch/bin/(?!torch_shm)|_test\.so|/(numpy|sympy)/.*/tests/"
    )
    assert not [path for path in paths.splitlines() if re.search(out, path)]


def test_each_override_of_lintian_has_a_reason() -> None:
    blocks = (DEBIAN / "penstock.lintian-overrides").read_text().split("# ")
    assert blocks.pop(0) == ""
    for reason, *tags in map(str.splitlines, blocks):
        assert len(reason) > 20
        assert tags
        assert all(re.fullmatch(r"[a-z-]+ \*", tag) for tag in tags), reason


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_the_sums_of_the_newer_package_hold(tmp_path: Path) -> None:
    tree, site = tmp_path / "tree", "usr/lib/penstock/lib/python3.11/site-packages"
    facts, control = tree / site / "penstock-0.2.0.dist-info/METADATA", tree / "DEBIAN/control"
    for path in (facts, control):
        path.parent.mkdir(parents=True)
    facts.write_text("Name: penstock\nVersion: 0.2.0\n")
    control.write_text("Package: penstock\nVersion: 0.2.0-1~deb12\nArchitecture: all\n")
    with control.open("a") as file:
        file.write("Maintainer: Ann <ann@example.org>\nDescription: a test\n")
    with (tree / "DEBIAN/md5sums").open("w") as sums:
        command = ["md5sum", str(facts.relative_to(tree))]
        subprocess.run(command, cwd=tree, stdout=sums, check=True)
    subprocess.run(["dpkg-deb", "-b", str(tree), str(tmp_path / "old.deb")], check=True)
    newer, there = proof.newer_package(tmp_path / "old.deb", tmp_path), tmp_path / "there"
    subprocess.run(["dpkg-deb", "-R", str(newer), str(there)], check=True)
    assert "Version: 0.99.0-1~deb12\n" in (there / "DEBIAN/control").read_text()
    subprocess.run(["md5sum", "--quiet", "-c", "DEBIAN/md5sums"], cwd=there, check=True)


WHOLE = proof.Reply("Once upon", ("cut off",), 0)


@pytest.mark.parametrize(
    ("reply", "is_equal"),
    [
        (WHOLE._replace(notes=("a note", *WHOLE.notes)), True),
        (WHOLE._replace(text="Once on"), False),
        (WHOLE._replace(text="Once upon" * 2), False),
        (WHOLE._replace(status=3), False),
    ],
)
def test_a_stream_through_an_upgrade_may_differ_in_notes_alone(
    reply: proof.Reply, is_equal: bool
) -> None:
    assert (WHOLE.difference(reply) == "") == is_equal
