"""Seconds of the soak; `python -m tests.faults` does it for as long as one likes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults import subject as subject_module
from tests.faults.clients import Clients
from tests.faults.questions import Question
from tests.faults.secrets import find_secrets
from tests.faults.subject import Subject
from tests.faults.wire import Manner, Reply

ROOT = Path(__file__).parent.parent
MINUTES = 0.2
LONGEST_S = 600
REPLY = "reply-" * 8
PATH = "/v1/completions"


def test_no_client_notices_seconds_of_faults():
    command = [sys.executable, "-m", "tests.faults", "--minutes", str(MINUTES), "--seed", "1"]
    command += ["--questions", "9", "--clients", "4"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong 0" in done.stdout
    assert ": 0 found" in done.stdout


class DaemonOfOneLog:
    """A daemon that starts with no log but a new one."""

    pid = 1

    def __init__(self, folder, *_):
        self.log = folder.parent / "state" / "requests.db"
        self.kill = lambda: None
        if not self.log.with_name("kept").exists():
            self.log.write_text("rows")

    def wait_ready(self):
        assert not self.log.exists(), "a bad log"


def test_a_daemon_that_its_log_keeps_from_starting_is_a_problem_and_the_rest_is_still_seen(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(subject_module, "Daemon", DaemonOfOneLog)
    monkeypatch.setattr(subject_module, "START_S", 0)
    subject = Subject(tmp_path, [], may_mount=False)
    assert len(subject.problems) == 1
    assert [path.read_text() for path in subject.log_files() if path.exists()] == ["rows"]


@pytest.mark.parametrize("secret", ["pst_key", "a private prompt", REPLY])
def test_a_secret_in_a_file_is_found(secret, tmp_path):
    disk = SimpleNamespace(files=lambda: [tmp_path / "requests.db"])
    subject = SimpleNamespace(
        keys=["pst_key"],
        state=disk,
        ssd=SimpleNamespace(files=list),
        folder=tmp_path,
        frames_path=tmp_path / "frames.jsonl",
        stderr_texts=dict,
    )
    question = Question(PATH, {}, "a private prompt", ([(0, REPLY)], [], [], [], True))
    (tmp_path / "requests.db").write_text("nothing")
    assert find_secrets(subject, [question]) == []
    (tmp_path / "frames.jsonl").write_text(f"x{secret}y")
    assert [line.split(" ")[0] for line in find_secrets(subject, [question])] == ["frames.jsonl"]


def reply_of(text, *, is_whole=True, status=200, **changes):
    choice = {"index": 0, "text": text, "finish_reason": "length" if is_whole else None}
    body = json.dumps({"choices": [choice], **changes}).encode()
    head = f"HTTP/1.1 {status} OK".encode()
    return Reply(status, head, body, is_whole=is_whole, has_connected=True)


RIGHT = Question(PATH, {}, "", ([(0, "right")], ["length"], [], [], True))
CUT = Reply(200, b"HTTP/1.1 200 OK", b"", has_connected=True)
SILENT = Reply(has_connected=True)


@pytest.mark.parametrize(
    ("reply", "has_died", "verdict"),
    [
        (reply_of("right"), False, "right"),
        (reply_of("right"), True, "right"),
        (reply_of("rightright"), True, "wrong"),
        (reply_of("rig"), True, "wrong"),
        (reply_of("wro", is_whole=False), True, "wrong"),
        (reply_of("rig", is_whole=False), True, "cut"),
        (reply_of("rig", is_whole=False), False, "lost"),
        (CUT, False, "lost"),
        (SILENT, False, "unanswered"),
        (SILENT, True, "cut"),
        (Reply(), True, "down"),
        (reply_of("", status=503), False, "refused"),
        (reply_of("", status=500, error={"message": "internal"}), False, "failed"),
        (reply_of("", status=500, error={"message": "w died 4 times"}), False, "given up"),
    ],
)
def test_a_reply_is_right_only_to_the_letter(reply, has_died, verdict):
    subject = SimpleNamespace(
        has_ended_in=lambda *_: has_died,
        has_stopped_in=lambda *_: has_died,
    )
    clients = Clients(subject, [RIGHT], 0, 0)
    assert clients._judge(RIGHT, reply, Manner(), 0.0, 1.0)[0] == verdict
