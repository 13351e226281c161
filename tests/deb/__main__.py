"""Makes the Debian package of a commit for one suite, in a chroot of that suite, and tries it.

usage: python -m tests.deb SUITE FOLDER [WHEELS]

SUITE is bookworm or trixie. The package and what lintian says come into FOLDER/SUITE/dist. An error
of lintian, in the package or in the newer one of the upgrade, ends the command; otherwise
tests.deb.proof tries both. A second time, the wheel of the commit and FOLDER/SUITE/base, a minimal
Debian, are taken as they are. The dependencies are those of constraints.txt, whose hashes hold.
WHEELS, else FOLDER/SUITE/wheels, is a folder of wheels that are taken before PyPI's; if one is a
torch for CPUs (+cpu), CUDA's packages are left out. It takes root, and the network.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.deb import proof
from tests.release.fitness import commit_of, faults_of_tree, git, version_of
from tests.release.packages import Builder, sha256

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LEAVE_OUT = ROOT / "packaging/leave_out.sh"
NUMBERS = {"bookworm": 12, "trixie": 13}
MIRROR = "http://deb.debian.org/debian"
BASE = "ca-certificates,libstdc++6,python3,systemd,udev"
"""The package's dependencies, and udev, whose groups its user joins: a machine to try it on."""
BUILD = ("debhelper", "help2man", "lintian", "python3-venv")
CUDA = re.compile(r"(torch|triton|cuda-|nvidia-(?!ml))")
"""Dependencies that a torch for CPUs does without, and torch itself."""
PASSED_ON = ("PIP_CERT", "PIP_DEFAULT_TIMEOUT", "http_proxy", "https_proxy")
OF_NETWORK = ("resolv.conf", "hosts", "ssl/certs/ca-certificates.crt")
ENTER = """
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mkdir -p "$0/wheels"
mount --bind "$1" "$0/wheels"
tree=$0
shift
exec chroot "$tree" "$@"
"""
LINTIAN = 'lintian --fail-on error --info --tag-display-limit 0 "$0" > /build/lintian.txt'


def in_tree(tree: Path, wheels: Path, *command: str) -> None:
    """Run a command in a tree, with our network and the folder of wheels as /wheels."""
    environ = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environ |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
    environ |= {"DEBIAN_FRONTEND": "noninteractive", "PIP_FIND_LINKS": "/wheels"}
    enter = ["unshare", "-m", "--propagation", "private", "bash", "-ec", ENTER]
    subprocess.run([*enter, str(tree), str(wheels), *command], env=environ, check=True)


def made_wheel(folder: Path) -> Path:
    """Build the wheel of the commit, unless it is there."""
    made = folder / f"wheel-{commit_of(ROOT)[:12]}"
    if not made.exists():
        begun = folder / "wheel-begun"
        shutil.rmtree(begun, ignore_errors=True)
        Builder.installed(ROOT, begun / "tools").build(begun, (platform.machine(),))
        begun.rename(made)
    (wheel,) = (made / "dist").glob("*.whl")
    return wheel


def make_base(suite: str, base: Path) -> None:
    """Make a minimal Debian with what the package depends on, unless it is there."""
    if base.exists():
        return
    begun = base.with_name("base-begun")
    shutil.rmtree(begun, ignore_errors=True)
    options = ["--variant=minbase", f"--include={BASE}"]
    subprocess.run(["debootstrap", *options, suite, str(begun), MIRROR], check=True)
    begun.rename(base)


def make_build_tree(base: Path, tree: Path, wheels: Path) -> None:
    """Copy the base, with the tools that make a package."""
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["cp", "-a", str(base), str(tree)], check=True)
    for name in OF_NETWORK:
        shutil.copy(Path("/etc", name), tree / "etc" / name)
    in_tree(tree, wheels, "apt-get", "-qq", "update")
    in_tree(tree, wheels, "apt-get", "-qq", "install", "--no-install-recommends", *BUILD)


