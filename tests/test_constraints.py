"""Each dependency of a service is one version with its hashes, as pyproject.toml asks."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "constraints.txt").read_text()
PINNED = [line for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line[:1] not in ("", "#")]
HAVE_HOLES = {"jinja2": "3.1.5", "h11": "0.14.0", "starlette": "0.49.0"}
"""The newest versions with a known hole."""


def name_of(requirement):
    return requirement.name.lower().replace("_", "-")


def wanted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {name_of(each): each for each in map(Requirement, project["dependencies"])}


def test_every_dependency_is_one_version_that_the_project_takes():
    pinned = {}
    for line in PINNED:
        requirement = Requirement(line.partition(" --hash")[0])
        (only,) = requirement.specifier
        assert only.operator == "=="
        pinned.setdefault(name_of(requirement), []).append(Version(only.version))
    for name, requirement in wanted().items():
        assert name in pinned
        assert all(version in requirement.specifier for version in pinned[name]), name


def test_every_line_has_hashes_and_names_no_host_and_no_folder():
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", line) for line in PINNED)
    assert not re.search(r"://|--index|--find-links|\s/", TEXT)


def test_no_version_with_a_known_hole_is_taken():
    requirements = wanted()
    for name, version in HAVE_HOLES.items():
        assert Version(version) not in requirements[name].specifier


def test_what_is_built_beside_torch_is_installed_by_a_line_that_lets_it_see_torch():
    """An isolated build of flash-attn finds no torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "flash-attn" in {
        Requirement(each).name for each in project["optional-dependencies"]["gpu"]
    }
    lines = [
        line for line in (ROOT / "docs" / "gpu.md").read_text().splitlines() if "[gpu]" in line
    ]
    assert lines
    assert all("--no-build-isolation" in line for line in lines)


def test_without_cudas_packages_torch_alone_is_missing():
    docs = (ROOT / "docs" / "operating.md").read_text()
    (program,) = re.findall(r"^awk '(.*)' DIRECTORY/constraints.txt > ", docs, re.MULTILINE)
    ran = subprocess.run(["awk", program], input=TEXT, capture_output=True, text=True, check=True)
    others = set(re.findall(r"^([\w.-]+)==", ran.stdout, re.MULTILINE))
    assert wanted().keys() - others == {"torch"}
    assert {name for name in others if re.match("nvidia|cuda|triton", name)} == {"nvidia-ml-py"}
    assert {"setuptools", "pip"} <= others
    assert ran.stdout.count("--hash=") >= len(others)
