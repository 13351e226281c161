"""The process that reads strangers' text: its limits, its deaths, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.errors import CheckpointError, Overran, RequestError, Unavailable, Unreadable
from engine.text import reading
from engine.text.answers import Answer, How, send_answer
from engine.text.chat_template import TOO_COSTLY, ChatTemplate
from engine.text.reading import READER, Asker, Late, Left, Reader
from tests.family_templates import FAMILIES

pytestmark = pytest.mark.usefixtures("in_time")

USER = {"role": "user", "content": "hello"}
SLOW = "{% for i in range(99999) %}{% for j in range(20) %}{% endfor %}{% endfor %}done"
"""A tenth of a second or two, and an end."""
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW_GRAMMAR = "root ::= " + "(a)" * 20_000 + '\na ::= "a"'
MAX_GROWTH_BYTES = 8 << 20


@pytest.fixture
def reader():
    reader = Reader()
    yield reader
    reader.close()


def render(reader, template, **variables):
    return reader.read("render", template, {"messages": [USER], **variables})


def start(reader):
    """Start the process, without the child of it that renders chats."""
    reader.read("takes_tools", "", "")


def slow_grammar(reader):
    """Read a grammar for a client that would wait for idle cores first."""
    return Asker().do(lambda: reader.read("constraint", "grammar", SLOW_GRAMMAR, True))


def children(reader):
    return psutil.Process(reader.pid).children()


def in_thread(work):
    """Begin a piece of work; what waits for it returns the result or the error."""
    results = []

    def run():
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        return results[0]

    return result


def test_jobs_have_results_and_refusals_with_their_reasons(reader):
    assert render(reader, "{{ messages[0].content }}") == "hello"
    assert "start: /a+/" in reader.read("constraint", "regex", "a+", True)
    with pytest.raises(Unreadable, match="no thanks"):
        render(reader, "{{ raise_exception('no thanks') }}")
    with pytest.raises(Unreadable):
        reader.read("constraint", "regex", "(", True)
    assert (reader.num_restarts, sum(reader.failures.values())) == (0, 0)


def test_a_template_that_loops_ends_alone_and_the_next_job_is_done(reader):
    told = []
    reader.tell = told.append
    with pytest.raises(Overran):
        render(reader, ENDLESS)
    assert render(reader, "{{ messages | length }}") == "1"
    assert dict(reader.failures) == {"time": 1}
    assert reader.num_restarts == 0
    assert len(told) == 1


def test_a_chat_that_renders_slowly_is_late_and_ends_nothing_else(reader):
    start(reader)
    with pytest.raises(Late):
        Asker().do(lambda: render(reader, ENDLESS))
    assert render(reader, "{{ messages | length }}") == "1"
    assert (reader.num_restarts, sum(reader.failures.values())) == (0, 0)


def test_a_template_is_compiled_in_time_that_is_not_the_chats(reader):
    long = "{% if messages %}{{ messages | length }}{% endif %}" * 4000
    assert Asker().do(lambda: render(reader, long)) == "1" * 4000


def test_a_late_chat_does_not_keep_others_waiting(reader):
    start(reader)
    result = in_thread(lambda: Asker(is_late=True).do(lambda: render(reader, SLOW)))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].suspend()
    assert render(reader, "{{ messages | length }}") == "1"
    forks[0].resume()
    assert result() == "done"


@pytest.mark.parametrize(
    "job",
    [("render", ENDLESS, {"messages": [USER]}), ("constraint", "grammar", SLOW_GRAMMAR, True)],
    ids=["chat", "grammar"],
)
def test_a_late_text_that_gets_no_core_is_tried_once_and_ends_nothing_else(
    reader, monkeypatch, job
):
    start(reader)
    monkeypatch.setattr(reading, "LONGEST_S", 1.0)
    usual, begun = psutil.Process(reader.pid).nice(), set()
    result = in_thread(lambda: Asker(is_late=True).do(lambda: reader.read(*job)))
    while not begun or children(reader):
        for fork in children(reader):
            with contextlib.suppress(psutil.NoSuchProcess):
                if fork.nice() > usual:  # it has said that it has begun
                    begun.add(fork)
                    fork.suspend()
        time.sleep(0.001)
    assert isinstance(result(), Overran)
    assert (len(begun), reader.num_restarts) == (1, 0)


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'a' * 10**14 }}",
        "{{ ('a' * (messages | length) * 2 * 10**9) | length }}",
        "{{ ('a' * (messages | length) * 10**10) | length }}",
        "{{ 'a' | center(10**11) }}",
        "{% set n = namespace(a='a') %}" + "{% set n.a = n.a * 1024 %}" * 5,
        "{{ [messages] * 10**10 }}",
    ],
)
def test_a_template_that_fills_memory_ends_alone_and_the_next_job_is_done(reader, bomb):
    with pytest.raises(Overran):
        render(reader, bomb)
    assert render(reader, "{{ messages | length }}") == "1"
    assert dict(reader.failures) == {"memory": 1}


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '\\ud800' }}",
        "{{ messages[5].content.missing }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ lipsum() }}",
        "{{ cycler(1) }}",
        "{{ joiner() }}",
        "{{ range(10**9) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ | length + 1 }}",
        "{{ raise_exception.__call__.__globals__ }}{{ 1 // 0 }}",
    ],
)
def test_what_templates_may_not_do_is_refused(reader, template):
    with pytest.raises(Unreadable) as refusal:
        render(reader, template)
    assert not isinstance(refusal.value, Overran)
    assert reader.num_restarts == 0


@pytest.mark.parametrize("name", ["raise_exception", "strftime_now", "range"])
def test_no_function_of_a_template_shows_what_it_was_made_of(reader, name):
    for path in ("__globals__", "__call__.__globals__", "__init__.__globals__", "__class__"):
        for shown in (
            f"{{{{ {name}.{path} }}}}",
            f"{{{{ '{{0.{path}}}'.format({name}) }}}}",
            f"{{{{ ('{{0.{path}}}' | attr('format'))({name}) }}}}",
        ):
            try:
                text = render(reader, shown)
            except Unreadable:
                continue
            assert "module" not in text
            assert "class" not in text


def test_nesting_beyond_what_a_message_carries_is_refused_at_once(reader):
    deep = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(Unreadable):
        reader.read("constraint", "json", deep, True)
    assert reader.pid is None


def test_nesting_that_a_message_carries_and_python_does_not_is_refused_and_no_failure(reader):
    deep = {}
    for _ in range(1500):
        deep = {"items": deep}
    with pytest.raises(Unreadable) as refusal:
        reader.read("constraint", "json", deep, True)
    assert not isinstance(refusal.value, Overran)
    assert (reader.num_restarts, sum(reader.failures.values())) == (0, 0)


def test_a_grammar_that_computes_too_long_is_given_up(reader):
    start(reader)
    result = in_thread(lambda: reader.read("constraint", "grammar", SLOW_GRAMMAR, True))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].send_signal(signal.SIGPROF)  # as the kernel does at the limit
    assert isinstance(result(), Overran)
    assert dict(reader.failures) == {"time": 1}
    assert reader.num_restarts == 0


def test_a_job_whose_process_is_killed_is_done_again(reader):
    start(reader)
    result = in_thread(lambda: render(reader, SLOW))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].kill()
    assert result() == "done"
    assert dict(reader.failures) == {"ended": 1}
    assert reader.num_restarts == 0


def test_a_grammar_whose_process_is_killed_is_read_again(reader):
    start(reader)
    result = in_thread(lambda: reader.read("constraint", "grammar", SLOW_GRAMMAR, True))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].kill()
    assert isinstance(result(), Unreadable | str)
    assert dict(reader.failures) == {"ended": 1}
    assert reader.num_restarts == 0


def test_a_grammar_does_not_keep_templates_waiting(reader):
    start(reader)
    result = in_thread(lambda: reader.read("constraint", "grammar", SLOW_GRAMMAR, True))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].suspend()
    assert render(reader, "{{ messages | length }}") == "1"
    with contextlib.suppress(psutil.NoSuchProcess):
        forks[0].resume()
    result()


def test_a_grammar_that_takes_long_leaves_the_cores_to_all_else(reader):
    start(reader)
    result = in_thread(lambda: slow_grammar(reader))
    while not (forks := children(reader)):
        time.sleep(0.001)
    seen = {os.SCHED_OTHER}
    with contextlib.suppress(ProcessLookupError):
        while os.SCHED_IDLE not in seen:
            seen.add(os.sched_getscheduler(forks[0].pid))
    assert os.SCHED_IDLE in seen
    result()


def test_a_grammar_that_finds_no_idle_core_is_late(reader):
    start(reader)
    result = in_thread(lambda: slow_grammar(reader))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].suspend()  # as one that gets no core
    assert isinstance(result(), Late)
    forks[0].wait(60)  # it is ended
    assert (reader.num_restarts, sum(reader.failures.values())) == (0, 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_grammar_whose_client_leaves_is_ended_and_none_of_its_is_begun(
    reader, monkeypatch, is_late
):
    monkeypatch.setattr(reading, "YIELDING_S", 60.0)
    start(reader)
    asker = Asker(is_late=is_late)

    def read():
        return reader.read("constraint", "grammar", SLOW_GRAMMAR, True)

    result = in_thread(lambda: asker.do(read))
    while not (forks := children(reader)):
        time.sleep(0.001)
    forks[0].suspend()
    asker.leave()
    assert isinstance(result(), Left)
    forks[0].wait(60)
    with pytest.raises(Left):
        asker.do(read)
    assert children(reader) == []
    assert isinstance(read(), str)  # of the next client
    assert (reader.num_restarts, sum(reader.failures.values())) == (0, 0)


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
def test_a_process_that_cannot_start_makes_the_request_wait(program):
    reader = Reader((program,))
    for _ in range(2):
        with pytest.raises(Unavailable) as refusal:
            render(reader, "")
        assert (refusal.value.code, refusal.value.status) == ("busy", 503)
    reader.close()


def test_a_thousand_jobs_leave_nothing_behind(reader):
    def do(count):
        for index in range(count):
            render(reader, "{{ messages | tojson }}", documents=["x" * 10_000])
            if index % 20 == 0:
                reader.read("constraint", "json", {"type": "object"}, True)

    do(100)
    process = psutil.Process(reader.pid)

    def num_held():
        """Descriptors on both sides, once the last fork has been seen to end."""
        while len(process.children()) > 1:  # one stays
            time.sleep(0.01)
        render(reader, "")
        while process.status() != psutil.STATUS_SLEEPING:  # it answers before it closes the job
            time.sleep(0.01)
        return process.num_fds(), len(os.listdir("/proc/self/fd"))

    before_bytes, before = process.memory_info().rss, num_held()
    do(1000)
    assert process.memory_info().rss - before_bytes < MAX_GROWTH_BYTES
    after = num_held()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert reader.num_restarts == 0


def test_the_process_ends_with_its_daemon():
    script = (
        "import time; from engine.text.reading import READER\n"
        "READER.read('render', '', {}); print(READER.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as daemon:
        process = psutil.Process(int(daemon.stdout.readline()))
        daemon.kill()
    process.wait(10)


def test_the_process_knows_no_secret_and_holds_no_file_of_the_daemons(reader, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    render(reader, "")
    process = psutil.Process(reader.pid)
    assert "HF_TOKEN" not in process.environ()
    assert process.open_files() == []


def test_the_process_says_nothing_leaves_no_dump_and_is_ended_before_workers(reader):
    render(reader, "")
    process = psutil.Process(reader.pid)
    assert os.readlink(f"/proc/{reader.pid}/fd/2") == os.devnull  # where a compiler writes texts
    assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    memory_bytes, most_bytes = process.rlimit(psutil.RLIMIT_AS)
    assert 0 < memory_bytes <= 1 << 30
    assert most_bytes <= 1 << 31
    assert Path(f"/proc/{reader.pid}/oom_score_adj").read_text() == "800\n"


def test_a_grammar_is_behind_all_else_also_where_it_gets_a_share_of_the_cores(reader):
    start(reader)
    usual = psutil.Process(reader.pid).nice()
    result = in_thread(lambda: reader.read("constraint", "grammar", SLOW_GRAMMAR, True))
    while not (forks := children(reader)):
        time.sleep(0.001)
    seen = {usual}
    with contextlib.suppress(psutil.NoSuchProcess):
        while seen == {usual}:
            seen.add(forks[0].nice())
    assert max(seen) == min(usual + 10, 19)
    result()


def test_the_daemon_imports_nothing_that_reads_such_texts():
    script = (
        "import sys, appliance.daemon\n"
        "print(*({'jinja2', 'llguidance', 'engine.reader'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_a_chat_template_that_takes_too_much_is_told_apart_from_one_that_refuses():
    costly = ChatTemplate("{{ 'a' * (messages | length) * 10**12 }}", "here")
    with pytest.raises(RequestError) as refusal:
        costly.render([USER])
    assert (refusal.value.code, refusal.value.status) == (TOO_COSTLY, 400)
    refusing = ChatTemplate("{{ raise_exception('no') }}", "here")
    with pytest.raises(RequestError) as refusal:
        refusing.render([USER])
    assert (refusal.value.code, refusal.value.status) == ("invalid_value", 400)


@pytest.mark.parametrize("broken", ["{% for %}", "{{" * 5000])
def test_a_broken_template_is_an_error_of_the_model(broken):
    with pytest.raises(CheckpointError) as error:
        ChatTemplate(broken, "tokenizer_config.json")
    assert error.value.where == "tokenizer_config.json"


def test_templates_of_several_models_take_turns():
    templates = [ChatTemplate(text, "here") for text in FAMILIES.values()]
    texts = [template.render([USER]) for template in templates]
    assert len(set(texts)) == len(texts)
    assert [template.render([USER]) for template in templates] == texts
    assert READER.pid is not None


def test_an_answer_counts_that_is_given_before_the_whole_text_has_come():
    """As that of a process which sees the death of another that was to read it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)

    def answer():
        (fd,) = socket.recv_fds(theirs, 16, 1)[1]
        with socket.socket(fileno=fd) as job:
            send_answer(job, Answer.ENDED, "-9")

    with ours, theirs:
        answered = in_thread(answer)
        assert reading.ask(ours, How.TEXT, b"x" * (8 << 20)) == (Answer.ENDED, b"-9")
        answered()


def test_of_jobs_that_find_no_idle_core_one_at_a_time_gets_a_share_of_busy_ones(monkeypatch):
    reader, at_once, most = Reader(), [], []

    def read(job, body, how, kept):
        assert how == reading.How.FORKED
        at_once.append(job)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()
        return b"done"

    monkeypatch.setattr(reader, "_read", read)
    late = Asker(is_late=True)
    jobs = [in_thread(lambda: late.do(lambda: reader.read("constraint"))) for _ in range(3)]
    assert [wait() for wait in jobs] == ["done"] * 3
    assert most == [1, 1, 1]
