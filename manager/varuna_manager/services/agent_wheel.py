"""What new VMs install: the wheel of the manager's own version, which the operator has put there."""

from __future__ import annotations

from pathlib import Path

from varuna_manager.services.errors import NotFoundError

_PATTERN = "varuna_spot-*.whl"


class AgentWheel:
    """`place`: the wheel, or a folder of them; None: there is none. Read at each call, so that it can be exchanged."""

    def __init__(self, place: Path | None) -> None:
        self._place = place

    def wheel(self) -> Path:
        """The newest one. Raises NotFoundError."""
        if self._place is None:
            raise NotFoundError("this manager has no wheel for agents: start it with --agent-wheel FOLDER (make wheel)")
        if self._place.is_file():
            return self._place
        found = list(self._place.glob(_PATTERN))
        if not found:
            raise NotFoundError(f"there is no {_PATTERN} in {self._place}: make wheel makes one")
        return max(found, key=lambda path: (path.stat().st_mtime, path.name))

    def constraints(self) -> bytes:
        """The versions of what the wheel depends on; empty: any that fit. Raises NotFoundError."""
        try:
            return (self.wheel().parent / "constraints.txt").read_bytes()
        except FileNotFoundError:
            return b""
