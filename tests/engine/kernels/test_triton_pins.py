"""The Triton that kernels are compiled with is the one that torch for CUDA brings."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.benchmarks.compile_matrix import PINNED

ROOT = Path(__file__).parents[3]


def torch_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    return torch.specifier


def test_every_torch_that_is_taken_has_its_triton_in_the_table():
    """Also the next one, as soon as the range takes it."""
    minors = {version.rpartition(".")[0] for version in PINNED}
    assert {f"2.{minor}" for minor in range(100) if f"2.{minor}.0" in torch_range()} == minors
    assert all(version in torch_range() for version in PINNED)


def test_the_table_is_what_this_torchs_own_metadata_says():
    pins = [
        Requirement(line)
        for line in metadata.requires("torch") or ()
        if Requirement(line).name == "triton"
    ]
    if not pins:
        pytest.skip("this torch is built for CPUs, and pins no Triton")
    (specifier,) = {str(pin.specifier) for pin in pins}
    assert specifier == f"=={PINNED[Version(metadata.version('torch')).base_version]}"


def test_the_constraints_pin_the_triton_of_their_torch():
    """They were resolved with the metadata of torch for CUDA."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = dict(line.split(" ")[0].split("==") for line in lines if "==" in line[:20])
    assert versions["triton"] == PINNED[versions["torch"]]
