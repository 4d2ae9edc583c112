"""A store for the control plane's benchmark: VMs that are ready and jobs that train on all of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, EnrolmentRow, FleetRow, GenerationRow, JobRow, VmRow, WorkerRow
from varuna_proto.plan import Plan

P, D = 4, 25
RANKS_PER_JOB = P * D
GLOBAL_BATCH, MICRO_BATCH = 8192, 4
SECTIONS = 8
ENROLMENT = "benchmark"


def vm_id(number: int) -> str:
    return f"vm-{number:05d}"


def job_id(number: int) -> str:
    return f"job-{number:03d}"


def fill(url: str, vms: int, jobs: int, provider: str) -> None:
    """Make the store at `url` (new): `jobs` jobs of P×D ranks, each on a VM of its own; the rest of `vms` idle."""
    asyncio.run(_fill(url, vms, jobs, provider))


async def _fill(url: str, vms: int, jobs: int, provider: str) -> None:
    assert jobs * RANKS_PER_JOB <= vms, f"{jobs} jobs of {RANKS_PER_JOB} ranks need more than {vms} VMs"
    database = Database(url)
    await database.migrate_schema()
    async with database.write() as session:
        session.add(FleetRow(provider=provider, target=vms))
        session.add_all(_vms(vms, provider))
        session.add_all(_enrolments(vms))
        session.add_all(_job(number) for number in range(jobs))
        await session.flush()
        session.add_all(row for number in range(jobs) for row in _generation(number))
    await database.close()


def _history(*states: str) -> list[dict[str, Any]]:
    now = time.time()
    return [{"at": now, "state": state, "reason": "the benchmark says so"} for state in states]


def _vms(count: int, provider: str) -> Iterator[VmRow]:
    for number in range(count):
        yield VmRow(
            id=vm_id(number),
            provider=provider,
            state="ready",
            history=_history("requested", "ready"),
            gpus=1,
            device_memory_bytes=2**34,
            host="127.0.0.1",
            ref={},
            incarnation=f"simulated-{number}",
            created_at=time.time(),
            reason="its agent said hello",
        )


def _enrolments(count: int) -> Iterator[EnrolmentRow]:
    """As if every agent had joined."""
    for number in range(count):
        yield EnrolmentRow(
            vm_id=vm_id(number), enrolment=ENROLMENT, token_id=ENROLMENT, key_sha256="", joined_at=time.time()
        )


def _job(number: int) -> JobRow:
    name = job_id(number)
    spec = {
        "name": name,
        "workdir": "/",
        "run": "python train.py",
        "global_batch": GLOBAL_BATCH,
        "resources": {"min_gpus": 1, "max_gpus": RANKS_PER_JOB},
    }
    return JobRow(
        id=name,
        name=name,
        active_name=name,
        spec=spec,
        state="running",
        history=_history("queued", "running"),
        reason="generation 1 is under way",
        created_at=time.time() + number * 1e-3,
        started_at=time.time(),
        profile_json=profile_json(),
        profiled_at=time.time(),
    )


def _generation(number: int) -> Iterator[Base]:
    plan = Plan(
        p=P,
        d=D,
        micro_batch=MICRO_BATCH,
        global_batch=GLOBAL_BATCH,
        stage_starts=tuple(range(0, SECTIONS, SECTIONS // P)),
        recompute=(False,) * P,
        predicted_minibatch_s=1.0,
        examples_per_s=float(GLOBAL_BATCH),
        memory_bytes=(2**33,) * P,
    )
    yield GenerationRow(
        job_id=job_id(number),
        number=1,
        kind="training",
        state="running",
        history=_history("launching", "running"),
        plan=plan.to_document(),
        candidates=[],
        rendezvous_host="127.0.0.1",
        rendezvous_port=20_000,
        reason="the job was submitted",
        created_at=time.time(),
        started_at=time.time(),
        resumed_step=0,
        last_step=1,
        last_step_at=time.time(),
    )
    for rank in range(RANKS_PER_JOB):
        yield WorkerRow(
            job_id=job_id(number),
            generation=1,
            rank=rank,
            vm_id=vm_id(number * RANKS_PER_JOB + rank),
            local_rank=0,
            state="running",
            history=_history("assigned", "running"),
            pid=1,
        )


def profile_json() -> str:
    """Equal sections, with the times that the simulated workers report."""
    measurements = [
        {
            "micro_batch": m,
            "forward_us": 1250.0 * m,
            "backward_us": 2500.0 * m,
            "recompute_us": 1250.0 * m,
            "output_bytes": 1_000_000 * m,
            "input_bytes": 1_000_000 * m,
            "activation_bytes": 10_000_000 * m,
        }
        for m in (1, 2, 4, 8)
    ]
    section = {"parameter_bytes": 10**8, "optimizer_bytes": 2 * 10**8, "gradient_bytes": 10**8}
    link = {"latency_us": 50.0, "bandwidth_bytes_per_s": 1e10, "jitter_us": 0.0}
    return json.dumps(
        {
            "schema": "varuna.profile/1",
            "environment": {},
            "sections": [
                {"index": i, "name": f"block {i}", **section, "measurements": measurements} for i in range(SECTIONS)
            ],
            "shared_parameters": [],
            "links": {"same_vm": link, "other_vm": link},
            "all_reduce": [{"ranks": 2, "bytes": 10**6, "us": 1000.0}],
        }
    )


def sqlite_url(folder: Path) -> str:
    """Where a manager with this data directory keeps its store."""
    return f"sqlite:///{folder / 'manager.db'}"
