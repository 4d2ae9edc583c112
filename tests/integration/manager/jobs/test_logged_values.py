"""What scripts log: which value counts, what a morph does to it, and how much of it the store keeps."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from rest_world import generation, worker
from varuna_manager.agents.reports import ReportService
from varuna_manager.db.engine import Database
from varuna_manager.domain.spec import JobSpec
from varuna_manager.history.logged_values import LoggedValues
from varuna_manager.jobs import logged_values
from varuna_manager.jobs.jobs import JobService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_proto.bounds import MOST_LOGGED_NAMES
from varuna_proto.v1 import agent_pb2 as pb

Logged = tuple[int, float]


class LoggingJob:
    """A job with two generations, the second from step 4 on, each with ranks 0 and 1."""

    def __init__(self, database: Database) -> None:
        self.id = ""
        self._database = database
        events = EventLog(database)
        self._jobs = JobService(database, events, Bell())
        self._reports = ReportService(database, events, PlanningService(), Bell())
        self._values = LoggedValues(database)

    async def start(self) -> None:
        spec = JobSpec(name="train", workdir="/w", run="true", global_batch=8)
        self.id = (await self._jobs.submit_job(spec, None))["id"]
        rows = [generation(self.id, 1, 10.0, resumed_step=0), generation(self.id, 2, 20.0, resumed_step=4)]
        ranks = [worker(self.id, number, rank, f"vm-{rank}", "running") for number in (1, 2) for rank in (0, 1)]
        async with self._database.write() as session:
            session.add_all([*rows, *ranks])

    async def report(self, number: int, values: Sequence[Logged], *, name: str = "accuracy", rank: int = 0) -> None:
        await self.send(
            number, [pb.LoggedValue(name=name, step=step, value=value, rank=rank) for step, value in values]
        )

    async def send(self, number: int, values: Sequence[pb.LoggedValue]) -> None:
        fact = pb.ValuesLogged(job_id=self.id, generation=number, values=values)
        vm_id = f"vm-{values[0].rank}"
        for _ in range(2):  # its acknowledgement was lost
            await self._reports.apply_reports(vm_id, [pb.Report(number=1, values_logged=fact)])

    async def read(
        self, names: Collection[str] | None = None, points: int = 10_000, after_step: int | None = None
    ) -> dict[str, list[Logged]]:
        found = await self._values.read_series("train", names, points=points, after_step=after_step)
        return {one["name"]: list(zip(one["step"], one["value"], strict=True)) for one in found}


@pytest.fixture
async def job(database: Database) -> LoggingJob:
    job = LoggingJob(database)
    await job.start()
    return job


async def test_of_several_ranks_the_lowest_counts_and_of_its_calls_the_last(job: LoggingJob) -> None:
    assert await job.read() == {}
    await job.report(1, [(2, 0.1)], rank=1)
    await job.report(1, [(2, 0.2)], rank=0)
    await job.report(1, [(2, 0.3), (3, 0.4)], rank=1)
    await job.report(1, [(2, 0.5)], rank=0)
    assert await job.read() == {"accuracy": [(2, 0.5), (3, 0.4)]}


async def test_a_step_that_is_done_again_replaces_its_value(job: LoggingJob) -> None:
    await job.report(1, [(0, 0.0), (4, 0.4), (5, 0.5), (6, 0.6), (9, 0.9)])
    await job.report(1, [(6, 6.0)], name="f1")
    await job.report(2, [(6, 6.6)], rank=1)  # it does step 5 again, too, and logs nothing there
    await job.report(1, [(6, 0.1)])  # a late report
    assert await job.read() == {"accuracy": [(0, 0.0), (4, 0.4), (6, 6.6), (9, 0.9)], "f1": [(6, 6.0)]}


async def test_names_are_bounded(job: LoggingJob) -> None:
    for number in range(MOST_LOGGED_NAMES + 3):
        await job.report(1, [(1, 1.0)], name=f"name {number:03}")
    assert list(await job.read()) == [f"name {number:03}" for number in range(MOST_LOGGED_NAMES)]


async def test_a_long_curve_is_thinned_and_keeps_its_ends(job: LoggingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_values, "MOST_POINTS", 64)
    drawn = random.Random(1)
    for first in range(1, 1000, 37):
        steps = sorted(drawn.sample(range(first, first + 37), 20))
        await job.report(1, [(step, step / 2) for step in steps])
        stored = (await job.read())["accuracy"]
        assert len(stored) <= 64
        assert stored[-1][0] == steps[-1], "the newest stays"
        assert all(value == step / 2 for step, value in stored)
    assert stored[0][0] < 100, "the beginning of the curve stays"
    few = (await job.read(points=5))["accuracy"]
    assert len(few) == 5
    assert few[-1] == stored[-1]
    assert (await job.read(["accuracy"], after_step=stored[-3][0]))["accuracy"] == stored[-2:]
    assert await job.read(["other"]) == {}


async def test_values_that_cannot_be_stored_take_no_others_with_them(job: LoggingJob) -> None:
    await job.send(
        1,
        [
            pb.LoggedValue(name="nan", step=1, value=float("nan")),
            pb.LoggedValue(name="", step=1, value=1.0),
            pb.LoggedValue(name="n\0ul", step=1, value=1.0),
            pb.LoggedValue(name="late", step=10**12, value=1.0),
            pb.LoggedValue(name="x" * 300, step=1, value=1.0),
            pb.LoggedValue(name="good", step=1, value=1.0),
        ],
    )
    assert await job.read() == {"good": [(1, 1.0)]}
