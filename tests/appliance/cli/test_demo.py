"""The demo shows right answers, and leaves nothing behind."""

from pathlib import Path

from tests.appliance.cli_process import penstock, user_environ


def test_every_answer_of_the_demo_is_right_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environ = user_environ(tmp_path) | {"TMPDIR": str(tmp_path / "tmp"), "PENSTOCK_MODEL": "/none"}
    ended = penstock(environ, "demo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 of 5 answers are right" in ended.stdout
    assert "wave-auth-17" in ended.stdout
    assert "WRONG" not in ended.stdout
    assert "handoff" in ended.stdout
    assert list((tmp_path / "tmp").iterdir()) == []
