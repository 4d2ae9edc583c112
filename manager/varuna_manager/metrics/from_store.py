"""Metrics that a leader reads from the store at each scrape, so that restarts and new leaders do not reset them.

Jobs that are over are only counted by state. At most JOBS_SHOWN other jobs have metrics of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import CheckpointRow, FleetRow, GenerationRow, JobProgressRow, JobRow, MetricRow, VmRow
from varuna_manager.domain.accounting import TimeOfJob, account_time, list_pauses
from varuna_manager.domain.states import TERMINAL_JOB_STATES, GenerationKind, GenerationState, JobState, VmState
from varuna_manager.history.generation_times import GenerationTimesCache
from varuna_manager.jobs.jobs import IS_KEPT
from varuna_manager.metrics.family import COUNTER, MetricFamily
from varuna_manager.world.reading import IS_LIVE, NOT_GONE

JOBS_SHOWN = 100


_JOB = ("job_name",)
"""Not `job`, which Prometheus uses for the name of the scrape configuration."""
STORE_FAMILIES = (
    MetricFamily("varuna_store_up", "Whether the store answered this scrape (1); if not (0), its metrics are missing."),
    MetricFamily("varuna_agents_connected", "Agents connected to this manager; all agents connect to the leader."),
    MetricFamily(
        "varuna_agent_certificate_days_left",
        "Days until the first certificate of a connected agent expires; agents renew theirs before the last third of "
        "its lifetime (--agent-certificate-ttl-s). Missing without --secure.",
    ),
    MetricFamily("varuna_vms", "VMs by state, without those that are gone.", ("state",)),
    MetricFamily(
        "varuna_vms_wanted",
        "VMs that the fleet should have, if that is a fixed number (--vms). Missing with --max-vms, where it follows "
        "the jobs.",
    ),
    MetricFamily("varuna_vms_quarantined", "VMs in quarantine."),
    MetricFamily("varuna_gpus", "GPUs of ready VMs."),
    MetricFamily(
        "varuna_price_per_hour", "Price of all VMs that are not gone, in the provider's currency, if it has prices."
    ),
    MetricFamily("varuna_pool_vms", "VMs of each pool, without those that are gone.", ("pool",)),
    MetricFamily("varuna_pool_price_per_hour", "Price of all VMs of a pool that are not gone.", ("pool",)),
    MetricFamily("varuna_jobs", "Jobs by state, as long as they are kept.", ("state",)),
    MetricFamily(
        "varuna_jobs_not_shown",
        f"Jobs that are not over and have no metrics of their own: all but the {JOBS_SHOWN} oldest.",
    ),
    MetricFamily("varuna_job_step", "Newest completed step of a job.", _JOB),
    MetricFamily("varuna_job_loss", "Loss of that step.", _JOB),
    MetricFamily(
        "varuna_job_step_age_seconds",
        "Time since a job's newest step, or since its start or last retry before the next one.",
        _JOB,
    ),
    MetricFamily("varuna_job_useful_steps", "Completed steps of a job, each counted once.", _JOB, COUNTER),
    MetricFamily("varuna_job_examples", "Training examples of a job's useful steps.", _JOB, COUNTER),
    MetricFamily(
        "varuna_job_useful_seconds",
        "Sum of a job's step times, each step counted once, without what lies between steps.",
        _JOB,
        COUNTER,
    ),
    MetricFamily(
        "varuna_job_between_steps_seconds",
        "Time that a job's script spent between useful steps: data, evaluation, checkpoints, all else.",
        _JOB,
        COUNTER,
    ),
    MetricFamily(
        "varuna_job_stalled_seconds", "Time of a job without progress, at its start and its morphs.", _JOB, COUNTER
    ),
    MetricFamily("varuna_job_redone_steps", "Steps of a job that were computed again after morphs.", _JOB, COUNTER),
    MetricFamily("varuna_job_generations", "Generations of a job; each new one is a morph.", _JOB, COUNTER),
    MetricFamily(
        "varuna_job_elapsed_seconds", "Time since a job's first start, without that from its ends to its retries.", _JOB
    ),
    MetricFamily(
        "varuna_job_goodput_ratio",
        "Fraction of a job's elapsed time that passed in steps that count; `varuna show` has the same.",
        _JOB,
    ),
    MetricFamily("varuna_job_gpus", "GPUs that a job trains on; 0 while it has no generation.", _JOB),
    MetricFamily("varuna_job_stages", "Pipeline stages (P) of a job's newest generation.", _JOB),
    MetricFamily("varuna_job_replicas", "Replicas (D) of a job's newest generation.", _JOB),
    MetricFamily(
        "varuna_job_predicted_examples_per_second", "Rate that the planner predicted for the newest generation.", _JOB
    ),
    MetricFamily(
        "varuna_job_checkpoint_age_seconds",
        "Time since a job's newest checkpoint was committed, or since its start or last retry before the next one.",
        _JOB,
    ),
    MetricFamily("varuna_job_checkpoint_step", "Step of a job's newest checkpoint.", _JOB),
    MetricFamily("varuna_job_checkpoint_bytes", "Size of a job's newest checkpoint.", _JOB),
)
_NAMES = {family.name: family for family in STORE_FAMILIES}


class StoreSamples:
    """Samples of STORE_FAMILIES, in the form that prometheus_client writes."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add_sample(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample, unless the value is None."""
        if value is not None:
            if name not in self._metrics:
                family = _NAMES[name]
                kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
                self._metrics[name] = kind(name, family.help, labels=family.labels)
            metric: Any = self._metrics[name]
            metric.add_metric(labels, float(value))  # sums of integers are decimals in PostgreSQL

    def collect(self) -> Iterable[Metric]:
        return self._metrics.values()


