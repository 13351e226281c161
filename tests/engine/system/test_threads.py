"""A thread runs, or its starter learns that it does not."""

import time
from threading import Event, Thread, get_ident

import pytest

from engine.errors import PenstockError
from engine.system import threads
from tests.running import running


def test_a_thread_runs_when_its_start_returns():
    ended = Event()
    thread = Thread(target=ended.wait)
    threads.start(thread)
    assert thread.is_alive()
    ended.set()
    thread.join()


@pytest.mark.parametrize("is_starter_lost", [True, False])
def test_a_thread_without_memory_to_begin_is_given_up(monkeypatch, is_starter_lost):
    has_ended = Event()

    class Stuck(Thread):
        def start(self):
            has_ended.wait()

    monkeypatch.setattr(threads, "BEGIN_S", 0.02)
    if is_starter_lost:
        monkeypatch.setattr(threads, "start_new_thread", lambda *_: None)
    with pytest.raises(PenstockError, match="no memory"):
        threads.start(Stuck(name="rows"))
    has_ended.set()


def test_a_machine_without_threads_is_told(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    with pytest.raises(PenstockError) as refused:
        threads.start(Thread(name="rows"))
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_the_time_of_a_thread_grows_while_it_computes():
    thread = get_ident()
    clock = time.pthread_getcpuclockid(thread)
    before_s = threads.thread_time_s(thread, clock)
    sum(range(100_000))
    assert threads.thread_time_s(thread, clock) > before_s


@pytest.mark.parametrize(
    ("program", "is_runnable"), [("while True: pass", True), ("input()", False)]
)
def test_a_process_that_waits_for_what_it_reads_is_not_runnable(program, is_runnable):
    with running(program) as process:
        for _ in range(3000):  # until it has got there
            if threads.is_runnable(process.pid) == is_runnable:
                break
            time.sleep(0.01)
        assert threads.is_runnable(process.pid) == is_runnable
    assert not threads.is_runnable(process.pid)


def test_a_thread_has_its_last_helper_until_that_is_done():
    with threads.helped_by(1):
        with threads.helped_by(2):
            assert threads.HELPERS[get_ident()] == 2
        assert threads.HELPERS[get_ident()] == 1
    assert get_ident() not in threads.HELPERS
