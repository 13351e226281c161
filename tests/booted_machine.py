"""A small Linux machine on this one: systemd booted in namespaces, with Penstock's wheel installed.

It has this machine's /usr, read-only, and nothing else of it but the folders that are named.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

SCRIPT = Path(__file__).parent / "boot_systemd.sh"
ROOT = Path(__file__).parents[1]
SYSTEMD = Path("/usr/lib/systemd/systemd")
TOOLS = ("unshare", "nsenter", "pivot_root", "mount", "mknod", "bash", "systemctl", "setpriv")
NAMESPACES = ("-m", "-p", "-u", "-i", "-n", "-C")
PACKAGES = ("engine", "appliance", "tui", "migrations")
BOOT_S = 20.0
PROGRAM = "/opt/penstock/bin/penstock"


def cgroup2_folder() -> Path | None:
    """Our own group in the hierarchy of version 2; None where there is none that we may write."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            groups = Path("/proc/self/cgroup").read_text().splitlines()
            own = next((g[3:] for g in groups if g.startswith("0::")), "/")
            folder = Path(fields.split()[4]) / own.lstrip("/")
            return folder if os.access(folder, os.W_OK) else None
    return None


@functools.cache
def why_not() -> str | None:
    """Why no machine can be booted here; None: it can, and a failure to do so is a failure."""
    if os.geteuid() != 0:
        return "booting systemd takes root"
    if not SYSTEMD.exists():
        return f"{SYSTEMD} is not installed"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    for folder in needed_folders():
        if folder.is_relative_to("/tmp") or folder.is_relative_to("/var/tmp"):
            return f"the unit has a /tmp of its own, and would not see {folder}"
    if cgroup2_folder() is None:
        return "no cgroup2 hierarchy is mounted here that we may write"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def build_wheel(folder: Path, version: str = "0.1.0") -> Path:
    """The wheel of this tree, less the kernels: compiling them takes half a minute."""
    source = folder / "source"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    project = source / "pyproject.toml"
    text = project.read_text()
    project.write_text(re.sub(r'^version = ".*"$', f'version = "{version}"', text, flags=re.M))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


