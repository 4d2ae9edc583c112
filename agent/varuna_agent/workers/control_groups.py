"""A control group (cgroup v2) for the processes of each job on this VM, with the limits that its job file sets.

The agent's own group, which systemd delegates to it (`Delegate=` in its unit), gets these folders:

    agent       the agent itself and the guards: a group with others in it can have no processes of its own
    job-JOB     the processes of one job: workers, its warmed process, its setup

A job under `--run-as` cannot leave its group. One that runs as the agent's own user can, if it means to.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import structlog

from varuna_agent.state import ProcessLimits

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_OWN = "agent"
_JOB = "job-"
_WANTED = ("cpu", "memory", "pids")
_CPU_PERIOD_US = 100_000
_DEFAULT_PROCESSES = 32_768
"""The limit of processes and threads for a job that sets none: more than jobs need, with some left for the agent."""


class NoGroupsError(Exception):
    """Jobs get no control groups on this VM; the text says why."""


class JobGroups:
    """The control groups of the jobs on this VM.

    Args:
        folder: the group in which jobs get theirs.
        controllers: the limits that can be set there: `cpu`, `memory`, `pids`.
    """

    def __init__(self, folder: Path, controllers: Collection[str]) -> None:
        self._folder = folder
        self._controllers = frozenset(controllers)

    @classmethod
    def open_groups(
        cls, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), pid: int | None = None
    ) -> JobGroups:
        """Prepare this process's group for groups of jobs. Raises NoGroupsError with nothing changed."""
        pid = os.getpid() if pid is None else pid
        try:
            folder = _own_group(root, membership)
            controllers = [name for name in _WANTED if name in _words(folder / "cgroup.controllers")]
            if not controllers:
                raise NoGroupsError(f"{folder} controls none of {', '.join(_WANTED)}")
            _move_into_subgroup(folder, pid)
            try:
                _write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
            except OSError:
                _write(folder / "cgroup.procs", str(pid))
                with suppress(OSError):
                    (folder / _OWN).rmdir()
                raise
        except OSError as error:
            raise NoGroupsError(f"{error.filename}: {error.strerror}") from error
        groups = cls(folder, controllers)
        groups.remove_unused(())  # an earlier agent that was killed may have left some
        return groups

    def make_group(self, job_id: str, limits: ProcessLimits) -> Path:
        """Make or update the group of a job. Raises OSError."""
        group = self._folder / f"{_JOB}{job_id}"
        with suppress(FileExistsError):
            group.mkdir()
        for controller, (name, value) in _settings(limits).items():
            if controller in self._controllers:
                _write(group / name, value)
            elif controller in _find_requested(limits):
                _log.warning("a limit is not set: this VM has no such controller", job=job_id, controller=controller)
        return group

    def count_memory_kills(self, job_id: str) -> int:
        """How many of the job's processes the kernel killed because the job had reached its memory limit."""
        try:
            events = (self._folder / f"{_JOB}{job_id}" / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0)

    def remove_unused(self, job_ids: Collection[str]) -> None:
        """Remove the groups of all other jobs in which no process is left."""
        for group in self._folder.glob(f"{_JOB}*"):
            if group.name.removeprefix(_JOB) not in job_ids:
                with suppress(OSError):  # a process is left: a later call removes it
                    group.rmdir()


def _settings(limits: ProcessLimits) -> dict[str, tuple[str, str]]:
    """By controller: the file and its value."""
    cpus = f"{max(int(limits.cpus * _CPU_PERIOD_US), 1000)} {_CPU_PERIOD_US}" if limits.cpus > 0 else "max"
    return {
        "cpu": ("cpu.max", cpus),
        "memory": ("memory.max", str(limits.memory_bytes) if limits.memory_bytes else "max"),
        "pids": ("pids.max", str(limits.processes or _DEFAULT_PROCESSES)),
    }


def _find_requested(limits: ProcessLimits) -> set[str]:
    requested = {"cpu": limits.cpus, "memory": limits.memory_bytes, "pids": limits.processes}
    return {controller for controller, limit in requested.items() if limit}


def _own_group(root: Path, membership: Path) -> Path:
    """Raises NoGroupsError, OSError."""
    if not (root / "cgroup.controllers").exists():
        raise NoGroupsError(f"{root} is not a cgroup v2 file system")
    lines = membership.read_text().splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in Path(own).parts:
        raise NoGroupsError(f"{membership} names no group of this process below {root}")
    return root / own


def _move_into_subgroup(folder: Path, pid: int) -> None:
    """Move the agent into a group below, because a group with processes cannot limit the groups below it.

    Raises NoGroupsError if other processes are in the group, because then it is not the agent's own; OSError.
    """
    others = [each for each in _words(folder / "cgroup.procs") if each != str(pid)]
    if others and (folder / "cgroup.type").exists():  # the root has no type, and may have both
        raise NoGroupsError(f"{folder} has other processes than the agent's")
    with suppress(FileExistsError):
        (folder / _OWN).mkdir()
    _write(folder / _OWN / "cgroup.procs", str(pid))


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _write(path: Path, text: str) -> None:
    """Write to an existing file of the kernel's. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
