"""A tree that is changed, red, or tested in part is not released."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tests.release.__main__ as release
from tests.release.__main__ import PARTS, try_commit
from tests.release.fitness import (
    MAY_BE_SKIPPED,
    counts,
    faults_of_suite,
    faults_of_tree,
    git,
)
from tests.release.machine import faults_of_machine

TESTS = Path(__file__).parents[1]
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
        '<skipped message="no GPU beside a compiler"/>',
    ],
)
def test_a_test_that_failed_or_was_skipped_without_leave_is_a_fault(tmp_path, result) -> None:
    assert len(results(tmp_path, PASSED, case(result))) == 1


def test_tests_for_gpus_may_be_skipped(tmp_path: Path) -> None:
    skipped = case('<skipped message="torch 2.13.0+cpu finds no GPU"/>')
    assert results(tmp_path, PASSED, skipped) == []


def test_a_suite_in_which_nothing_passed_is_a_fault(tmp_path: Path) -> None:
    assert len(list(faults_of_suite(tmp_path / "missing.xml"))) == 1
    assert len(results(tmp_path, case('<skipped message="no CUDA device"/>'))) == 1


def test_the_command_refuses_before_it_does_anything(tree: Path) -> None:
    """It is run in a copy, whose clone would be without tests."""
    (tree / "tests").mkdir()
    source = Path(__file__).parent
    (tree / "tests/release").mkdir()
    (tree / "tests/worlds").mkdir()
    needed = [f"release/{path.name}" for path in source.glob("*.*")]
    for name in (*needed, "booted_machine.py", "worlds/browser.py"):
        (tree / "tests" / name).write_bytes((source.parent / name).read_bytes())
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


def test_every_reason_that_excuses_a_skip_is_one_that_a_test_gives() -> None:
    files = [path for path in TESTS.rglob("*.py") if "release" not in path.parts[-2:]]
    texts = [path.read_text() for path in files]
    assert [part for part in MAY_BE_SKIPPED if not any(part in text for text in texts)] == []


def test_passed_and_skipped_tests_are_counted(tmp_path: Path) -> None:
    assert results(tmp_path, PASSED, PASSED, case('<skipped message="no CUDA device"/>')) == []
    assert counts(tmp_path / "results.xml") == "2 passed, 1 skipped"


@pytest.fixture
def folder(tree: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a clone of the tree, and builds that are equal."""
    folder = tmp_path_factory.mktemp("release")
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr(release, "faults_of_machine", lambda folder: iter(()))
    for name in ("first", "the-second"):
        (folder / name / "dist").mkdir(parents=True)
        (folder / name / "dist" / "toy.whl").write_text("the same")
    git(tree, "clone", "-q", str(tree), str(folder / "clone"))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["release", *map(str, arguments)])
    release.main()


def test_packages_are_put_once_every_part_is_done_and_no_part_is_done_twice(
    folder: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for part in ("tree", "build", "suite"):
        monkeypatch.setitem(PARTS, part, lambda folder, part=part: done.append(part) or part)
    run(monkeypatch, folder, "tree")
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "sums")
    assert not (folder / "dist").exists()
    run(monkeypatch, folder)
    assert done == ["tree", "build", "suite"]
    assert "toy.whl" in (folder / "dist/SHA256SUMS").read_text()
    (folder / "the-second/dist/toy.whl").write_text("another")
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "sums")
    commit(tree)
    with pytest.raises(SystemExit) as refused:
        run(monkeypatch, folder)
    assert "another commit" in str(refused.value)


def test_a_folder_that_a_booted_machine_does_not_see_is_refused_at_once() -> None:
    assert any("/tmp/release" in fault for fault in faults_of_machine(Path("/tmp/release")))
