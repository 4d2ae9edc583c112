"""What squeue, sacct and sbatch print, and what it means. Pure.

A job carries the mark `varuna:FLEET:REQUEST:SLOT:VM` as its comment. A request has one job for each slot; of two jobs
with the same slot, which only a submission whose sender was killed can cause, the one with the higher number is
cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.slurm.settings import parse_time_limit
from varuna_proto.names import is_plain

__all__ = [
    "ACCOUNTING_FORMAT",
    "QUEUE_FORMAT",
    "JobMark",
    "JobPhase",
    "SlurmJob",
    "describe_end",
    "find_duplicates",
    "find_notice",
    "is_refused",
    "make_pending_refusal",
    "parse_accounting",
    "parse_jobs",
    "parse_submission_error",
]

QUEUE_FORMAT = "%A|%T|%r|%V|%S|%e|%l|%B|%k"
"""Number, state, reason, times of submission, start and end, time limit, node, comment. The comment of a stranger's job
may contain anything, so it is last."""
ACCOUNTING_FORMAT = "JobIDRaw,State"

_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_NEVER = re.compile(r"BadConstraints|Invalid(Account|QOS)|JobHeld|PartitionTimeLimit|DependencyNeverSatisfied")
"""Reasons of a pending job that waiting does not change."""
_LIMITED = re.compile(r"^(Assoc|QOS|MaxJob|JobArrayTaskLimit)|Limit$")
"""Reasons that name a limit of the account and no lack of nodes."""
_CUT_SHORT_S = 5.0
"""A job whose end is so much before its limit is about to be preempted: Slurm has moved the end."""


class JobPhase(StrEnum):
    WAITING = "waiting"
    THERE = "there"
    """It has its node."""
    COMPLETING = "completing"
    """It is at its end: its processes have been signalled, and may run on for Slurm's KillWait."""
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class JobMark:
    fleet: str
    request: str
    slot: int
    vm_id: str

    def __str__(self) -> str:
        return f"varuna:{self.fleet}:{self.request}:{self.slot}:{self.vm_id}"

    @classmethod
    def parse_comment(cls, comment: str) -> JobMark | None:
        """None: the comment of another job."""
        parts = comment.strip().split(":")
        if len(parts) != 5 or parts[0] != "varuna" or not parts[3].isdecimal() or not is_plain(parts[4]):
            return None
        return cls(fleet=parts[1], request=parts[2], slot=int(parts[3]), vm_id=parts[4])


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One of our jobs, as Slurm last described it."""

    id: int
    mark: JobMark
    state: str
    reason: str
    submitted_at: float
    started_at: float | None
    ends_at: float | None
    """None: it has no end that is known."""
    limit_s: float
    node: str

    @property
    def phase(self) -> JobPhase:
        if self.state in _ENDED:
            return JobPhase.ENDED
        if self.state in _WAITING:
            return JobPhase.WAITING
        return JobPhase.COMPLETING if self.state == "COMPLETING" else JobPhase.THERE

    @property
    def had_node(self) -> bool:
        """Whether it ever was a VM. A job that was cancelled while it waited never was."""
        return self.node not in ("", "n/a", "(null)", "None assigned")


def parse_jobs(text: str, fleet: str) -> list[SlurmJob]:
    """The jobs of this fleet in squeue's answer to `QUEUE_FORMAT`, in the order of their numbers. Raises ValueError."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 8)
        mark = JobMark.parse_comment(fields[8]) if len(fields) == 9 else None
        if mark is None or mark.fleet != fleet:
            continue  # another job of this user, or a further line of its comment
        number, state, reason, submitted, started, ends, limit, node, _ = fields
        jobs.append(
            SlurmJob(
                id=int(number),
                mark=mark,
                state=state,
                reason=reason,
                submitted_at=float(submitted),
                started_at=_parse_time(started),
                ends_at=_parse_time(ends),
                limit_s=_parse_limit(limit),
                node=node,
            )
        )
    return sorted(jobs, key=lambda job: job.id)


def _parse_time(text: str) -> float | None:
    """Slurm writes N/A, NONE or Unknown for a time that is not known."""
    return float(text) if text.isdecimal() else None


def _parse_limit(text: str) -> float:
    try:
        return parse_time_limit(text)
    except ValueError:
        return float("inf")  # NOT_SET, INVALID, Partition_Limit


def parse_accounting(text: str) -> Mapping[int, str]:
    """The states in sacct's answer to `ACCOUNTING_FORMAT`, by the jobs' numbers. A cancelled job's has who did it."""
    rows = (line.split("|") for line in text.splitlines())
    return {int(row[0]): row[1].split()[0] for row in rows if len(row) == 2 and row[0].isdecimal() and row[1].strip()}


