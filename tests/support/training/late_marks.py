"""Files that say which ranks lack late state, so that a rank can wait until all have moved, or until none lacks any."""

from __future__ import annotations

import os
from pathlib import Path

from varuna.roles.late_state import LateState
from waiting import wait_until


class LateMarks:
    """One process's, in a folder of all that take part in one training, new ones too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.states: list[LateState] = []
        """That this process has begun to fetch, by generation."""
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

    def wait_until_moved(self) -> None:
        """Waits until all ranks of the newest generation have ended their moves: before, a loss leaves them without a
        stage."""
        newest = self.states[-1]
        size = newest._worker.environment.world_size
        wait_until(lambda: newest.have_all() or len(self._list_marks(newest)) == size, "the others' moves")

    def wait_for_all(self) -> None:
        """Waits until no rank of the newest generation that has moved lacks late state: before, a loss ends the
        move."""
        if self.states:  # when all have it here, all others have begun, too
            newest = self.states[-1]
            wait_until(newest.have_all, "the late state")
            wait_until(lambda: not self._list_marks(newest), "the others' late state")

    def _list_marks(self, state: LateState) -> list[Path]:
        return list(self._folder.glob(f"{self._find_mark(state).stem}.process*"))

    def _find_mark(self, state: LateState) -> Path:
        return self._folder / f"late.generation{state._worker.environment.generation}.process{os.getpid()}"
