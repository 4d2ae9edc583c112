"""Has VMs prepare for the jobs that will run there, and follows their progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from varuna_manager.agents.sessions import AgentSession
from varuna_manager.controllers import messages
from varuna_manager.controllers.job_view import DevicePool, LoadedJob, Snapshot
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.preparing import choose_workdir, list_stale_jobs
from varuna_manager.domain.setups import SetupProgress, list_failed_vms
from varuna_manager.domain.states import GenerationKind, VmState
from varuna_proto.plan import Device


class Preparations:
    def __init__(self, rules: Rules, now: Callable[[], float], note_flaw: Callable[[str, Exception], None]) -> None:
        """`note_flaw`: called with a job whose commands cannot be sent, and why."""
        self._rules = rules
        self._note_flaw = note_flaw
        self._now = now
        self._started_at = now()
        self._ready_since: dict[str, float] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Forget the jobs that are over."""
        self._ready_since = {job_id: at for job_id, at in self._ready_since.items() if job_id in job_ids}

    # ------------------------------------------------------------ look

    def ready_s(self, job_id: str, devices: Sequence[Device]) -> float:
        """How long there have been devices on which the job's workdir is ready."""
        if not devices:
            self._ready_since.pop(job_id, None)
            return 0.0
        return self._now() - self._ready_since.setdefault(job_id, self._now())

    def setups_of(self, job: LoadedJob, snapshot: Snapshot, pool: DevicePool) -> SetupProgress:
        ready_on, failed_on = snapshot.readiness.ready.get(job.row.id, {}), frozenset[str]()
        if job.setup_failures and not self._may_get_more_reports(snapshot.vms.values()):
            failed_on = list_failed_vms(job.setup_failures, ready_on)
        return SetupProgress(
            ready_gpus=sum(ready_on.values()),
            missing_gpus=pool.count_unprepared(job.row.id, job.failed_on),
            under_way=len(snapshot.readiness.under_way.get(job.row.id, ())),
            failed_on=failed_on,
            untried=len(snapshot.expected - failed_on),
        )

    def _may_get_more_reports(self, vms: Iterable[VmView]) -> bool:
        """Whether this manager has just started, so that some agents have not reported what is ready on their VMs."""
        now = self._now()
        if now - self._started_at >= self._rules.restart_grace_s + self._rules.suspect_after_s:
            return False
        return any(vm.state is VmState.READY and vm.ready_for_s(now) < self._rules.suspect_after_s for vm in vms)

    # ------------------------------------------------------------ send

    def send_prepare(
        self,
        session: AgentSession,
        vm: VmView,
        jobs: Mapping[str, LoadedJob],
        *,
        planned: Sequence[str],
        running: Collection[str],
        growing: LoadedJob | None,
        is_idle: bool,
    ) -> None:
        """Send what the VM need no longer prepare, and the next thing that it is to prepare.

        Args:
            jobs: all that are not over.
            planned: those whose workdir is to be ready there, the most urgent first.
            running: those with workers there.
            growing: the one for whose workers an idle VM does the imports, so that growing into it costs little.
            is_idle: beside workers only workdirs are made ready: imports would slow them down.
        """
        session.entrusted.update(planned)
        if vm.prepared or vm.setting_up:
            self._send_stale(session, vm, jobs, planned, running)
        if not (planned or is_idle) or not vm.trusted:
            return
        now, sent_at = self._now(), session.prepare_sent_at
        job_id = choose_workdir(vm, planned, {known: now - at for known, at in sent_at.items()}, self._rules)
        if job_id is None and is_idle and growing is not None and _may_warm(vm, growing):
            at = sent_at.get(growing.row.id)
            # Sent again after a while: an agent drops preparations without workers.
            job_id = growing.row.id if at is None or now - at >= self._rules.prepare_again_s else None
        if job_id is not None:
            session.stale_sent -= {job_id}
            session.prepare_sent_at = {known: at for known, at in sent_at.items() if known in jobs} | {job_id: now}
            try:
                session.send(messages.prepare_message(jobs[job_id], is_idle=is_idle))
            except messages.UNSENDABLE as error:
                self._note_flaw(job_id, error)

    def _send_stale(
        self,
        session: AgentSession,
        vm: VmView,
        jobs: Mapping[str, LoadedJob],
        planned: Sequence[str],
        running: Collection[str],
    ) -> None:
        stale = list_stale_jobs(vm, planned, jobs, running)
        if stale and stale != session.stale_sent:
            session.send(messages.keep_message((vm.prepared | vm.setting_up | {*planned, *running}) - stale))
        session.stale_sent = stale


def _may_warm(vm: VmView, job: LoadedJob) -> bool:
    return not vm.setting_up and (job.row.id in vm.prepared or not job.spec.needs_preparing)


def may_grow(job: LoadedJob) -> bool:
    """Whether idle VMs prepare for it. They do not while its generation starts, because imports on the same machine
    (VMs of the local provider) would take processors from it, and it grows after its first step at the earliest."""
    generation = job.view.generation
    if generation is None:
        return False
    starts = generation.kind is GenerationKind.TRAINING and generation.last_step is None
    return not (generation.live and starts)
