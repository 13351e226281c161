"""Build the packages of a commit, with what is inside checked and the same bytes each time."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.release.fitness import commit_of, git, version_of

MACHINES = ("x86_64", "aarch64")
ROOT = Path(__file__).parents[2]
TOOLS = Path(__file__).with_name("tools.txt")
SBOM = "penstock.cdx.json"
ABSOLUTE = re.compile(rb"(?<![\w./])/(?:home|root|tmp|usr|opt|work|build|var|mnt)/[\w.+/-]+")
"""A folder of the building machine. Sources are compiled by relative names and without -g, so that
no compiler's option needs to hide it."""


class Unfit(Exception):
    """A package is not as it has to be."""


@dataclass(frozen=True)
class Builder:
    """The tools in an environment of their own, and the commit that they build."""

    root: Path
    commit: str
    tools: Path

    @classmethod
    def installed(cls, root: Path, tools: Path) -> Builder:
        """Install the tools, for the commit that is checked out now."""
        subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
        pip = [str(tools / "bin/pip"), "install", "-q", "--no-compile", "-r", str(TOOLS)]
        subprocess.run(pip, check=True)
        return cls(root, commit_of(root), tools)

    @property
    def epoch(self) -> str:
        """The commit's time, which every file of a package gets."""
        return git(self.root, "log", "-1", "--format=%ct", self.commit)

    def run(self, folder: Path, *command: str, **environ: str) -> str:
        """What a tool prints."""
        own = {"SOURCE_DATE_EPOCH": self.epoch, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
        inherited = {k: v for k, v in os.environ.items() if k not in ("CFLAGS", "LDFLAGS")}
        inherited["PATH"] = f"{self.tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command,
            cwd=folder,
            env={**inherited, **own, **environ},
            umask=0o022,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Unfit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def build(self, folder: Path, machines: Iterable[str] = MACHINES) -> None:
        """Make every package in FOLDER/dist, with wheels for these machines."""
        dist = folder / "dist"
        dist.mkdir(parents=True)
        source = folder / "commit"
        source.mkdir()
        archive = ["git", "-c", "tar.umask=0022", "archive", "--format=tar", self.commit]
        data = subprocess.run(archive, cwd=self.root, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(source)], input=data, check=True)
        shutil.copy(source / "constraints.txt", dist)
        self.write_sbom(source, dist / SBOM)
        sdist = self.build_sdist(source, dist)
        for machine in machines:
            check_wheel(self.build_wheel(folder / machine, machine, sdist, dist), machine)

    def write_sbom(self, source: Path, path: Path) -> None:
        """List the dependencies with their hashes, as constraints.txt has them."""
        self.run(
            source,
            *("cyclonedx-py", "requirements", "--output-reproducible", "--of", "JSON"),
            *("--pyproject", "pyproject.toml", "-o", str(path), "constraints.txt"),
        )

    def build_sdist(self, source: Path, dist: Path) -> Path:
        """Make the source package, without owners and times of this build."""
        made = source / "dist"
        self.run(source, "pyproject-build", "--no-isolation", "--sdist", "-o", str(made))
        (loose,) = made.iterdir()
        path = dist / loose.name
        with (
            tarfile.open(loose) as old,
            path.open("wb") as file,
            gzip.GzipFile("", "wb", 9, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member in sorted(old.getmembers(), key=lambda each: each.name):
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mtime = int(self.epoch)
                member.pax_headers = {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        return path

    def build_wheel(self, folder: Path, machine: str, sdist: Path, dist: Path) -> Path:
        """Make a machine's wheel of the source package, which shows that this one is whole."""
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = folder.iterdir()
        made = folder / "made"
        self.run(
            source,
            *("pyproject-build", "--no-isolation", "--wheel", "-o", str(made)),
            CC=compiler(machine),
            _PYTHON_HOST_PLATFORM=f"linux-{machine}",
            PENSTOCK_BUILD_KERNELS="all",
        )
        (bare,) = made.iterdir()
        self.run(made, "wheel", "unpack", bare.name)
        bare.unlink()
        (unpacked,) = made.iterdir()
        (info,) = unpacked.glob("*.dist-info")
        (info / "sboms").mkdir()
        shutil.copy(dist / SBOM, info / "sboms")
        self.run(made, "wheel", "pack", unpacked.name, "-d", str(dist))
        (packed,) = dist.glob(f"*linux_{machine}.whl")
        shown = self.run(dist, "auditwheel", "show", packed.name)
        tag = re.search(r'platform\s+tag:\s+"(\w+)"', shown)
        if tag is None or not tag[1].startswith("manylinux"):
            raise Unfit(f"no manylinux: {shown}")
        self.run(dist, "wheel", "tags", "--remove", "--platform-tag", tag[1], packed.name)
        (wheel,) = dist.glob(f"*manylinux*_{machine}.whl")
        self.run(dist, "abi3audit", "--strict", wheel.name)
        return wheel


def compiler(machine: str) -> str:
    """The C compiler for a machine, as Debian names it."""
    return f"{machine}-linux-gnu-gcc"


def levels(machine: str) -> list[str]:
    """The levels of kernels in a machine's wheel."""
    of_x86 = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["X86_LEVELS"]
    return ["portable", *(of_x86 if machine == "x86_64" else ())]


def check_wheel(wheel: Path, machine: str) -> None:
    """Look whether all levels, licence and components are in a wheel, and nothing that is not."""
    prefix = f"penstock-{version_of(ROOT)}"
    if not wheel.name.startswith(f"{prefix}-cp311-abi3-manylinux"):
        raise Unfit(f"{wheel.name} has other tags")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        kernels = {name for name in names if name.endswith(".so")}
        wanted = {f"engine/kernels/_{level}.abi3.so" for level in levels(machine)}
        wanted |= {f"{prefix}.dist-info/{each}" for each in (f"sboms/{SBOM}", "licenses/LICENSE")}
        if (missing := wanted - names) or kernels - wanted:
            raise Unfit(f"{wheel.name} lacks {missing}, or has more than {wanted}")
        for name in names:
            if name.startswith("tests/") or (
                name in kernels and ABSOLUTE.search(archive.read(name))
            ):
                raise Unfit(f"{wheel.name}: {name} is of the building machine")


def sha256(path: Path) -> str:
    """A file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
