"""The agent's threads where a job has left no other on the VM."""

from __future__ import annotations

import threading

import pytest

from varuna_agent import threads
from varuna_agent.threads import open_thread_pool
from waiting import DEADLINE_S


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_the_agents_threads_are_there_before_others_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    with open_thread_pool() as pool:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        waiting = [pool.submit(held.wait, DEADLINE_S) for _ in range(threads._THREADS + 1)]
        held.set()
        assert all(one.result() for one in waiting)


def test_an_agent_that_finds_too_few_threads_says_so_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_three(thread: threading.Thread) -> None:
        if len(started) == 3:
            no_thread()
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    with pytest.raises(OSError, match="needs 16 threads, and this VM has fewer left: can't start new thread"):
        open_thread_pool()
    assert [thread.is_alive() for thread in started] == [False] * 3
