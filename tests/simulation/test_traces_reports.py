"""The manager's books of workers, generations, VMs' notices and progress, as reports come in from two VMs.

Reports are numbered, and sent again on every new stream from the oldest that is not acknowledged. So the manager gets
them repeated (the acknowledgement was lost), late (an old stream's are read after the next has opened, DESIGN section
4) and mixed with the other VM's; a lost one comes again on the next stream. Whatever happens of these, the books are
those of the same reports handled once, each when it first came. Reports of one stream cannot overtake each other (TCP).
"""

from __future__ import annotations

from collections import deque

from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sqlalchemy import select

from traces import Store, traces
from varuna_manager.agents.reports import ReportService
from varuna_manager.db.models import CheckpointRow, GenerationRow, JobRow, MetricRow, VmRow, WorkerRow
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb

VMS = ("a", "b")
RANKS = {"a": (0, 1), "b": (2,)}
PICK = strategies.integers(0, 1000)
PLAN = Plan(p=1, d=3, micro_batch=1, global_batch=8, predicted_minibatch_s=1.0, examples_per_s=8.0)
CAUSES = (
    pb.EXIT_CAUSE_FINISHED,
    pb.EXIT_CAUSE_PEER_LOST,
    pb.EXIT_CAUSE_SCRIPT_FAILED,
    pb.EXIT_CAUSE_KILLED,
    pb.EXIT_CAUSE_GENERATION_ENDED,
)


class Outbox:
    """What one VM has to report, and where it is on the way."""

    def __init__(self) -> None:
        self.reports: list[pb.Report] = []
        self.acknowledged = 0
        self.arrived: deque[pb.Report] = deque()
        """Sent on the present stream. The manager will read them if the stream lasts."""
        self.late: deque[pb.Report] = deque()
        """Of streams before: in the manager's memory when the stream broke, and not read yet."""


