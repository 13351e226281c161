"""A tree that is changed, red, or tested in part is not released."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.release.__main__ import try_commit
from tests.release.fitness import faults_of_suite, faults_of_tree, git

PASSED = '<testcase classname="a" name="passes"/>'
RESULTS = "<testsuites><testsuite>{}</testsuite></testsuites>"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed project of version 0.2.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "toy"\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0]\n")
    for words in (["init", "-q"], ["config", "user.name", "a"], ["config", "user.email", "a@b"]):
        git(tmp_path, *words)
    commit(tmp_path)
    return tmp_path


def commit(tree: Path) -> None:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--allow-empty", "-m", "a change")


def test_a_committed_tree_whose_pages_have_its_version_is_fit(tree: Path) -> None:
    assert list(faults_of_tree(tree)) == []
    git(tree, "tag", "v0.2.0")
    assert list(faults_of_tree(tree)) == []


@pytest.mark.parametrize("name", ["new.py", "pyproject.toml"])
def test_a_change_is_named(tree: Path, name: str) -> None:
    with (tree / name).open("a") as file:
        file.write("\n")
    (fault,) = faults_of_tree(tree)
    assert name in fault


def test_a_version_without_its_heading_or_tagged_before_is_a_fault(tree: Path) -> None:
    git(tree, "tag", "v0.2.0")
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    commit(tree)
    assert len(list(faults_of_tree(tree))) == 2


def results(folder: Path, *cases: str) -> list[str]:
    path = folder / "results.xml"
    path.write_text(RESULTS.format("".join(cases)))
    return list(faults_of_suite(path))


def case(result: str) -> str:
    return f'<testcase classname="a" name="b">{result}</testcase>'


@pytest.mark.parametrize(
    "result",
    [
        '<failure message="assert 0"/>',
        '<error message="in its fixture"/>',
        '<skipped type="pytest.skip" message="no gcc"/>',
        '<skipped message="not built: install with PENSTOCK_BUILD_KERNELS=all"/>',
    ],
)
def test_a_test_that_failed_or_was_skipped_without_leave_is_a_fault(tmp_path, result) -> None:
    assert len(results(tmp_path, PASSED, case(result))) == 1


def test_tests_for_gpus_may_be_skipped(tmp_path: Path) -> None:
    skipped = case('<skipped message="torch 2.13.0+cpu finds no GPU"/>')
    assert results(tmp_path, PASSED, skipped) == []


def test_a_suite_in_which_nothing_passed_is_a_fault(tmp_path: Path) -> None:
    assert len(list(faults_of_suite(tmp_path / "missing.xml"))) == 1
    assert len(results(tmp_path, case('<skipped message="no CUDA"/>'))) == 1


def test_the_command_refuses_before_it_does_anything(tree: Path) -> None:
    """It is run in a copy, whose clone would be without tests."""
    (tree / "tests").mkdir()
    source = Path(__file__).parent
    (tree / "tests/release").mkdir()
    for path in source.glob("*.*"):
        (tree / "tests/release" / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "tests.release", str(tree / "out")]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "tests/" in ended.stderr
    assert not (tree / "out").exists()


@pytest.mark.parametrize(
    ("result", "code", "is_fit"),
    [
        ("", 0, True),
        ("", 1, False),
        ('<skipped message="no gcc"/>', 0, False),
        ('<failure message="assert 0"/>', 0, False),
    ],
)
def test_the_suite_of_the_clone_decides(tree: Path, tmp_path_factory, result, code, is_fit) -> None:
    told = tmp_path_factory.mktemp("told") / "results.xml"
    (tree / ".ci").mkdir()
    (tree / ".ci/run").write_text(
        f"cat > ${{PYTEST_ADDOPTS##*=}} << 'XML'\n{RESULTS.format(PASSED + case(result))}\nXML\n"
        f"exit {code}\n"
    )
    commit(tree)
    if is_fit:
        try_commit(tree, told)
    else:
        with pytest.raises(SystemExit) as ended:
            try_commit(tree, told)
        assert ended.value.code != 0
