"""A control group (cgroup v2) for the processes of each job on this VM, with the limits that its job file sets.

The agent's own group, which systemd delegates to it (`Delegate=` in its unit), gets these folders:

    agent       the agent itself and the guards: a group with others in it can have no processes of its own
    job-JOB     what runs for one job: workers, its warmed process, its setup

A job under `--run-as` cannot leave its group. One that runs as the agent's own user can, if it means to.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import structlog

from varuna_agent.state import JobLimits

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_OWN = "agent"
_JOB = "job-"
_WANTED = ("cpu", "memory", "pids")
_CPU_PERIOD_US = 100_000
_MOST_PROCESSES = 32_768
"""And threads, of a job that sets no limit: more than any needs, and fewer than would leave the agent without."""


class NoGroupsError(Exception):
    """Jobs get no control groups on this VM; says why."""


class JobGroups:
    """Those of this VM.

    Args:
        folder: the group in which jobs get theirs.
        controllers: which limits can be set there: `cpu`, `memory`, `pids`.
    """

    def __init__(self, folder: Path, controllers: Collection[str]) -> None:
        self._folder = folder
        self._controllers = frozenset(controllers)

    @classmethod
    def open(
        cls, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), pid: int | None = None
    ) -> JobGroups:
        """Makes this process's own group one for groups of jobs. Raises NoGroupsError, and has changed nothing then."""
        pid = os.getpid() if pid is None else pid
        try:
            folder = _own_group(root, membership)
            controllers = [name for name in _WANTED if name in _words(folder / "cgroup.controllers")]
            if not controllers:
                raise NoGroupsError(f"{folder} controls none of {', '.join(_WANTED)}")
            _move_away(folder, pid)
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
        groups.remove_unused(())  # of an agent that was killed
        return groups

    def make(self, job_id: str, limits: JobLimits) -> Path:
        """The group of a job, with these limits. Raises OSError."""
        group = self._folder / f"{_JOB}{job_id}"
        with suppress(FileExistsError):
            group.mkdir()
        for controller, (name, value) in _settings(limits).items():
            if controller in self._controllers:
                _write(group / name, value)
            elif controller in _asked_for(limits):
                _log.warning("a limit is not set: this VM has no such controller", job=job_id, controller=controller)
        return group

    def memory_kills(self, job_id: str) -> int:
        """How many of its processes the kernel has killed because the job was at its limit of memory."""
        try:
            events = (self._folder / f"{_JOB}{job_id}" / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0)

    def remove_unused(self, job_ids: Collection[str]) -> None:
        """Removes the groups of all jobs but these, where no process is left."""
        for group in self._folder.glob(f"{_JOB}*"):
            if group.name.removeprefix(_JOB) not in job_ids:
                with suppress(OSError):  # a process is left: another time
                    group.rmdir()


def _settings(limits: JobLimits) -> dict[str, tuple[str, str]]:
    """By controller: which file gets what."""
    cpus = f"{max(int(limits.cpus * _CPU_PERIOD_US), 1000)} {_CPU_PERIOD_US}" if limits.cpus > 0 else "max"
    return {
        "cpu": ("cpu.max", cpus),
        "memory": ("memory.max", str(limits.memory_bytes) if limits.memory_bytes else "max"),
        "pids": ("pids.max", str(limits.processes or _MOST_PROCESSES)),
    }


def _asked_for(limits: JobLimits) -> set[str]:
    asked = {"cpu": limits.cpus, "memory": limits.memory_bytes, "pids": limits.processes}
    return {controller for controller, limit in asked.items() if limit}


def _own_group(root: Path, membership: Path) -> Path:
    """Raises NoGroupsError, OSError."""
    if not (root / "cgroup.controllers").exists():
        raise NoGroupsError(f"{root} is no cgroup v2")
    lines = membership.read_text().splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in Path(own).parts:
        raise NoGroupsError(f"{membership} names no group of this process below {root}")
    return root / own


def _move_away(folder: Path, pid: int) -> None:
    """Into a group below: one with processes of its own takes no limits for those below it. Raises OSError.

    Other processes stay where they are: they are nothing of the agent's, and the group is not its own then.
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
    """To a file that the kernel has made: none is made here. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
