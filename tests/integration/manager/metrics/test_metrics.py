"""/metrics: what is counted, what comes from the store, who may read it, and that the docs' page agrees."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed
from sqlalchemy import select

from repository import ROOT
from scripted_manager import ScriptedManager, start_training
from secure_world import SecureManager
from varuna_manager.db.engine import Database
from varuna_manager.db.models import CheckpointRow, EventRow, FleetRow, GenerationRow, JobRow, MetricRow, VmRow
from varuna_manager.history.spending import Spending
from varuna_manager.jobs.progress import Progress
from varuna_manager.metrics.exposition import MetricsService, render_page
from varuna_manager.metrics.from_store import JOBS_SHOWN, STORE_FAMILIES, StoreMetrics, StoreSamples
from varuna_manager.metrics.instruments import COUNTED_FAMILIES, Instruments
from varuna_manager.world.events import EventLog
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb
from waiting import until

NOW = 1000.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def service_of(database: Database) -> MetricsService:
    instruments = Instruments("1.2.3")
    instruments.record_leading(True)
    return MetricsService(instruments, StoreMetrics(database, "local", lambda: NOW), lambda: 3)


async def read(service: MetricsService) -> Samples:
    text, media_type = await service.render_metrics("text/plain")
    assert media_type.startswith("text/plain")
    return samples_of(text.decode())


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parsed(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def job(name: str, state: str = "running", **fields: Any) -> JobRow:
    return JobRow(id=f"id-{name}", name=name, state=state, spec={}, history=[], created_at=100.0, **fields)


def generation(job_name: str, number: int, **fields: Any) -> GenerationRow:
    plan = Plan(p=2, d=3, micro_batch=1, global_batch=8, examples_per_s=12.5).to_document()
    given: dict[str, Any] = {"kind": "training", "state": "running", "plan": plan, "candidates": [], "history": []}
    given |= {"reason": "", "rendezvous_host": "h", "rendezvous_port": 1, "created_at": 100.0}
    return GenerationRow(job_id=f"id-{job_name}", number=number, **given | fields)


def steps(job_name: str, *numbers: int, number: int = 1) -> list[MetricRow]:
    return [
        MetricRow(job_id=f"id-{job_name}", step=n, loss=1.0, step_s=0.5, examples=8, generation=number, at=110.0)
        for n in numbers
    ]


async def test_a_running_job_has_its_figures(database: Database) -> None:
    async with database.write() as session:
        session.add_all([job("one", started_at=900.0, active_name="one"), job("two", "failed")])
        session.add(FleetRow(provider="local", target=5))
        await session.flush()
        first = {"created_at": 900.0, "started_at": 905.0, "last_step_at": 950.0, "ended_at": 950.0, "last_step": 90}
        session.add(generation("one", 1, state="ended", seconds_without_progress=2.0, steps_redone=0, **first))
        now = {"last_step": 100, "last_loss": 0.25, "last_step_at": 990.0, "created_at": 950.0, "resumed_step": 90}
        session.add(generation("one", 2, seconds_without_progress=3.0, steps_redone=4, **now))
        session.add_all(steps("one", *range(1, 101)))
        for step, at in ((50, 400.0), (90, 940.0)):
            session.add(CheckpointRow(job_id="id-one", generation=1, step=step, url="u", total_bytes=7, at=at))
    samples = await read(service_of(database))
    of_job = {name: value(samples, f"varuna_job_{name}", job_name="one") for name in _names_of_jobs()}
    assert of_job == {
        "step": 100,
        "loss": 0.25,
        "step_age_seconds": 10,
        "useful_steps_total": 100,
        "examples_total": 800,
        "useful_seconds_total": 50,
        "between_steps_seconds_total": 0,
        "stalled_seconds_total": 5,
        "redone_steps_total": 4,
        "generations_total": 2,
        "elapsed_seconds": 100,
        "goodput_ratio": 0.45,
        "gpus": 6,
        "stages": 2,
        "replicas": 3,
        "predicted_examples_per_second": 12.5,
        "checkpoint_age_seconds": 60,
        "checkpoint_step": 90,
        "checkpoint_bytes": 7,
    }
    assert value(samples, "varuna_jobs", state="failed") == value(samples, "varuna_jobs", state="running") == 1
    assert not [name for name, labels in samples if ("job_name", "two") in labels], "it is over: its figures are gone"
    assert value(samples, "varuna_vms_wanted") == 5


async def test_a_job_that_has_never_saved_has_the_age_of_its_start(database: Database) -> None:
    async with database.write() as session:
        session.add_all([job("one", started_at=1000.0 - 7200.0, active_name="one"), job("new", active_name="new")])
        await session.flush()
        session.add(generation("one", 1, last_step=100, last_step_at=990.0))
    samples = await read(service_of(database))
    assert value(samples, "varuna_job_checkpoint_age_seconds", job_name="one") == 7200.0
    of_new = [name for name, labels in samples if ("job_name", "new") in labels]
    assert "varuna_job_checkpoint_age_seconds" not in of_new, "it has not started"
    assert "varuna_job_checkpoint_step" not in {name for name, _ in samples}


async def test_a_job_that_was_over_for_days_before_its_retry_has_lost_nothing_by_it(database: Database) -> None:
    """Two hours, three days without it, and two hours more."""
    day, hour = 86_400.0, 3600.0
    failed_at, retried_at = 100.0 + 2 * hour, 100.0 + 2 * hour + 3 * day
    now = retried_at + 10.0
    states = [("running", 100.0), ("failed", failed_at), ("queued", retried_at), ("running", now)]
    row = job("one", started_at=100.0, retried_at=retried_at, active_name="one")
    row.history = [{"state": state, "at": at, "reason": ""} for state, at in states]
    metrics, spending = StoreMetrics(database, "local", lambda: now), Spending(database, lambda: now)

    async def read_figures() -> dict[str, float]:
        samples = StoreSamples()
        await metrics.collect_samples(samples)
        of_job = (sample for metric in samples.collect() for sample in metric.samples if sample.labels.get("job_name"))
        return {sample.name.removeprefix("varuna_job_"): sample.value for sample in of_job}

    async with database.write() as session:
        session.add(row)
        await session.flush()
        first = {"created_at": 100.0, "started_at": 110.0, "last_step_at": failed_at, "ended_at": failed_at}
        session.add(generation("one", 1, state="ended", end_cause="script_failed", last_step=1000, **first))
        saved = CheckpointRow(job_id="id-one", generation=1, step=1000, url="u", total_bytes=7, at=failed_at)
        session.add_all([saved, generation("one", 2, created_at=now)])
    figures = await read_figures()
    assert (figures["step_age_seconds"], figures["checkpoint_age_seconds"]) == (10.0, 10.0)
    now += 20.0
    steps = {1001: pb.StepResult(step=1001, loss=1.0, step_us=1, examples=8)}
    async with database.write() as session:
        await Progress(EventLog(database)).record_steps(session, "id-one", 2, steps, now)
    assert (await read_figures())["stalled_seconds_total"] == 30.0
    now += 2 * hour
    steps = {2000: pb.StepResult(step=2000, loss=1.0, step_us=1, examples=8)}
    async with database.write() as session:
        await Progress(EventLog(database)).record_steps(session, "id-one", 2, steps, now)
    figures, shown = await read_figures(), await spending.read_time("one")
    assert figures["goodput_ratio"] == pytest.approx(shown["goodput"], rel=1e-12)
    assert shown["goodput"] > 0.9
    assert figures["elapsed_seconds"] == pytest.approx(shown["elapsed_s"]) == 4 * hour + 30.0
    assert sum(cause["seconds"] for cause in shown["causes"]) == pytest.approx(shown["total_s"])


async def test_the_goodput_in_the_metrics_is_that_of_varuna_show(database: Database) -> None:
    """At three moments: the second finds a generation that has settled since, the third finds more steps."""
    now = 0.0
    metrics, spending = StoreMetrics(database, "local", lambda: now), Spending(database, lambda: now)
    async with database.write() as session:
        session.add(job("one", started_at=150.0, active_name="one"))
        await session.flush()
        calibration = {"kind": "calibration", "state": "ended", "created_at": 150.0, "ended_at": 200.0}
        first = {"created_at": 200.0, "started_at": 220.0, "last_step_at": 900.0, "ended_at": 950.0, "last_step": 70}
        second = {"created_at": 1000.0, "started_at": 1020.0, "last_step_at": 1150.0, "last_step": 80}
        session.add(generation("one", 1, **calibration))
        session.add(generation("one", 2, state="ended", **first))
        session.add(generation("one", 3, resumed_step=50, between_s={"script": 10.0}, **second))
    figures = set()
    for now in (1200.0, 2500.0, 2600.0):
        samples = StoreSamples()
        await metrics.collect_samples(samples)
        exposed = {sample.name: sample.value for metric in samples.collect() for sample in metric.samples}
        shown = await spending.read_time("one")
        assert exposed["varuna_job_goodput_ratio"] == pytest.approx(shown["goodput"], rel=1e-12)
        assert shown["elapsed_s"] == now - 150.0, "since its first start, not since it was submitted"
        figures.add(shown["goodput"])
        async with database.write() as session:
            (newest,) = await session.scalars(select(GenerationRow).where(GenerationRow.number == 3))
            newest.last_step = 100
    assert len(figures) == 3
    assert all(0.3 < figure < 1.0 for figure in figures)


def _names_of_jobs() -> list[str]:
    return [each.exposed_name.removeprefix("varuna_job_") for each in STORE_FAMILIES if each.labels == ("job_name",)]


async def test_a_step_that_is_done_again_counts_once(database: Database) -> None:
    service = service_of(database)
    async with database.write() as session:
        session.add(job("one"))
        await session.flush()
        session.add_all(steps("one", 1, 2, 3))
    await read(service)
    async with database.write() as session:
        for row in steps("one", 2, 3, 4, number=2):
            await session.merge(row)
    samples = await read(service)
    assert value(samples, "varuna_job_useful_steps_total", job_name="one") == 4
    assert value(samples, "varuna_job_examples_total", job_name="one") == 32
    another = await read(service_of(database))
    of_jobs = {key for key in another if key[0].startswith("varuna_job_")}
    assert len(of_jobs) >= 3
    assert all(samples[key] == another[key] for key in of_jobs), "another manager says the same"


async def test_ten_thousand_vms_and_many_jobs_make_no_more_series(database: Database) -> None:
    few = await read(service_of(database))
    async with database.write() as session:
        session.add_all(_vm(number) for number in range(10_000))
        session.add_all(job(f"job-{number}", "queued") for number in range(JOBS_SHOWN + 5))
    samples = await read(service_of(database))
    assert value(samples, "varuna_vms", state="ready") == 9_998
    assert value(samples, "varuna_gpus") == 9_998 * 4
    assert value(samples, "varuna_vms_quarantined") == 2
    assert value(samples, "varuna_price_per_hour") == pytest.approx(9_998 * 0.25)
    assert value(samples, "varuna_jobs_not_shown") == 5
    assert len(samples) - len(few) < JOBS_SHOWN * len(_names_of_jobs()) + 3


async def test_each_pool_has_its_vms_and_their_price(database: Database) -> None:
    pools = {0: "one", 5: "one", 6: "one", 7: "two"}
    async with database.write() as session:
        for number, pool in pools.items():
            row = _vm(number)
            row.pool = pool
            session.add(row)
    samples = await read(service_of(database))
    assert value(samples, "varuna_pool_vms", pool="one") == 2
    assert value(samples, "varuna_pool_vms", pool="two") == 1
    assert value(samples, "varuna_pool_price_per_hour", pool="one") == pytest.approx(0.5)


def _vm(number: int) -> VmRow:
    state = "gone" if number < 2 else "ready"
    until = NOW + 10 if 5 <= number < 7 else None
    given = {"provider": "local", "gpus": 4, "ref": {}, "history": [], "created_at": 1.0, "price_per_hour": 0.25}
    return VmRow(id=f"vm-{number}", state=state, quarantined_until=until, **given)


async def test_a_manager_that_stands_by_leaves_the_figures_to_the_leader(database: Database) -> None:
    service = service_of(database)
    service.instruments.record_leading(False)
    samples = await read(service)
    assert (value(samples, "varuna_leader"), value(samples, "varuna_store_up")) == (0, 1)
    assert value(samples, "varuna_jobs", state="running") is None


async def test_a_store_that_is_away_is_told(tmp_path: Path) -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/nowhere")
    samples = await read(service_of(database))
    await database.close()
    assert value(samples, "varuna_store_up") == 0
    assert value(samples, "varuna_agents_connected") == 3
    assert value(samples, "varuna_jobs", state="running") is None


async def test_the_first_certificate_that_ends_is_told(database: Database) -> None:
    instruments, figures = Instruments("1.2.3"), StoreMetrics(database, "local", lambda: NOW)
    for end, days in ((None, None), (NOW + 86_400, 1.0), (NOW - 43_200, -0.5)):
        service = MetricsService(instruments, figures, lambda: 1, lambda end=end: end, lambda: NOW)
        assert value(await read(service), "varuna_agent_certificate_days_left") == days


async def test_events_are_counted_when_they_are_committed(database: Database) -> None:
    service = service_of(database)
    events = EventLog(database, on_event=service.instruments.record_event)
    went = {"notice": 0.5, "stop": 0.25, "launch": 0.75, "process": 0.5, "step": 0.5}
    parts = [{"name": name, "seconds": seconds, "rank": None} for name, seconds in went.items()]
    data = {
        "step": 5,
        "seconds_without_progress": 2.5,
        "steps_redone": 3,
        "micro_batches_redone": None,
        "downtime": parts,
    }
    in_place = {**data, "steps_redone": 0, "micro_batches_redone": 6}

    async def fail() -> None:
        async with database.write() as session:
            events.emit_event(session, "hang", "not committed", data={"silent_s": 1.0})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    async with database.write() as session:
        session.add(job("one"))
        events.emit_event(session, "first_step", "", job_id="id-one", generation=2, data=data)
        events.emit_event(session, "first_step", "", job_id="id-one", generation=3, data={**in_place, "downtime": []})
        events.emit_event(session, "vm_lost", "", vm_id="vm-1", data={"silent_s": 11.0})
        events.emit_event(session, "vm_gone", "it was drained", vm_id="vm-2", data={})
    samples = await read(service)
    assert value(samples, "varuna_events_total", kind="first_step") == 2
    assert value(samples, "varuna_events_total", kind="hang") == 0
    assert value(samples, "varuna_morph_stall_seconds_sum") == 5.0
    assert value(samples, "varuna_redone_steps_total") == 3
    assert value(samples, "varuna_redone_micro_batches_total") == 6
    phases = {
        name: value(samples, "varuna_morph_phase_seconds_sum", phase=name) for name in ("notice", "stop", "start")
    }
    assert phases == {"notice": 0.5, "stop": 0.25, "start": 1.75}
    assert value(samples, "varuna_morph_phase_seconds_count", phase="plan") == 0
    assert value(samples, "varuna_detection_seconds_sum", of="vm") == 11.0
    assert value(samples, "varuna_detection_seconds_count", of="vm") == 1


def test_each_manager_has_a_registry_of_its_own() -> None:
    one, two = Instruments(), Instruments()
    one.heartbeats.inc()
    assert one.registry.get_sample_value("varuna_heartbeats_total") == 1
    assert two.registry.get_sample_value("varuna_heartbeats_total") == 0
    event = EventRow(kind="hang", message="", data={"silent_s": 30.0}, at=0.0)
    two.record_event(event)
    assert one.registry.get_sample_value("varuna_detection_seconds_count", {"of": "hang"}) == 0


def test_every_metric_is_documented_and_none_is_missing() -> None:
    made = {family.name for family in Instruments().registry.collect() if family.name.startswith("varuna_")}
    assert made == {family.name for family in COUNTED_FAMILIES}
    names = [family.name for family in (*COUNTED_FAMILIES, *STORE_FAMILIES)]
    assert len(set(names)) == len(names)
    assert (ROOT / "docs" / "metrics.md").read_text() == render_page(), "run make docs"


# ---------------------------------------------------------------- over HTTP


async def test_a_manager_at_work_tells_of_it(manager: ScriptedManager) -> None:
    # However long this machine stands still, the VM is not lost.
    await start_training(manager, 1, flags=("--suspect-after-s", "3600", "--lost-after-s", "3600"))
    base = str(manager.rest.base_url).removesuffix("/").removesuffix("/api/v1")

    async def read_heartbeats() -> Samples | None:
        answer = await manager.rest.get(f"{base}/metrics")
        assert answer.status_code == 200
        samples = samples_of(answer.text)
        return samples if (value(samples, "varuna_heartbeats_total") or 0) > 0 else None

    samples = await until(read_heartbeats, "a heartbeat")
    assert value(samples, "varuna_leader") == 1
    assert value(samples, "varuna_vms", state="ready") == 1
    assert value(samples, "varuna_jobs", state="running") == 1
    assert value(samples, "varuna_agents_connected") == 1
    assert (value(samples, "varuna_planner_seconds_count", question="plan") or 0) >= 1
    assert (value(samples, "varuna_provider_calls_total", call="create", outcome="ok") or 0) >= 1
    assert (value(samples, "varuna_store_commit_seconds_count") or 0) > 5
    assert value(samples, "varuna_http_requests_total", method="POST", route="/jobs", code="201") == 1
    assert (await manager.rest.get("jobs/no-such-job")).status_code == 404
    assert (await manager.rest.get("no/such/path")).status_code == 404
    openmetrics = await manager.rest.get(f"{base}/metrics", headers={"Accept": "application/openmetrics-text"})
    families = {family.name: family for family in parsed_openmetrics(openmetrics.text)}
    calls = {(s.labels["route"], s.labels["code"]) for s in families["varuna_http_requests"].samples}
    assert {("/jobs/{job}", "404"), ("other", "404")} <= calls
    assert all(math.isfinite(sample.value) for family in families.values() for sample in family.samples)


def test_a_routes_errors_start_at_zero_with_its_first_answer() -> None:
    """Prometheus sees no increase when a series appears with its first value."""
    instruments = Instruments()
    route = {"method": "GET", "route": "/vms"}

    def read_count(code: str) -> float | None:
        return instruments.registry.get_sample_value("varuna_http_requests_total", {**route, "code": code})

    instruments.record_answer("GET", "/vms", 200, 0.1)
    assert (read_count("200"), read_count("500"), read_count("503")) == (1, 0, None)
    instruments.record_answer("GET", "/vms", 500, 0.1)
    instruments.record_answer("GET", "/vms", 200, 0.1)
    assert (read_count("200"), read_count("500")) == (2, 1)


@pytest.mark.xdist_group("secure")  # one manager for all
def test_a_secure_manager_shows_them_to_viewers(secure: SecureManager) -> None:
    url = f"{secure.url}/metrics"
    assert secure.client().get(url).status_code == 401
    answer = secure.client(secure.token(name="prometheus", role="viewer")).get(url)
    assert answer.status_code == 200
    assert "varuna_leader 1.0" in answer.text
