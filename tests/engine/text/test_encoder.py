"""Texts tokenized where the tokenizer was tried: the same ids, or an error of that text alone."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time

import psutil
import pytest

from appliance.hub.names import STARTER_FOLDER
from engine.errors import RequestError, Unavailable
from engine.text.encoder import LONG_BYTES
from engine.text.read_models import read_tokenizer
from engine.text.reading import READER, Asker, Late
from engine.text.tokenizer import TRIAL_TEXT, Tokenizer
from tests.hostile_models import HOSTILE_TEXTS, greedy_tokenizer
from tests.tiny_tokenizers import byte_level, save, sentencepiece_like

pytestmark = pytest.mark.usefixtures("in_time")

PLAIN = "Once upon a time, 1234 ä中😀 <s>\n"
LONG = "hello wörld 😀 12 <|end|><s>\n" * (LONG_BYTES // 20)


def processes():
    """The processes that tokenize: children of the reader."""
    return {one.pid for one in psutil.Process(READER.pid).children()}


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def made():
    """Make a tokenizer, and return it with its process."""
    READER.start()

    def make(folder=STARTER_FOLDER):
        before = processes()
        tokenizer = read_tokenizer(folder)
        (pid,) = processes() - before
        return tokenizer, psutil.Process(pid)

    return make


@pytest.mark.parametrize("build", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("text", ["", "hello", PLAIN, LONG], ids=["empty", "one", "plain", "long"])
def test_ids_spans_and_texts_are_those_of_the_tokenizer_here(tmp_path, build, text):
    folder = save(build(), tmp_path)
    there, here = read_tokenizer(folder, has_chats=False), Tokenizer.from_folder(folder)
    for add in (True, False):
        assert there.encode(text, add) == here.encode(text, add)
    assert there.spans(text) == here.spans(text)
    ids = here.encode(text)
    for skip in (True, False):
        assert there.decode(ids, skip) == here.decode(ids, skip)


def test_many_texts_and_pairs_are_tokenized_in_few_jobs(tmp_path, monkeypatch):
    folder = save(byte_level(), tmp_path)
    there, here = read_tokenizer(folder, has_chats=False), Tokenizer.from_folder(folder)
    jobs = []
    read = there._encoder.read
    monkeypatch.setattr(there._encoder, "read", lambda *job: jobs.append(job) or read(*job))
    texts = ["", "hello", PLAIN, ("hello", PLAIN), ("", ""), *["a" * 400] * 250, LONG]
    for add in (True, False):
        assert list(there.encode_each(texts, add)) == list(here.encode_each(texts, add))
        assert next(here.encode_each(["hello"], add)) == here.encode("hello", add)
    assert len(jobs) == 2 * 3
    assert list(there.encode_each([])) == []


def test_many_texts_are_tokenized_on_the_cores_that_are_named(made):
    tokenizer, process = made()
    core = max(os.sched_getaffinity(0))
    for cpus in ([core], [], [1 << 12]):  # none, and one that is not there, change nothing
        assert list(tokenizer.encode_each(["hello"], cpus=cpus)) == [tokenizer.encode("hello")]
        (texts,) = process.children()
        assert texts.cpu_affinity() == [core]


def test_texts_are_tokenized_as_they_are_taken(tmp_path):
    tokenizer = read_tokenizer(save(byte_level(), tmp_path), has_chats=False)
    given = []
    texts = (given.append(text) or text for text in ["a" * LONG_BYTES] * 5)
    assert next(tokenizer.encode_each(texts))
    assert len(given) == 2


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    return read_tokenizer(greedy_tokenizer(tmp_path_factory.mktemp("greedy") / "m"))


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
@pytest.mark.parametrize("work", ["encode", "encode long", "spans"])
def test_a_text_that_takes_too_much_is_refused_and_the_next_one_is_tokenized(greedy, text, work):
    wanted = greedy.encode(PLAIN)
    before_bytes = psutil.Process().memory_info().rss
    with pytest.raises(RequestError) as refusal:
        getattr(greedy, work.split()[0])(text + " " * (LONG_BYTES if "long" in work else 0))
    assert (refusal.value.status, bool(refusal.value.hint)) == (400, True)
    assert greedy.encode(PLAIN) == wanted
    assert psutil.Process().memory_info().rss < before_bytes + (64 << 20)


@pytest.mark.parametrize("work", ["encode", "encode long", "encode_each", "spans"])
@pytest.mark.parametrize(
    ("name", "expression"),
    [("match that is given up", "(?:X|XX)+[yw]v"), ("match that takes long", "Z*Z*Z*z")],
)
def test_a_refusal_says_what_took_too_long_and_names_the_expressions(
    greedy, name, expression, work
):
    text = HOSTILE_TEXTS[name] + " " * (LONG_BYTES if "long" in work else 0)
    with pytest.raises(RequestError, match="tokenizing takes") as refusal:
        list(getattr(greedy, work.split()[0])([text] if work == "encode_each" else text))
    assert f"'{expression}'" in refusal.value.what
    assert refusal.value.code == "too_costly"


@pytest.mark.parametrize("work", ["encode", "spans", "decode"])
def test_the_interpreter_is_free_while_a_text_is_worked_on(work):
    tokenizer = read_tokenizer(STARTER_FOLDER)
    text = PLAIN * 5_000
    argument = tokenizer.encode(text) if work == "decode" else text
    turns, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    try:
        before = turns[0]
        getattr(tokenizer, work)(argument)
        taken = turns[0] - before
    finally:
        stop.set()
        other.join()
    assert taken > 100  # with the lock kept it has a handful, at the beginning and the end


def test_a_process_that_is_killed_is_started_again_for_the_text(made):
    tokenizer, process = made()
    wanted = tokenizer.encode(PLAIN)
    (fork,) = process.children()
    fork.kill()
    assert tokenizer.encode(PLAIN) == wanted
    assert process.is_running()
    (fork,) = process.children()
    process.kill()
    assert tokenizer.encode(PLAIN) == wanted
    fork.wait(10)


def test_a_text_that_is_given_up_costs_a_fork_and_no_process(tmp_path, made):
    tokenizer, process = made(greedy_tokenizer(tmp_path / "m"))
    for text in ("Q", "Q" + " " * LONG_BYTES):
        with pytest.raises(RequestError):
            tokenizer.encode(text)
    assert tokenizer.encode(PLAIN)
    assert process.is_running()


def test_the_process_outlives_the_reader_and_ends_with_the_tokenizer(made):
    tokenizer, process = made()
    os.kill(READER.pid, signal.SIGKILL)
    assert READER.read("constraint", "regex", "a", True)  # by another reader
    assert tokenizer.encode(PLAIN)
    assert process.pid not in processes()
    assert is_alive(process)
    del tokenizer
    gc.collect()
    process.wait(10)


def test_a_tokenizer_that_is_let_go_leaves_nothing(made):
    def num_held():
        tokenizer, process = made()
        assert tokenizer.encode(PLAIN)
        held = len(os.listdir("/proc/self/fd")), psutil.Process(READER.pid).num_fds()
        del tokenizer
        gc.collect()
        process.wait(10)
        while process.pid in processes():  # the reader has not seen it yet
            time.sleep(0.01)
        return held

    num_held()
    assert num_held() == num_held()


def test_a_process_holds_nothing_of_another_models(made):
    """Or a text would wait in vain for the end of a process that another one holds up."""
    (first, one), (second, other) = made(), made()
    assert first.encode(PLAIN) == second.encode(PLAIN)
    assert one.num_fds() == other.num_fds()


def test_the_memory_of_a_text_and_of_a_model_is_bounded_by_its_length(made):
    tokenizer, process = made()
    for text in (PLAIN * 1000, PLAIN):
        tokenizer.encode(text)
    (fork,) = process.children()
    left_bytes = fork.rlimit(psutil.RLIMIT_AS)[0] - fork.memory_info().vms
    assert 60 << 20 < left_bytes < 66 << 20
    model_bytes = process.rlimit(psutil.RLIMIT_AS)[0]
    assert model_bytes < 1 << 30, "the model was read within the limit of other texts"


def test_a_process_is_not_replaced_by_one_with_other_ids(tmp_path, made):
    folder = save(byte_level(), tmp_path / "m")
    tokenizer, process = made(folder)
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"][-1]["content"] = "<thought>"
    path.write_text(json.dumps(values))
    process.kill()
    with pytest.raises(Unavailable):
        tokenizer.encode("a")
    shutil.rmtree(folder)
    with pytest.raises(Unavailable):
        tokenizer.encode("a")
    save(byte_level(), folder)
    assert tokenizer.encode("hello")


def test_a_short_text_does_not_wait_for_a_long_one(made):
    tokenizer, process = made()
    wanted, results = tokenizer.encode(PLAIN), []
    thread = threading.Thread(target=lambda: results.append(tokenizer.encode(PLAIN * 20_000)))
    thread.start()
    while len(forks := process.children()) < 2:
        time.sleep(0.001)
    forks[1].suspend()
    assert tokenizer.encode(PLAIN) == wanted
    assert not results
    forks[1].resume()
    thread.join(60)
    assert len(results[0]) > 20_000


def test_no_short_text_waits_for_one_that_takes_long(tmp_path, made):
    tokenizer, process = made(greedy_tokenizer(tmp_path / "m"))
    wanted, ended = tokenizer.encode(PLAIN), []
    short = set(process.children())

    def work():
        with pytest.raises(RequestError):
            tokenizer.encode(HOSTILE_TEXTS["match that takes long"])
        ended.append("slow")

    thread = threading.Thread(target=work)
    thread.start()
    while not (others := set(process.children()) - short) and not ended:
        time.sleep(0.001)
    for fork in others:
        fork.suspend()
    assert tokenizer.encode(PLAIN) == wanted
    assert not ended
    for fork in others:
        fork.resume()
    thread.join(60)
    assert ended


def test_a_slow_text_of_a_client_that_can_wait_is_late(greedy):
    """Its thread is then free for others."""
    text = HOSTILE_TEXTS["match that takes long"]
    with pytest.raises(Late):
        Asker().do(lambda: greedy.encode(text))
    with pytest.raises(RequestError):
        Asker(is_late=True).do(lambda: greedy.encode(text))
    assert Asker().do(lambda: greedy.encode(PLAIN)) == greedy.encode(PLAIN)


def test_a_text_that_the_tokenizer_refuses_costs_no_process(tmp_path, made):
    folder = save(byte_level(), tmp_path / "m")
    values = json.loads((folder / "tokenizer.json").read_text())
    letters = sorted({*TRIAL_TEXT, "<|begin|>"})
    values["model"] = {"type": "WordLevel", "unk_token": "none", "vocab": {}}
    values["model"]["vocab"] = {letter: at for at, letter in enumerate(letters)}
    values |= {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "invert": False}}
    values["pre_tokenizer"]["behavior"], values["decoder"] = "Isolated", None
    values["added_tokens"], values["post_processor"] = [], None
    (folder / "tokenizer.json").write_text(json.dumps(values))
    tokenizer, process = made(folder)
    with pytest.raises(RequestError) as refusal:
        tokenizer.encode("Z")
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_value")
    assert tokenizer.encode("time")
    assert process.is_running()
