"""How much memory the control groups (cgroup v2) of this process leave to it, as in a pod, a Slurm job or a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["GroupMemory", "read_group_memory"]


class GroupMemory(NamedTuple):
    """In bytes."""

    limit: int
    available: int
    """What is left of the limit. Files that the kernel only caches do not count as used."""


def read_group_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> GroupMemory | None:
    """Of the group with the least memory left: this process's own, or one of those above. None: none has a limit."""
    groups = [memory for folder in _list_groups(root, membership) if (memory := _read_group(folder)) is not None]
    return min(groups, key=lambda group: group.available, default=None)


def _list_groups(root: Path, membership: Path) -> Iterator[Path]:
    """Inside a container, the root is the container's own group."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in Path(own).parts:
        return
    folder = root / own
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def _read_group(folder: Path) -> GroupMemory | None:
    try:
        limit = int((folder / "memory.max").read_text())  # "max": ValueError
        used = int((folder / "memory.current").read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(row[1]) for row in rows if row[0] == "inactive_file")
    except (OSError, ValueError, IndexError):
        return None
    return GroupMemory(limit, max(limit - max(used - cached, 0), 0))