def find_duplicates(jobs: Iterable[SlurmJob]) -> Sequence[SlurmJob]:
    """The jobs that are too many: of those with the same slot that have not ended, all but the first."""
    first: dict[tuple[str, int], int] = {}
    alive = [job for job in jobs if job.phase in (JobPhase.WAITING, JobPhase.THERE)]
    for job in alive:
        first.setdefault((job.mark.request, job.mark.slot), job.id)
    return [job for job in alive if first[job.mark.request, job.mark.slot] != job.id]


def find_notice(job: SlurmJob, now: float, notice_s: float) -> float | None:
    """The job's end, if that is announced: its limit is near, or Slurm has moved its end, as it does for the grace time
    of a preemption. None: it is not."""
    if job.phase is not JobPhase.THERE or job.ends_at is None or job.started_at is None:
        return None
    is_cut_short = job.ends_at < job.started_at + job.limit_s - _CUT_SHORT_S
    return job.ends_at if is_cut_short or job.ends_at <= now + notice_s else None


def describe_end(job: SlurmJob, accounted: str | None = None) -> str:
    """Why the VM is gone. `accounted`: the state that sacct gave for a job that squeue no longer lists."""
    state = job.state if accounted is None else accounted
    name = f"Slurm job {job.id} on {job.node}"
    texts = {
        "BOOT_FAIL": f"its node did not boot ({name})",
        "CANCELLED": f"its job was cancelled ({name})",
        "COMPLETED": f"its agent ended ({name})",
        "FAILED": f"its agent failed ({name}): see {job.id}.log in log_dir",
        "NODE_FAIL": f"its node failed ({name})",
        "OUT_OF_MEMORY": f"its job ran out of memory ({name})",
        "PREEMPTED": f"its job was preempted for another one ({name})",
        "TIMEOUT": f"its job reached its time limit ({name})",
    }
    if state in texts or state in _ENDED:
        return texts.get(state, f"its job ended as {state} ({name})")
    return f"Slurm no longer lists its job, and its accounting does not say why, or not yet ({name})"


def make_pending_refusal(jobs: Sequence[SlurmJob], pending_s: float) -> Refusal:
    """Why these jobs, which wait, count as refused."""
    reasons = ", ".join(dict.fromkeys("no reason given yet" if job.reason == "None" else job.reason for job in jobs))
    if any(_is_hopeless(job) for job in jobs):
        text = f"Slurm will not start {_count(jobs)} ({reasons}): change the settings, or ask who runs the cluster"
        return Refusal(kind=RefusalKind.FAILED, reason=text)
    kind = RefusalKind.QUOTA if all(_LIMITED.search(job.reason) for job in jobs) else RefusalKind.CAPACITY
    return Refusal(kind=kind, reason=f"Slurm has not started {_count(jobs)} within {pending_s:g} s ({reasons})")


def is_refused(job: SlurmJob, now: float, pending_s: float) -> bool:
    """Whether a job waits for something that does not come, or has waited for too long."""
    return job.phase is JobPhase.WAITING and (_is_hopeless(job) or now - job.submitted_at >= pending_s)


def _is_hopeless(job: SlurmJob) -> bool:
    return _NEVER.search(job.reason) is not None


def _count(jobs: Sequence[SlurmJob]) -> str:
    return "a job" if len(jobs) == 1 else f"{len(jobs)} jobs"


_SUBMISSION_ERRORS = (
    (r"Unable to contact slurm controller|Socket timed out|Connection refused", None),
    (r"violates accounting/QOS policy|SubmitLimit|Job limit|limit.*reached|MaxSubmit", RefusalKind.QUOTA),
    (r"temporarily unable to accept job|rate limit|Resource temporarily unavailable", RefusalKind.THROTTLED),
    (r"Requested nodes are busy|required partition not available|Required node not available", RefusalKind.CAPACITY),
)
"""What sbatch says, and what it means; None: Slurm cannot be reached, so that the outcome is not known."""


def parse_submission_error(stderr: str) -> Refusal | None:
    """Why sbatch submitted no job; None: Slurm could not be reached."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = lines[-1] if lines else "sbatch failed without a word"
    for pattern, kind in _SUBMISSION_ERRORS:
        if re.search(pattern, stderr, re.IGNORECASE):
            return None if kind is None else Refusal(kind=kind, reason=text)
    return Refusal(kind=RefusalKind.FAILED, reason=text)
