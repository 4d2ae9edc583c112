"""What tests put in the place of ending the process."""

from __future__ import annotations

import threading


class Ends:
    """Takes the place of `end_process`: keeps the codes with which the process would have ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()
