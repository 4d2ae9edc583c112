"""Files that say which ranks lack late state, so that a rank can wait until none does."""

from __future__ import annotations

from pathlib import Path

from varuna.roles.late_state import LateState
from waiting import wait_until


class LateMarks:
    """One rank's, in a folder of all ranks. Only one of a process is made."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`rank`: that of no other process."""
        self._folder, self._rank = folder, rank
        self.states: list[LateState] = []
        """That this rank has begun to fetch, by generation."""
        begin, end_wait = LateState.begin, LateState._end_wait

        def begin_and_mark(state: LateState) -> None:
            self.states.append(state)
            self._find_mark(state).touch()
            begin(state)

        def end_and_unmark(state: LateState) -> None:
            end_wait(state)
            self._find_mark(state).unlink()

        LateState.begin = begin_and_mark  # type: ignore[method-assign,assignment]
        LateState._end_wait = end_and_unmark  # type: ignore[method-assign,assignment]

    def wait_for_all(self) -> None:
        """Waits until no rank of the newest generation that has moved lacks late state: before, a loss ends the
        move."""
        if self.states:  # when all have it here, all others have begun, too
            newest = self.states[-1]
            wait_until(newest.have_all, "the late state")
            marks = f"{self._find_mark(newest).stem}.rank*"
            wait_until(lambda: not list(self._folder.glob(marks)), "the others' late state")

    def _find_mark(self, state: LateState) -> Path:
        return self._folder / f"late.generation{state._worker.environment.generation}.rank{self._rank}"
