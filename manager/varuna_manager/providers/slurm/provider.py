"""VMs that are jobs of a Slurm cluster. Each job has one node, or a part of one.

Slurm's controller is asked by its command line tools, with one squeue for the whole fleet every `list_every_s`. A job
that waits in Slurm's queue is no VM yet. `create` waits for it, and cancels it when it has waited for too long.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import (
    CreatedVms,
    ProviderNotice,
    ProviderRefusedError,
    ProviderVm,
    UnknownVmError,
    UnsupportedByProviderError,
    VmOffer,
)
from varuna_manager.providers.slurm.commands import SlurmCommands, ToolAnswer
from varuna_manager.providers.slurm.job_script import make_sbatch_options
from varuna_manager.providers.slurm.jobs import (
    ACCOUNTING_FORMAT,
    QUEUE_FORMAT,
    JobMark,
    JobPhase,
    SlurmJob,
    describe_end,
    find_duplicates,
    find_notice,
    is_refused,
    make_pending_refusal,
    parse_accounting,
    parse_jobs,
    parse_submission_error,
)
from varuna_manager.providers.slurm.settings import SlurmSettings

__all__ = ["MakeScript", "SlurmProvider"]

_AT_ONCE = 4
"""Most submissions at the same time."""
_REMEMBERED_S = 600.0
"""How long a job that squeue no longer lists is listed as ended."""
_GIB = 1 << 30

MakeScript = Callable[[str], Awaitable[str]]
"""Makes the job's script for a VM of this name; it contains the VM's join token."""


class SlurmProvider:
    """See the module's docstring."""

    name = "slurm"
    is_elastic = True

    def __init__(
        self,
        settings: SlurmSettings,
        commands: SlurmCommands,
        make_script: MakeScript,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._commands = commands
        self._make_script = make_script
        self._now = now
        self._log_dir = settings.log_dir.expanduser().absolute()
        self._lock = asyncio.Lock()
        self._jobs: Sequence[SlurmJob] = ()
        """As of the newest listing, without those that are listed twice."""
        self._listed_at = -float("inf")
        self._changes = 0
        """Submissions and cancellations that have ended."""
        self._vanished: dict[int, tuple[SlurmJob, str, float]] = {}
        """Jobs that squeue has forgotten, the state that sacct gave ('': none), and when that was noticed."""
        self._deleted: set[int] = set()
        self._awaited: Counter[str] = Counter()
        """Requests whose `create` waits for their jobs."""
        self._log = structlog.get_logger("varuna.slurm").bind(fleet=settings.fleet)

    # ------------------------------------------------------------ listing

    async def list(self) -> Sequence[ProviderVm]:
        """The jobs that have a node, as of `list_every_s` ago at most, and those that have ended by themselves. Raises
        ProviderRefusedError."""
        jobs = await self._refresh_jobs(self._settings.list_every_s)
        await self._cancel_forgotten(jobs)
        listed = [self._make_vm(job) for job in jobs if job.phase in (JobPhase.THERE, JobPhase.COMPLETING)]
        ended = [(job, describe_end(job)) for job in jobs if job.phase is JobPhase.ENDED and job.had_node]
        ended += [(job, describe_end(job, state)) for job, state, _ in self._vanished.values()]
        return [*listed, *(self._make_vm(job, text) for job, text in ended if job.id not in self._deleted)]

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """Of jobs whose time limit is near, or whose end Slurm has moved, because it preempts them with grace."""
        jobs = await self._refresh_jobs(self._settings.list_every_s)
        now, notice_s = self._now(), self._settings.notice_s
        ends = {job: find_notice(job, now, notice_s) for job in jobs if job.id not in self._deleted}
        return [
            ProviderNotice(id=f"slurm-{job.id}", vm_id=job.mark.vm_id, deadline_unix_s=end)
            for job, end in ends.items()
            if end is not None
        ]

    async def get_offer(self) -> VmOffer:
        settings = self._settings
        return VmOffer(
            gpus=settings.gpus,
            price_per_hour=settings.price_per_hour,
            device_memory_bytes=self._memory_bytes,
            gpu_type=settings.gpu_type,
        )

    @property
    def _memory_bytes(self) -> int | None:
        memory_gib = self._settings.device_memory_gib
        return None if memory_gib is None else int(memory_gib * _GIB)

    def _make_vm(self, job: SlurmJob, ended: str | None = None) -> ProviderVm:
        return ProviderVm(
            id=job.mark.vm_id,
            gpus=self._settings.gpus,
            device_memory_bytes=self._memory_bytes,
            host="",  # its agent reports it
            created_at=job.started_at or job.submitted_at,
            ref={"job": job.id, "node": job.node},
            request=job.mark.request,
            price_per_hour=self._settings.price_per_hour,
            reason_before_hello=f"its agent is starting (Slurm job {job.id} on {job.node})",
            going=ended is None and job.id in self._deleted,
            ended=ended,
        )

    async def _refresh_jobs(self, age_s: float = 0.0) -> Sequence[SlurmJob]:
        """The jobs, as they were at most so long ago. Raises ProviderRefusedError."""
        async with self._lock:
            if self._now() - self._listed_at < age_s:
                return self._jobs
            asked_at, changes = self._now(), self._changes
            squeue = ["squeue", "--noheader", "--me", "--states=all", f"--format={QUEUE_FORMAT}"]
            text = await self._commands.ask_tool(squeue)
            try:
                jobs = parse_jobs(text, self._settings.fleet)
            except ValueError as error:
                raise ProviderRefusedError(f"squeue's answer cannot be read: {error}") from error
            duplicates = find_duplicates(jobs)
            if duplicates:
                self._log.warning("jobs were submitted twice, and are cancelled", jobs=[job.id for job in duplicates])
                await self._cancel_jobs([job.id for job in duplicates])
            await self._note_vanished({job.id for job in jobs})
            twice = {job.id for job in duplicates}
            self._deleted = (self._deleted | twice) & ({job.id for job in jobs} | self._vanished.keys())
            self._jobs = [job for job in jobs if job.id not in twice]
            self._listed_at = asked_at if changes == self._changes else -float("inf")
            return self._jobs

    async def _note_vanished(self, listed: Collection[int]) -> None:
        """Slurm's controller forgets jobs that are over (MinJobAge); its accounting, where there is one, remembers."""
        now = self._now()
        self._vanished = {number: entry for number, entry in self._vanished.items() if now - entry[2] < _REMEMBERED_S}
        alive = (JobPhase.THERE, JobPhase.COMPLETING)
        vanished = [job for job in self._jobs if job.phase in alive and job.id not in listed]
        vanished = [job for job in vanished if job.id not in self._vanished]
        if not vanished:
            return
        numbers = ",".join(str(job.id) for job in vanished)
        sacct = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={numbers}"]
        try:
            states = parse_accounting(await self._commands.ask_tool([*sacct, f"--format={ACCOUNTING_FORMAT}"]))
        except ProviderRefusedError as error:
            self._log.info("accounting does not say how jobs ended", jobs=numbers, reason=str(error))
            states = {}
        self._vanished |= {job.id: (job, states.get(job.id, ""), now) for job in vanished}

    async def _cancel_forgotten(self, jobs: Sequence[SlurmJob]) -> None:
        """Cancel jobs that have waited for too long, and for which nobody waits: their manager was killed."""
        now, pending_s = self._now(), self._settings.pending_s
        late = [job for job in jobs if is_refused(job, now, pending_s) and not self._awaited[job.mark.request]]
        if late:
            await self._cancel_jobs([job.id for job in late], only_waiting=True)

    # ------------------------------------------------------------ creation

    async def create(self, count: int, request: str) -> CreatedVms:
        """Submit what is missing, and wait until no job of the request is pending. Raises ProviderRefusedError."""
        self._awaited[request] += 1
        try:
            jobs = await self._refresh_jobs()
            refusal = await self._submit_missing(count, request, jobs)
            waited = await self._wait_started(request)
        finally:
            self._awaited[request] -= 1
        made = [job for job in await self._refresh_jobs() if job.mark.request == request and self._is_vm(job)]
        vms = tuple(self._make_vm(job) for job in made)
        if len(made) >= count:
            return CreatedVms(vms=vms)
        text = f"{count - len(made)} of {count} jobs ended before their VMs were there"
        return CreatedVms(vms=vms, refusal=refusal or waited or Refusal(kind=RefusalKind.FAILED, reason=text))

    def _is_vm(self, job: SlurmJob) -> bool:
        return job.phase is JobPhase.THERE and job.id not in self._deleted

    async def _submit_missing(self, count: int, request: str, jobs: Sequence[SlurmJob]) -> Refusal | None:
        """Submit a job for each slot that has none. Returns why one was refused."""
        alive = (JobPhase.WAITING, JobPhase.THERE)
        taken = {
            job.mark.slot
            for job in jobs
            if job.mark.request == request and job.phase in alive and job.id not in self._deleted
        }
        free = [slot for slot in range(count + len(taken)) if slot not in taken][: max(count - len(taken), 0)]
        if free:
            await asyncio.to_thread(self._log_dir.mkdir, mode=0o700, parents=True, exist_ok=True)
        for start in range(0, len(free), _AT_ONCE):
            submissions = [self._submit_job(request, slot) for slot in free[start : start + _AT_ONCE]]
            outcomes = await asyncio.gather(*submissions, return_exceptions=True)
            for outcome in outcomes:  # all have ended: none goes on when one has failed
                if isinstance(outcome, BaseException):
                    raise outcome
            refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
            if refusals:
                return refusals[0]
        return None

    async def _submit_job(self, request: str, slot: int) -> Refusal | None:
        fleet = self._settings.fleet
        vm_id = f"{fleet}-{request[:8]}-{slot}-{secrets.token_hex(3)}"  # another one each time, as its token is
        mark = JobMark(fleet=fleet, request=request, slot=slot, vm_id=vm_id)
        script = await self._make_script(vm_id)
        answer = await self._change_jobs(
            ["sbatch", *make_sbatch_options(self._settings, mark, self._log_dir)], text=script
        )
        if not answer.code:
            self._log.info("a job was submitted", vm=vm_id, job=answer.output.strip().partition(";")[0])
            return None
        refusal = parse_submission_error(answer.errors)
        if refusal is None:
            raise ProviderRefusedError(f"sbatch: {answer.trouble}")
        return refusal

    async def _wait_started(self, request: str) -> Refusal | None:
        """Wait until all jobs of the request have started or ended; those that wait for too long are cancelled. Returns
        why they waited."""
        pending_s = self._settings.pending_s
        while True:
            jobs = await self._refresh_jobs(self._settings.list_every_s)
            waiting = [job for job in jobs if job.mark.request == request and job.phase is JobPhase.WAITING]
            late = [job for job in waiting if is_refused(job, self._now(), pending_s)]
            if late:
                await self._cancel_jobs([job.id for job in waiting], only_waiting=True)
                await self._refresh_jobs()
                return make_pending_refusal(late, pending_s)
            if not waiting:
                return None
            await asyncio.sleep(min(self._settings.list_every_s, 1.0))

    # ------------------------------------------------------------ deletion

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Cancel their jobs. Raises ProviderRefusedError."""
        wanted = set(vm_ids)
        if not wanted:
            return
        jobs = [job for job in await self._refresh_jobs() if job.mark.vm_id in wanted]
        jobs = [job for job in jobs if job.id not in self._deleted]
        alive = [job.id for job in jobs if job.phase is not JobPhase.ENDED]
        if alive:
            await self._cancel_jobs(alive)
        vanished = [number for number, (job, _, _) in self._vanished.items() if job.mark.vm_id in wanted]
        self._deleted.update([*(job.id for job in jobs), *vanished])

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Cancel its job, as if it had been taken. With notice, only Slurm itself can."""
        if notice_s:
            raise UnsupportedByProviderError("Slurm gives notice by itself, in partitions with GraceTime: give none")
        job = next((job for job in await self._refresh_jobs() if job.mark.vm_id == vm_id and self._is_vm(job)), None)
        if job is None:
            raise UnknownVmError(f"Slurm has no job of VM {vm_id!r}")
        await self._cancel_jobs([job.id])

    async def _cancel_jobs(self, numbers: Sequence[int], *, only_waiting: bool = False) -> None:
        """`only_waiting`: not those that have started meanwhile. Raises ProviderRefusedError."""
        states = ["--state=PENDING"] if only_waiting else []
        answer = await self._change_jobs(["scancel", *states, *map(str, numbers)])
        if answer.code and "Invalid job id" not in answer.errors and "completing" not in answer.errors:
            raise ProviderRefusedError(f"scancel: {answer.trouble}")

    async def _change_jobs(self, command: Sequence[str], *, text: str = "") -> ToolAnswer:
        """Run a tool, after which no list is new that was begun before it ended. Raises ProviderRefusedError."""
        try:
            return await self._commands.run_tool(command, text=text)
        finally:
            self._changes += 1
            self._listed_at = -float("inf")

    async def close(self, *, end_vms: bool) -> None:
        """The jobs stay, whatever `end_vms` is, because they are not processes of this machine."""