class Machine:
    """Booted when made; gone, with all that ran on it, at close()."""

    def __init__(self, folders: list[Path], tree: Path | None = None) -> None:
        """Boot.

        Args:
            folders: of this machine that it is to have at the same places, read-only.
            tree: a Debian that it boots, in place of our /usr; it keeps what is written.
        """
        self._started: list[subprocess.Popen[str]] = []
        parent = cgroup2_folder()
        assert parent is not None
        self._cgroup = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=parent))
        self._root = Path(tempfile.mkdtemp(prefix="penstock-machine-"))
        self._launcher = subprocess.Popen(
            [
                *("unshare", *NAMESPACES, "--fork", "--kill-child=KILL", "--propagation"),
                *("private", "bash", str(SCRIPT), str(self._root), *map(str, folders)),
            ],
            preexec_fn=lambda: (self._cgroup / "cgroup.procs").write_text(str(os.getpid())),
            env=os.environ | {"TREE": "" if tree is None else str(tree)},
            stdin=subprocess.DEVNULL,
        )
        try:
            self._init = self._wait(self._find_init)
            self._wait(self._is_up)
        except BaseException:
            self.close()
            raise

    def _wait(self, condition):
        deadline = time.monotonic() + BOOT_S
        while not (value := condition()):
            assert self._launcher.poll() is None, "the machine did not boot: see above"
            assert time.monotonic() < deadline, "the machine did not boot in time"
            time.sleep(0.02)
        return value

    def _find_init(self) -> int | None:
        """The launcher's child, once it is in a pid namespace of its own."""
        pid = self._launcher.pid
        with contextlib.suppress(OSError, IndexError):
            child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            if os.readlink(f"/proc/{child}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                return child
        return None

    def _is_up(self) -> bool:
        found = self.run("systemctl", "is-system-running", check=False)
        return found.stdout.strip() in ("running", "degraded")

    def command(self, *command: str, user: str | None = None) -> list[str]:
        """What to run here, to have it run there."""
        enter = ["nsenter", "-t", str(self._init), *NAMESPACES]
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin", "LANG=C.UTF-8", "HOME=/root"]
        as_user = (
            [] if user is None else ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        )
        return [*enter, *clean, *as_user, *command]

    def run(
        self, *command: str, user: str | None = None, check: bool = True, timeout_s: float = 60
    ):
        try:
            done = subprocess.run(
                self.command(*command, user=user),
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            self._fail(f"{command}: not in {timeout_s} s: {error.stdout!r} {error.stderr!r}")
        if check and done.returncode:
            self._fail(f"{command}: {done.stdout}{done.stderr}")
        return done

    def _fail(self, what: str) -> NoReturn:
        journal = self.run("journalctl", "-n", "60", "--no-pager", check=False).stdout
        raise AssertionError(f"{what}\n{journal}")

    def start(self, *command: str, user: str | None = None) -> subprocess.Popen[str]:
        """Run it beside us."""
        process = subprocess.Popen(
            self.command(*command, user=user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def path(self, inside: str) -> Path:
        """A file of the machine, as it can be opened from here."""
        return Path(f"/proc/{self._init}/root") / inside.lstrip("/")

    @property
    def socket(self) -> str:
        """The daemon's, as it can be connected to from here."""
        return str(self.path("/run/penstock/penstock.sock"))

    def penstock(self, *words: str, user: str | None = None, check: bool = True):
        return self.run(PROGRAM, *words, user=user, check=check)

    def property(self, name: str, unit: str = "penstock.service") -> str:
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def journal(self) -> list[dict[str, str]]:
        """The unit's lines since boot."""
        out = self.run("journalctl", "-u", "penstock", "-o", "json", "--no-pager").stdout
        return [json.loads(line) for line in out.splitlines()]

    def wait_for(self, condition, timeout_s: float = 40.0):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                self._fail(f"not in {timeout_s} s")
            time.sleep(0.1)
        return value

    def install(self, wheel: Path) -> None:
        """Put the wheel into an environment in /opt/penstock as docs/operating.md does, offline.

        What the wheel needs comes from the environment of the tests.
        """
        python = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}"))
        places = [each for each in sys.path if each.endswith("site-packages")]
        if not self.path("/opt/penstock/bin").exists():
            self.run(python, "-m", "venv", "--without-pip", "/opt/penstock")
            (library,) = self.path("/opt/penstock/lib").glob("python3*/site-packages")
            (library / "of_tests.pth").write_text("\n".join(places))
        (library,) = self.path("/opt/penstock/lib").glob("python3*/site-packages")
        copy = self.path("/tmp") / wheel.name
        shutil.copy(wheel, copy)
        pip = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); import pip._internal.cli.main"
        pip += " as m; sys.exit(m.main(sys.argv[1:]))"
        self.run(
            *(python, "-I", "-c", pip, ":".join(places), "--python", "/opt/penstock/bin/python"),
            *("install", "-q", "--no-deps", "--no-index", "--no-cache-dir", "--force-reinstall"),
            f"/tmp/{wheel.name}",
        )
        for kernels in (ROOT / "engine/kernels").glob("*.so"):
            place = library / "engine/kernels" / kernels.name
            place.unlink(missing_ok=True)  # the one that is there may be running
            shutil.copy(kernels, place)

    def close(self) -> None:
        """SIGKILL to its init ends everything on it; then its cgroups are empty."""
        with contextlib.suppress(OSError, AttributeError):
            os.kill(self._init, 9)
        self._launcher.kill()
        self._launcher.wait()
        for process in self._started:
            process.communicate()
        deadline = time.monotonic() + 10
        folders = [each for each in self._cgroup.rglob("*") if each.is_dir()]
        for folder in [*sorted(folders, key=lambda each: -len(each.parts)), self._cgroup]:
            while True:
                try:
                    folder.rmdir()
                    break
                except OSError:
                    assert time.monotonic() < deadline, f"{folder} is not empty"
                    time.sleep(0.02)
        self._root.rmdir()


def needed_folders() -> list[Path]:
    """This Python and its packages, as far as they are not in /usr."""
    wanted = {Path(sys.base_prefix), *map(Path, site.getsitepackages())}
    wanted |= {Path(each) for each in sys.path if each.endswith("site-packages")}
    real = {each.resolve() for each in wanted if each.exists()}
    outside = {each for each in real if not each.is_relative_to("/usr")}
    return sorted(
        each for each in outside if not any(each != o and each.is_relative_to(o) for o in outside)
    )
