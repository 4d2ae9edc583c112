"""A process that was started ahead for a generation to come: it waits in `Varuna()` until it has a rank.

Until then the script sees the environment of the rank that the process is expected to get. What it has read of that is
told to the agent, which gives the process no rank for which it would have been something else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import structlog

from varuna.devices.accelerator import has_initialized_accelerator
from varuna.distributed.departure import Departure
from varuna.distributed.worker_environment import list_shape_readers
from varuna.worker.agent_link import AgentLink, Assignment
from varuna_proto.environment import WorkerEnvironment

__all__ = ["Newcomer", "watch_reads"]

_log = structlog.get_logger("varuna")

_NUMBER = "VARUNA_NEWCOMER"
_SHAPE_VARIABLES = ("RANK", "VARUNA_STAGE_TO_RANK_MAP")
"""What `get_varuna_config` and `get_this_rank_config_varuna` tell the script."""
_OWN_PACKAGES = ("varuna", "varuna_proto", "varuna_planner")
_PASSED_THROUGH = ("os", "_collections_abc", "collections.abc")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_GO = "1000"
"""When memory runs out, the kernel ends newcomers before workers that train."""
_NEVER_KNOWN = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "TRACEPARENT",
        "VARUNA_COMMITTED_STEP",
        "VARUNA_HOLDERS",
        "VARUNA_KEEPERS",
        "VARUNA_STOPS_PER_HOUR",
        "VARUNA_STOPS_WITHOUT_COPIES_PER_HOUR",
        "VARUNA_SURVIVORS",
    }
)
"""Known only when the generation starts."""

if TYPE_CHECKING:
    _Environ = os._Environ[str]
else:
    _Environ = type(os.environ)


class _WatchedEnviron(_Environ):
    """`os.environ`, which notes the variables that others than Varuna read.

    Varuna's own objects that the script has made before `Varuna()` follow the process to its rank.
    """

    names_read: ClassVar[set[str]] = set()
    usual_oom_score: ClassVar[str] = ""
    """Of the job's processes; empty: not known."""

    def __getitem__(self, key: str) -> str:
        if not _is_own_call():
            self.names_read.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        names = list(super().__iter__())
        if not _is_own_call():
            self.names_read.update(names)
        return iter(names)


def _is_own_call() -> bool:
    """Whether a module of Varuna's reads the environment."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSED_THROUGH:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN_PACKAGES


def watch_reads() -> None:
    """Notes from now on what the script reads of the environment, if this process is a newcomer."""
    if _NUMBER in os.environ:
        os.environ.__class__ = _WatchedEnviron
        _WatchedEnviron.usual_oom_score = _change_oom_score(_FIRST_TO_GO)


class Newcomer:
    """This process at the door."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        """`environment`: the expected one. Raises ConnectionError when the agent is not there."""
        self._expected = environment
        self.link = AgentLink(environment, Departure())

    @classmethod
    def from_environment(cls, environment: WorkerEnvironment) -> Newcomer | None:
        """None: this process has its rank."""
        return cls(environment) if environment.newcomer else None

    def wait_for_rank(self) -> None:
        """Returns when this process has a rank, with which its environment variables then agree.

        The wait has no limit: the agent ends a process that no generation takes.
        """
        names = self._list_read()
        obstacle = _find_obstacle(names)
        self.link.report_at_door(names, obstacle)
        _log.info("this process waits in Varuna() for its generation to start", read=names, obstacle=obstacle)
        command = self.link.wait_for_command()
        assert isinstance(command, Assignment), "a process without a state was asked to give it"
        _stop_watching()
        # What only a newcomer has, or only the expected rank.
        for name in self._expected.to_environ().keys() - command.environment.to_environ().keys():
            os.environ.pop(name, None)

    def _list_read(self) -> list[str]:
        names = set(_WatchedEnviron.names_read)
        if list_shape_readers():
            names.update(_SHAPE_VARIABLES)
        return sorted(names & (self._expected.to_environ().keys() | _NEVER_KNOWN))


def _find_obstacle(names: list[str]) -> str:
    """`names`: what the script has read."""
    if not isinstance(os.environ, _WatchedEnviron):
        return "it was not started from a warmed process, so nobody knows what its script has read"
    if unknown := [name for name in names if name in _NEVER_KNOWN]:
        return f"the script reads {', '.join(unknown)} before Varuna(), which only the start of the generation decides"
    if has_initialized_accelerator():
        return "the script uses the GPU before Varuna(), which the present generation needs"
    return ""


def _stop_watching() -> None:
    environ: os._Environ[str] = os.environ
    if isinstance(environ, _WatchedEnviron):
        os.environ.__class__ = _Environ
        if _WatchedEnviron.usual_oom_score:
            _change_oom_score(_WatchedEnviron.usual_oom_score)


def _change_oom_score(score: str) -> str:
    """The score of this process before; empty: the system has none."""
    try:
        before = _OOM_SCORE.read_text().strip()
        _OOM_SCORE.write_text(score)
    except OSError:
        return ""
    return before
