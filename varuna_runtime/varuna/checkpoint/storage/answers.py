"""Questions to a store that may never answer: a file server that is away blocks each call for as long as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import structlog

__all__ = ["ask_store"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_ANSWER_LIMIT_S = 10.0


def ask_store(url: str, question: Callable[[], T], *, otherwise: T) -> T:
    """The answer to `question`, or `otherwise` when the store at `url` has not answered within ten seconds.

    Raises what `question` raises in that time. After it, a thread goes on waiting.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    # A daemon: the interpreter waits at its end for the threads of an executor.
    threading.Thread(target=ask, name="varuna-store-question", daemon=True).start()
    if not wait([answer], _ANSWER_LIMIT_S).done:
        _log.warning("the checkpoint store does not answer", url=url, seconds=_ANSWER_LIMIT_S)
        return otherwise
    return answer.result()