def requirements(constraints: str, wheels: Path) -> str:
    """List the dependencies with hashes; with a torch for CPUs this one, and nothing of CUDA."""
    local = list(wheels.glob("torch-*+cpu-*.whl"))
    if not local:
        return constraints
    (torch,) = local
    kept = [each for each in re.split(r"\n(?=\S)", constraints) if not CUDA.match(each)]
    version = torch.name.split("-")[1]
    return "\n".join([*kept, f"torch=={version} --hash=sha256:{sha256(torch)}"]) + "\n"


def write_debian(folder: Path, suite: str) -> None:
    """Write debian/, with units that run our command, the author of the commit, and its version."""
    shutil.copytree(HERE / "debian", folder)
    for path in (ROOT / "systemd").iterdir():
        text = path.read_text().replace("@PENSTOCK@", "/usr/bin/penstock")
        (folder / debhelper_name(path.name)).write_text(text)
    author, time = git(ROOT, "log", "-1", "--format=%an <%ae>%n%aD").splitlines()
    control = folder / "control"
    control.write_text(control.read_text().replace("@MAINTAINER@", author))
    version = f"{version_of(ROOT)}-1~deb{NUMBERS[suite]}"
    head = f"penstock ({version}) {suite}; urgency=medium"
    told = "  * changelog.gz beside this file has the changes."
    (folder / "changelog").write_text(f"{head}\n\n{told}\n\n -- {author}  {time}\n")


def debhelper_name(name: str) -> str:
    """Name one of our files for systemd as debhelper looks for it."""
    own = name.removesuffix(".conf")
    return own if own.startswith("penstock.") else f"penstock.{own}"


def make_package(tree: Path, suite: str, wheel: Path, wheels: Path) -> Path:
    """Make the package in a tree that has the tools."""
    work = tree / "build"
    write_debian(work / "debian", suite)
    for path in (wheel, ROOT / "CHANGELOG.md", HERE / "make.sh", LEAVE_OUT):
        shutil.copy(path, work)
    (work / "requirements.txt").write_text(
        requirements((ROOT / "constraints.txt").read_text(), wheels)
    )
    in_tree(tree, wheels, "sh", "-e", "/build/make.sh")
    (deb,) = tree.glob("*.deb")
    return deb


def lint(tree: Path, wheels: Path, deb: Path, told: Path) -> None:
    """Write what lintian says of a package in a tree; end the command at an error."""
    try:
        in_tree(tree, wheels, "sh", "-c", LINTIAN, f"/{deb.name}")
    except subprocess.CalledProcessError:
        sys.exit(f"lintian finds an error in {deb.name}, or fails: read {told}")
    finally:
        print(shutil.copy(tree / "build/lintian.txt", told), flush=True)


def main() -> None:
    """Make the package and try it."""
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in NUMBERS:
        sys.exit(__doc__)
    suite, folder = sys.argv[1], Path(sys.argv[2]).absolute() / sys.argv[1]
    if faults := list(faults_of_tree(ROOT)):
        sys.exit("\n".join(["no package:", *faults]))
    folder.mkdir(parents=True, exist_ok=True)
    wheels = Path(sys.argv[3]).absolute() if sys.argv[3:] else folder / "wheels"
    wheels.mkdir(exist_ok=True)
    tree, wheel = folder / "build", made_wheel(folder.parent)
    make_base(suite, folder / "base")
    make_build_tree(folder / "base", tree, wheels)
    made = make_package(tree, suite, wheel, wheels)
    dist = folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    print(deb := Path(shutil.copy(made, dist)), flush=True)
    lint(tree, wheels, made, dist / "lintian.txt")
    newer = proof.newer_package(deb, tree)
    lint(tree, wheels, newer, dist / "lintian-newer.txt")
    newer = Path(shutil.move(newer, dist))
    shutil.rmtree(tree)
    proof.prove(folder, deb, newer)


if __name__ == "__main__":
    main()
