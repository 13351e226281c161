"""The exam goes through a real server, and marks to the last character."""

import re
import subprocess
import sys

from tests.starter.documents import Turn
from tests.starter.exam import ExamScore


def test_an_answer_is_right_only_as_it_stands():
    marks = ExamScore()
    turn = Turn("What is the owner of a?", "Ida Holt", "lookup")
    for answer in ("Ida Holt", "Ida Holt.", "ida Holt"):
        marks.add("lookup", 1024, turn, answer)
    assert marks.ratio("lookup", 1024) == 1 / 3
    assert [answer for _, answer in marks.wrong] == ["Ida Holt.", "ida Holt"]


def test_an_exam_of_the_starter_asks_everything_and_says_how_it_went():
    command = [sys.executable, "-m", "tests.starter.exam", "--lengths", "128", "--questions", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = re.findall(r"^(\w+) +([\d.]+)% \((\d+)/(\d+)\)", ended.stdout, re.MULTILINE)
    assert {skill: int(asked) for skill, _, _, asked in found} == {
        "lookup": 4,
        "unknown": 2,
        "turns": 4,
        "talk": 4,
    }
    for _, share, right, asked in found:
        assert float(share) == round(100 * int(right) / int(asked), 1)


def test_without_a_server_it_says_so(tmp_path):
    command = [sys.executable, "-m", "tests.starter.exam", "--host", str(tmp_path / "none.sock")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 3
    assert "none.sock" in ended.stderr