@dataclass(kw_only=True)
class _CompletedSteps:
    """Sums over a job's steps up to `step`, each counted once."""

    step: int = 0
    count: int = 0
    examples: int = 0
    seconds: float = 0.0
    between_s: float = 0.0


class StoreMetrics:
    """Collects the samples of STORE_FAMILIES. It keeps its sums, so that it reads each step of a job once."""

    def __init__(self, database: Database, provider: str, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._provider = provider
        self._now = now
        self._done: dict[str, _CompletedSteps] = {}
        self._generations: dict[str, GenerationTimesCache] = {}

    async def check_store(self) -> None:
        """Raises StoreAwayError if the store does not answer."""
        async with self._database.read() as session:
            await session.execute(select(1))

    async def collect_samples(self, samples: StoreSamples) -> None:
        """Raises StoreAwayError."""
        async with self._database.read() as session:
            await self._fleet(session, samples)
            counted = select(JobRow.state, func.count()).where(IS_KEPT).group_by(JobRow.state)
            by_state = dict((await session.execute(counted)).all())
            for state in JobState:
                samples.add_sample("varuna_jobs", by_state.get(state.value, 0), state.value)
            live = sum(count for state, count in by_state.items() if state not in TERMINAL_JOB_STATES)
            samples.add_sample("varuna_jobs_not_shown", max(live - JOBS_SHOWN, 0))
            await self._jobs(session, samples)

    async def _fleet(self, session: AsyncSession, samples: StoreSamples) -> None:
        query = select(VmRow.state, func.count(), func.sum(VmRow.gpus), func.sum(VmRow.price_per_hour))
        rows = (await session.execute(query.where(NOT_GONE).group_by(VmRow.state))).all()
        by_state = {state: (count, gpus, price) for state, count, gpus, price in rows}
        for state in VmState:
            if state is not VmState.GONE:
                samples.add_sample("varuna_vms", by_state.get(state.value, (0, 0, 0))[0], state.value)
        samples.add_sample("varuna_gpus", by_state.get(VmState.READY.value, (0, 0, 0))[1])
        prices = [price for _, _, price in by_state.values() if price is not None]
        samples.add_sample("varuna_price_per_hour", sum(prices) if prices else None)
        of_pools = select(VmRow.pool, func.count(), func.sum(VmRow.price_per_hour)).group_by(VmRow.pool)
        for pool, count, price in await session.execute(of_pools.where(NOT_GONE, VmRow.pool.is_not(None))):
            samples.add_sample("varuna_pool_vms", count, str(pool))
            samples.add_sample("varuna_pool_price_per_hour", price, str(pool))
        in_quarantine = (NOT_GONE, VmRow.quarantined_until > self._now())
        samples.add_sample("varuna_vms_quarantined", await session.scalar(select(func.count()).where(*in_quarantine)))
        fleet = await session.get(FleetRow, self._provider)
        if fleet is not None and fleet.max_vms is None:
            samples.add_sample("varuna_vms_wanted", fleet.target)

    # ------------------------------------------------------------ jobs that are not over

    async def _jobs(self, session: AsyncSession, samples: StoreSamples) -> None:
        row = JobRow
        query = select(row.id, row.name, row.created_at, row.started_at, row.retried_at, row.history).where(IS_LIVE)
        jobs = (await session.execute(query.order_by(JobRow.created_at, JobRow.id).limit(JOBS_SHOWN))).all()
        names = {job.id: job.name for job in jobs}
        self._done = {job_id: done for job_id, done in self._done.items() if job_id in names}
        self._generations = {job_id: cache for job_id, cache in self._generations.items() if job_id in names}
        for job in jobs:
            await self._progress(session, samples, job.id, job.name)
            if job.started_at is not None:
                spent = await self._account_time(session, job)
                samples.add_sample("varuna_job_elapsed_seconds", spent.elapsed_s, job.name)
                samples.add_sample("varuna_job_goodput_ratio", spent.goodput, job.name)
        last_steps = await _generations(session, samples, names)
        for job in jobs:
            since = _after_retry(job, last_steps.get(job.id) or job.started_at or job.created_at)
            samples.add_sample("varuna_job_step_age_seconds", max(self._now() - since, 0.0), job.name)
        saved_at = await _checkpoints(session, samples, names)
        for job in jobs:
            saved_or_started = saved_at.get(job.id, job.started_at)
            if saved_or_started is not None:
                age_s = max(self._now() - _after_retry(job, saved_or_started), 0.0)
                samples.add_sample("varuna_job_checkpoint_age_seconds", age_s, job.name)

    async def _account_time(self, session: AsyncSession, job: Any) -> TimeOfJob:
        now = self._now()
        times = await self._generations.setdefault(job.id, GenerationTimesCache()).read_times(session, job.id, now)
        return account_time(job.created_at, now, times, list_pauses(job.history))

    async def _progress(self, session: AsyncSession, samples: StoreSamples, job_id: str, name: str) -> None:
        done = self._done.setdefault(job_id, _CompletedSteps())
        row = MetricRow
        sums = (func.sum(row.examples), func.sum(row.step_s), func.sum(row.between_s))
        query = select(func.count(), *sums, func.max(row.step))
        new = (await session.execute(query.where(row.job_id == job_id, row.step > done.step))).one()
        if new[0]:
            done.count, done.examples = done.count + new[0], done.examples + int(new[1])
            done.seconds, done.between_s = done.seconds + float(new[2] - new[3]), done.between_s + float(new[3])
            done.step = new[4]
        samples.add_sample("varuna_job_useful_steps", done.count, name)
        samples.add_sample("varuna_job_examples", done.examples, name)
        samples.add_sample("varuna_job_useful_seconds", done.seconds, name)
        samples.add_sample("varuna_job_between_steps_seconds", done.between_s, name)


def _after_retry(job: Any, at: float) -> float:
    """`at`, or the job's last retry if that is later, because the job did not run before it."""
    return at if job.retried_at is None else max(at, job.retried_at)


async def _generations(session: AsyncSession, samples: StoreSamples, names: dict[str, str]) -> dict[str, float | None]:
    """When each job last completed a step."""
    last_steps: dict[str, float | None] = {}
    for row in await session.scalars(select(JobProgressRow).where(JobProgressRow.job_id.in_(names))):
        name = names[row.job_id]
        samples.add_sample("varuna_job_generations", row.newest, name)
        samples.add_sample("varuna_job_stalled_seconds", row.stalled_s, name)
        samples.add_sample("varuna_job_redone_steps", row.steps_redone, name)
        samples.add_sample("varuna_job_step", row.step or None, name)
        last_steps[row.job_id] = row.step_at or None
    for generation in await _newest(session, list(names)):
        _shape(samples, generation, names[generation.job_id])
    return last_steps


async def _checkpoints(session: AsyncSession, samples: StoreSamples, names: dict[str, str]) -> dict[str, float]:
    """When each job's newest checkpoint was committed."""
    saved_at: dict[str, float] = {}
    row = CheckpointRow
    newest = select(row.job_id, func.max(row.at).label("at")).where(row.job_id.in_(names)).group_by(row.job_id)
    last = newest.subquery()
    query = select(row.job_id, row.at, func.max(row.step), func.max(row.total_bytes))
    query = query.join(last, (row.job_id == last.c.job_id) & (row.at == last.c.at)).group_by(row.job_id, row.at)
    for job_id, at, step, total_bytes in await session.execute(query):
        saved_at[job_id] = at
        samples.add_sample("varuna_job_checkpoint_step", step, names[job_id])
        samples.add_sample("varuna_job_checkpoint_bytes", total_bytes, names[job_id])
    return saved_at


async def _newest(session: AsyncSession, job_ids: Sequence[str]) -> Sequence[Any]:
    row, whole = GenerationRow, JobProgressRow
    query = select(row.job_id, row.kind, row.state, row.plan, row.last_loss)
    query = query.join(whole, (row.job_id == whole.job_id) & (row.number == whole.newest))
    query = query.where(whole.job_id.in_(job_ids))
    return (await session.execute(query)).all()


def _shape(samples: StoreSamples, generation: Any, job: str) -> None:
    plan = generation.plan
    gpus = 0 if generation.state == GenerationState.ENDED else plan["p"] * plan["d"]
    samples.add_sample("varuna_job_gpus", gpus, job)
    samples.add_sample("varuna_job_stages", plan["p"], job)
    samples.add_sample("varuna_job_replicas", plan["d"], job)
    if generation.kind == GenerationKind.TRAINING:
        samples.add_sample("varuna_job_predicted_examples_per_second", plan.get("examples_per_s"), job)
        samples.add_sample("varuna_job_loss", generation.last_loss, job)
