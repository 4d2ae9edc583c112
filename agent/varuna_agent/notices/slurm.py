"""The notice of an agent that runs as a Slurm job: a signal ahead of the job's end.

`sbatch --signal=B:USR1@SECONDS` sends it ahead of the time limit; a cluster with `PreemptParameters=send_user_signal`
sends it at the beginning of a preemption's grace time, too. Slurm then says when the job ends.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping

import structlog

from varuna_agent.notices.notices import Notice, unix_now_s

__all__ = ["SLURM_JOB", "SlurmNotices"]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

SLURM_JOB = "VARUNA_SLURM_JOB"
"""The environment variable with the number of the job in which the agent runs; jobs of its workers do not get it."""
_END_TIME = re.compile(r"\bEndTime=(\d+)\b")
_SCONTROL_S = 20.0
_UNKNOWN_END_S = 30.0
"""What is left where scontrol does not say: Slurm's default for KillWait."""


class SlurmNotices:
    """`announce_end`: called when the signal arrives."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ValueError outside of a Slurm job."""
        self._job = environ.get(SLURM_JOB, "")
        if not self._job.isdecimal():
            raise ValueError(
                f"--notices slurm: {SLURM_JOB} is not set to the job's number, as the manager's script does"
            )
        self._announced = asyncio.Event()

    def announce_end(self) -> None:
        self._announced.set()

    async def watch_notices(self) -> AsyncIterator[Notice]:
        while True:
            await self._announced.wait()
            self._announced.clear()
            yield Notice(f"slurm-{self._job}", await self._read_end(), f"slurm job {self._job} ends")

    async def acknowledge_notice(self, notice_id: str) -> None:
        """The job ends with the agent, and gives its node back before its time."""

    async def _read_end(self) -> float:
        """When Slurm ends the job, in seconds since the epoch."""
        try:
            async with asyncio.timeout(_SCONTROL_S):
                process = await asyncio.create_subprocess_exec(
                    *["scontrol", "--oneliner", "show", "job", self._job],
                    env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                output, _ = await process.communicate()
        except (OSError, TimeoutError) as error:
            _log.warning("scontrol does not say when this job ends", job=self._job, error=repr(error))
            return unix_now_s() + _UNKNOWN_END_S
        found = _END_TIME.search(output.decode(errors="replace"))
        return unix_now_s() + _UNKNOWN_END_S if found is None else float(found[1])