class Reports(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store.empty()
        database, bell = self.store.database, Bell()
        self.now = 1000.0
        events = EventLog(database, lambda: self.now)
        self.service = ReportService(database, events, PlanningService(), bell, lambda: self.now)
        self.outboxes = {vm_id: Outbox() for vm_id in VMS}
        self.first_came: list[tuple[str, int]] = []
        """VM and number of each report, in the order in which the manager first got them."""
        self.started: set[int] = set()
        self.exited: set[int] = set()
        self.step = 0

    @initialize()
    def launch(self) -> None:
        for job in ("disturbed", "calm"):
            self.store.run(self.store.add(*rows_of(job)))

    # ------------------------------------------------------------ what happens on the VMs

    def send_report(self, vm_id: str, **fact: object) -> None:
        outbox = self.outboxes[vm_id]
        report = pb.Report(number=len(outbox.reports) + 1, **fact)  # type: ignore[arg-type]
        outbox.reports.append(report)
        outbox.arrived.append(report)

    @precondition(lambda self: self.step == 0)
    @rule(rank=strategies.sampled_from([0, 1, 2]))
    def a_worker_is_ready(self, rank: int) -> None:
        if rank not in self.started | self.exited:
            self.started.add(rank)
            fact = pb.WorkerStarted(job_id="disturbed", generation=1, rank=rank, pid=100 + rank, resumed_step=4)
            self.send_report(vm_of(rank), worker_started=fact)

    @precondition(lambda self: self.started == {0, 1, 2} and not self.exited)
    @rule(count=strategies.integers(1, 3), a_first=strategies.booleans())
    def steps_are_done(self, count: int, a_first: bool) -> None:
        done = [pb.StepResult(step=4 + self.step + i, loss=0.5, step_us=10, examples=8) for i in range(1, count + 1)]
        self.step += count
        for vm_id in VMS if a_first else VMS[::-1]:
            self.send_report(vm_id, steps_completed=pb.StepsCompleted(job_id="disturbed", generation=1, steps=done))

    @precondition(lambda self: self.step > 0)
    @rule()
    def a_checkpoint_is_committed(self) -> None:
        fact = pb.CheckpointCommitted(
            job_id="disturbed", generation=1, step=4 + self.step, url="file:///c", total_bytes=9
        )
        self.send_report("a", checkpoint_committed=fact)

    @rule(vm_id=strategies.sampled_from(VMS))
    def notice_is_seen(self, vm_id: str) -> None:
        fact = pb.PreemptionNotice(notice_id=f"n-{len(self.outboxes[vm_id].reports)}", seconds_left=30.0, source="test")
        self.send_report(vm_id, preemption_notice=fact)

    @rule(rank=strategies.sampled_from([0, 1, 2]), cause=strategies.sampled_from(CAUSES))
    def a_worker_ends(self, rank: int, cause: pb.ExitCause.ValueType) -> None:
        if rank not in self.exited:
            self.exited.add(rank)
            end = {"cause": cause, "exit_code": 3, "error_text": "x"}
            fact = pb.WorkerExited(job_id="disturbed", generation=1, rank=rank, **end)  # type: ignore[arg-type]
            self.send_report(vm_of(rank), worker_exited=fact)

    @rule(vm_id=strategies.sampled_from(VMS))
    def a_launch_is_refused(self, vm_id: str) -> None:
        if not self.started & set(RANKS[vm_id]):
            self.exited |= set(RANKS[vm_id])
            self.send_report(vm_id, command_refused=pb.CommandRefused(job_id="disturbed", generation=1, reason="no"))

    # ------------------------------------------------------------ what happens on the way

    @rule(vm_id=strategies.sampled_from(VMS), unread=strategies.integers(0, 4))
    def the_stream_breaks(self, vm_id: str, unread: int) -> None:
        """The manager has `unread` reports in its memory; what else is under way is lost. The agent dials again."""
        outbox = self.outboxes[vm_id]
        outbox.late.extend(list(outbox.arrived)[:unread])
        outbox.arrived = deque(outbox.reports[outbox.acknowledged :])

    @rule(vm_id=strategies.sampled_from(VMS), most=strategies.integers(1, 5), late=strategies.booleans())
    def the_manager_stores(self, vm_id: str, most: int, late: bool) -> None:
        waiting = self.outboxes[vm_id].late if late else self.outboxes[vm_id].arrived
        batch = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        self.apply(vm_id, batch)

    @rule(vm_id=strategies.sampled_from(VMS))
    def the_acknowledgement_arrives(self, vm_id: str) -> None:
        stored = [number for at, number in self.first_came if at == vm_id]
        self.outboxes[vm_id].acknowledged = max(stored, default=0)

    def apply(self, vm_id: str, batch: list[pb.Report]) -> None:
        if not batch:
            return
        self.now += 1.0
        self.store.run(self.service.apply_reports(vm_id, batch))
        known = {number for at, number in self.first_came if at == vm_id}
        for report in batch:
            if report.number not in known:
                known.add(report.number)
                self.first_came.append((vm_id, report.number))
                # The calm job has it now, and never again.
                once = pb.Report()
                once.CopyFrom(report)
                fact = getattr(once, str(once.WhichOneof("fact")))
                if hasattr(fact, "job_id"):
                    fact.job_id = "calm"
                self.store.run(self.service.apply_reports(f"{vm_id}-calm", [once]))

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        for vm_id, outbox in self.outboxes.items():
            self.apply(vm_id, list(outbox.arrived))
            self.apply(vm_id, outbox.reports[outbox.acknowledged :])
            self.apply(vm_id, list(outbox.late))
            numbers = [number for at, number in self.first_came if at == vm_id]
            assert numbers == list(range(1, len(outbox.reports) + 1)), "lost, or first received out of order"
        disturbed, calm = self.store.run(self.books("disturbed")), self.store.run(self.books("calm"))
        assert disturbed == calm
        stopped = {rank for rank, worker in disturbed["workers"].items() if worker[0] == "exited"}
        assert stopped == self.exited

    async def books(self, job_id: str) -> dict[str, dict[object, tuple[object, ...]]]:
        suffix = "" if job_id == "disturbed" else "-calm"
        async with self.store.database.read() as session:
            workers = await session.scalars(select(WorkerRow).where(WorkerRow.job_id == job_id))
            generation = (await session.scalars(select(GenerationRow).where(GenerationRow.job_id == job_id))).one()
            metrics = await session.scalars(select(MetricRow).where(MetricRow.job_id == job_id))
            checkpoints = await session.scalars(select(CheckpointRow).where(CheckpointRow.job_id == job_id))
            vms = [await session.get_one(VmRow, f"{vm_id}{suffix}") for vm_id in VMS]
            g = generation
            return {
                "workers": {
                    w.rank: (w.state, w.cause, w.exit_code, w.error_text, w.pid, w.resumed_step, w.stopped_at)
                    for w in workers
                },
                "generation": {
                    1: (g.state, g.resumed_step, g.last_step, g.last_loss, g.last_step_at, g.started_at, g.steps_redone)
                },
                "metrics": {m.step: (m.loss, m.step_s, m.examples, m.generation) for m in metrics},
                "checkpoints": {c.step: (c.generation, c.url, c.total_bytes, c.at) for c in checkpoints},
                "vms": {vm.id.removesuffix("-calm"): (vm.state, vm.notice_id, vm.notice_deadline) for vm in vms},
            }


def vm_of(rank: int) -> str:
    return next(vm_id for vm_id, ranks in RANKS.items() if rank in ranks)


def rows_of(job_id: str) -> tuple[JobRow | GenerationRow | VmRow | WorkerRow, ...]:
    """A job whose first generation is launched on both VMs."""
    suffix = "" if job_id == "disturbed" else "-calm"
    vms = [VmRow(id=f"{vm}{suffix}", provider="t", state="ready", gpus=2, ref={}, created_at=1.0) for vm in VMS]
    job = JobRow(id=job_id, name=job_id, spec={}, state="running", created_at=1.0)
    generation = GenerationRow(
        job_id=job_id,
        number=1,
        kind="training",
        state="launching",
        plan=PLAN.to_document(),
        candidates=[],
        rendezvous_host="h",
        rendezvous_port=1,
        reason="test",
        created_at=2.0,
    )
    workers = [
        WorkerRow(job_id=job_id, generation=1, rank=rank, vm_id=f"{vm}{suffix}", local_rank=i, state="assigned")
        for vm, ranks in RANKS.items()
        for i, rank in enumerate(ranks)
    ]
    return (*vms, job, generation, *workers)


class TestReports(Reports.TestCase):  # type: ignore[valid-type]
    settings = traces(40, steps=30)

    @classmethod
    def tearDownClass(cls) -> None:
        Store.close()
