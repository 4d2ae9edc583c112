"""The preview of a job before it runs, from the present VMs and the measurements of an earlier run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from scripted_manager import profile_json
from varuna_client import Client
from varuna_client.commands.options import render_plain
from varuna_client.commands.preview import Preview, free_gpus, preview, preview_text
from varuna_proto.rest_fleet import VmDocument

SPEC = {"name": "gpt", "run": "python train.py --steps 100", "global_batch": 8, "env": {}, "plan": {"d": 2}}
EARLIER = {
    "id": "job-1",
    "name": "gpt",
    "spec": {**SPEC, "plan": {"p": None, "d": None, "micro_batch": None}},
    "created_at": "2026-01-01T00:00:00+00:00",
}
NOW = datetime(2026, 1, 1, 2, tzinfo=UTC)


def vm(name: str, gpus: int = 2, busy: int = 0, price: float | None = None, **more: Any) -> VmDocument:
    document: Any = {
        "id": name,
        "state": "ready",
        "gpus": gpus,
        "device_memory_bytes": 2**30 * gpus,
        "workers": [{}] * busy,
        "quarantined_until": None,
        "notice_deadline": None,
        "price_per_hour": price,
    }
    return VmDocument(**{**document, **more})  # type: ignore[typeddict-item]


def manager(vms: list[VmDocument], jobs: list[Any], profile: str | None = None) -> Client:
    answers: dict[str, Callable[[], httpx.Response]] = {
        "/api/v1/vms": lambda: httpx.Response(200, json=vms),
        "/api/v1/jobs": lambda: httpx.Response(200, json=jobs),
        "/api/v1/jobs/job-1/profile": lambda: httpx.Response(200 if profile else 404, text=profile or "{}"),
    }
    return Client("http://manager", transport=httpx.MockTransport(lambda request: answers[request.url.path]()))


def asked(vms: list[VmDocument], jobs: list[Any], profile: str | None = None, **spec: Any) -> Preview:
    with manager(vms, jobs, profile) as client:
        return preview(client, {**SPEC, **spec})


def test_free_are_gpus_without_a_worker_on_vms_that_stay() -> None:
    free = free_gpus(
        [
            vm("a", gpus=4, busy=1, price=2.0),
            vm("b", busy=2, price=4.0),
            vm("c", state="draining"),
            vm("d", quarantined_until="2026-01-01T00:00:00+00:00"),
            vm("e", notice_deadline="2026-01-01T00:00:00+00:00"),
        ]
    )
    assert (free.gpus, free.vms, free.all_gpus, free.gpus_per_vm) == (3, 1, 6, 2)
    assert free.device_memory_bytes == 2**31
    assert free.price_per_gpu_hour == pytest.approx(1.0)
    assert free_gpus([]).gpus == 0


def test_a_job_that_never_ran_is_profiled_first() -> None:
    other = {**EARLIER, "spec": {**SPEC, "run": "python other.py"}}
    for jobs, profile in (([], None), ([other], profile_json()), ([EARLIER], None)):
        found = asked([vm("a")], jobs, profile)
        assert found.plan is None
        assert "about a minute" in render_plain(preview_text(found, SPEC))
        assert "the provider gives no price for these VMs" in render_plain(preview_text(found, SPEC))
    priced = asked([vm("a", price=3.0)], [], None)
    assert "at most 3.00 per hour on 2 GPUs" in render_plain(preview_text(priced, SPEC))


def test_the_plan_is_for_the_gpus_there_are_with_the_jobs_own_pins_and_limits() -> None:
    vms = [vm("a", price=3.0), vm("b", price=3.0)]
    found = asked(vms, [EARLIER], profile_json())
    assert found.plan is not None
    assert found.plan["d"] == 2
    assert found.plan["p"] * 2 <= 4
    assert found.cost_per_hour == pytest.approx(1.5 * 2 * found.plan["p"])
    text = render_plain(preview_text(found, SPEC, NOW))
    assert "4 of 4 free on 2 VMs" in text
    assert "from the profile of job-1, 2 h ago" in text
    assert "100 (--steps in run), about" in text
    whole = found.cost_per_hour * 100 * found.plan["predicted_minibatch_s"] / 3600
    assert f"about {found.cost_per_hour:.2f} per hour, {whole:.2f} for all steps" in text
    limited = asked(vms, [EARLIER], profile_json(), resources={"max_gpus": 2})
    assert limited.gpus == 2
    assert limited.plan is not None
    assert limited.plan["p"] == 1


def test_where_no_gpu_is_free_or_no_plan_fits_it_waits() -> None:
    none_free = asked([vm("a", busy=2)], [EARLIER], profile_json())
    assert none_free.why_not == "no GPU is free: the job waits, or gets its share"
    too_few = asked([vm("a", gpus=1)], [EARLIER], profile_json())
    assert too_few.plan is None
    assert too_few.why_not
    assert too_few.to_document()["why_no_plan"] == too_few.why_not
