"""What new VMs install: the wheel of the manager's own version, which the operator provides."""

from __future__ import annotations

from pathlib import Path

from varuna_manager.answers.errors import MissingError

_PATTERN = "varuna_spot-*.whl"


class AgentWheel:
    """`place`: the wheel, or a folder with wheels; None: there is none. Read at each call, so replaceable."""

    def __init__(self, place: Path | None) -> None:
        self._place = place

    def find_wheel(self) -> Path:
        """The newest one. Raises MissingError."""
        if self._place is None:
            raise MissingError("this manager has no wheel for agents: start it with --agent-wheel FOLDER (make wheel)")
        if self._place.is_file():
            return self._place
        found = list(self._place.glob(_PATTERN))
        if not found:
            raise MissingError(f"there is no {_PATTERN} in {self._place}: make wheel makes one")
        return max(found, key=lambda path: (path.stat().st_mtime, path.name))

    def read_constraints(self) -> bytes:
        """The versions of the wheel's dependencies; empty: any that fit. Raises MissingError."""
        try:
            return (self.find_wheel().parent / "constraints.txt").read_bytes()
        except FileNotFoundError:
            return b""
