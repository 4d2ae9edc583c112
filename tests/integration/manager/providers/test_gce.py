"""The GCE provider with Google's own client against a small Compute Engine: what it asks for, and what it makes of the
answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from google.api_core.exceptions import Forbidden, InternalServerError, TooManyRequests
from google.cloud import compute_v1

from gce_bench import FakeGce, GceBench, fake_gce, open_gce_bench
from held_listing import create_beside_held_list, list_beside_held_creations
from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers.base import ProviderRefusedError, UnknownVmError, UnsupportedByProviderError
from varuna_manager.providers.boot import render_cloud_init
from varuna_manager.providers.gce_kind import describe_machine
from varuna_manager.providers.gce_requests import make_insert_request, parse_error, parse_operation_errors
from varuna_manager.providers.gce_settings import GceSettings, read_gce_settings
from varuna_manager.providers.kind import Origin

A100 = ("a2-highgpu-1g", "us-central1-a")
SETTINGS = GceSettings(
    project="training-1",
    zones=("us-central1-a",),
    machine_types=("a2-highgpu-1g",),
    gpus=1,
    device_memory_gib=40,
    image="projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    subnetwork="projects/training-1/regions/us-central1/subnetworks/vms",
)


@pytest.fixture(scope="module")
def gce() -> Iterator[FakeGce]:
    with fake_gce() as served:
        yield served


@pytest.fixture
async def bench(gce: FakeGce) -> AsyncIterator[GceBench]:
    async with open_gce_bench(gce) as opened:
        yield opened


# ---------------------------------------------------------------- what it asks for


def test_a_request_is_a_spot_vm_that_goes_with_its_disk_when_it_is_preempted() -> None:
    request = make_insert_request(SETTINGS, "varuna-r-000", A100, "r", "#cloud-config\n")
    instance = request.instance_resource
    assert (request.project, request.zone, instance.name) == ("training-1", "us-central1-a", "varuna-r-000")
    assert instance.machine_type == "projects/training-1/zones/us-central1-a/machineTypes/a2-highgpu-1g"
    assert (instance.scheduling.provisioning_model, instance.scheduling.instance_termination_action) == (
        "SPOT",
        "DELETE",
    )
    assert instance.scheduling.on_host_maintenance == "TERMINATE"
    (disk,) = instance.disks
    assert (disk.boot, disk.auto_delete, disk.initialize_params.disk_size_gb) == (True, True, 128)
    assert dict(instance.labels) == {"varuna-fleet": "varuna", "varuna-request": "r"}
    assert [(item.key, item.value) for item in instance.metadata.items] == [("user-data", "#cloud-config\n")]
    assert not instance.network_interfaces[0].access_configs, "it has no public address"
    assert not instance.guest_accelerators
    assert not instance.service_accounts


def test_gpus_and_a_service_account_are_attached_where_the_settings_say_so() -> None:
    changes = {
        "accelerator": "nvidia-tesla-t4",
        "gpus": 4,
        "service_account": "jobs@training-1.iam.gserviceaccount.com",
    }
    request = make_insert_request(SETTINGS.model_copy(update=changes), "v", ("n1-standard-8", "us-central1-b"), "r", "")
    (accelerator,) = request.instance_resource.guest_accelerators
    assert accelerator.accelerator_count == 4
    assert accelerator.accelerator_type.endswith("zones/us-central1-b/acceleratorTypes/nvidia-tesla-t4")
    assert request.instance_resource.service_accounts[0].email == changes["service_account"]


def test_the_agent_asks_googles_metadata_service() -> None:
    origin = Origin(managers="10.0.0.10:8751", urls=("https://10.0.0.10:8750",), ca_pem="authority")
    document = render_cloud_init(origin, describe_machine(SETTINGS, "varuna-r-000"), f"vj1.a.b.{'0' * 64}")
    files = {file["path"]: file["content"] for file in yaml.safe_load(document)["write_files"]}
    flags = set(files["/etc/varuna/agent.env"].split())
    assert {"--notices=gcp", "--gpus=1", f"--device-memory-bytes={40 << 30}"} <= flags


# ---------------------------------------------------------------- what it makes of the answers


async def test_without_capacity_the_next_zone_and_machine_type_are_tried(bench: GceBench) -> None:
    (first, second), (a, b) = bench.settings.machine_types, bench.settings.zones
    bench.project.full = frozenset({(first, a), (first, b)})
    created = await bench.provider.create(2, "r")
    assert created.refusal is None
    assert {(vm.ref["type"], vm.ref["zone"]) for vm in created.vms} == {(second, a)}
    asked = len(bench.project.inserts)
    await bench.provider.create(1, "s")
    assert len(bench.project.inserts) == asked + 1, "places that refused are left alone for a while"
    bench.now += 3600.0
    bench.project.full = frozenset()
    again = await bench.provider.create(1, "t")
    assert (again.vms[0].ref["type"], again.vms[0].ref["zone"]) == (first, a)


@pytest.mark.parametrize("request_path", ["/instances", "/wait"])
async def test_a_vm_of_which_google_does_not_say_what_became_is_asked_for_nowhere_else(
    bench: GceBench, request_path: str
) -> None:
    bench.project.loses_once = request_path
    created = await bench.provider.create(1, "r")
    assert list(bench.project.instances) == [("us-central1-a", "varuna-r-000")]
    assert created.refusal is not None
    assert (created.refusal.kind, "the answer is lost once" in created.refusal.reason) == (RefusalKind.FAILED, True)
    assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-000"], "it belongs to the fleet"


async def test_the_other_vms_of_a_request_are_decided_before_it_ends(gce: FakeGce) -> None:
    async with open_gce_bench(gce, list_every_s=3600.0) as bench:
        bench.project.loses_once = "/wait"
        assert (await bench.provider.create(6, "r")).refusal is not None
        assert len(bench.project.inserts) == 6
        assert len(await bench.provider.list()) == 6, "the list is newer than the request"


async def test_an_allocation_that_takes_long_counts_as_made(bench: GceBench) -> None:
    bench.project.slowness_s, bench.project.loses_once = 0.1, "/wait"
    created = await bench.make_provider(settle_s=0.05).create(1, "r")
    assert (created.refusal, [vm.id for vm in created.vms]) == (None, ["varuna-r-000"])


async def test_creations_that_take_long_hold_up_neither_a_list_nor_other_work(bench: GceBench) -> None:
    created = await list_beside_held_creations(bench.provider, bench.provider, "_insert", at_once=4)
    assert (created.refusal, len(created.vms)) == (None, 4)


async def test_what_is_wrong_in_one_zone_only_is_asked_for_in_the_next(bench: GceBench) -> None:
    bench.project.unknown = frozenset({A100})
    created = await bench.provider.create(1, "r")
    assert (created.refusal, [vm.ref["zone"] for vm in created.vms]) == (None, ["us-central1-b"])


async def test_a_place_that_refused_for_any_reason_is_asked_for_one_vm_first(bench: GceBench) -> None:
    places = [(kind, zone) for kind in bench.settings.machine_types for zone in bench.settings.zones]
    bench.project.unknown = frozenset(places)
    with patch.object(bench.provider, "_insert", wraps=bench.provider._insert) as insert:
        await bench.provider.create(3, "r")
        assert insert.call_count == 3 * len(places)
        await bench.provider.create(3, "s")
        assert insert.call_count == 4 * len(places)
    bench.project.unknown = frozenset()
    assert len((await bench.provider.create(3, "t")).vms) == 3


async def test_a_vm_that_is_given_back_is_going_and_keeps_its_name(bench: GceBench) -> None:
    await bench.provider.create(2, "r")
    await bench.provider.delete(["varuna-r-000"])
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    created = await bench.provider.create(2, "r")
    assert sorted(vm.id for vm in created.vms) == ["varuna-r-001", "varuna-r-002"]


async def test_a_vm_that_google_preempts_is_there_until_it_has_stopped(bench: GceBench) -> None:
    await bench.provider.create(2, "r")
    await bench.provider.preempt_vm("varuna-r-000", 0.0)
    instance = bench.project.instances["us-central1-a", "varuna-r-000"]
    assert instance["status"] == "STOPPING"
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": False, "varuna-r-001": False}
    instance["status"] = "TERMINATED"
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    with pytest.raises(UnknownVmError, match="no VM 'varuna-r-000' in the fleet varuna"):
        await bench.provider.preempt_vm("varuna-r-000", 0.0)


@pytest.mark.parametrize("status", ["TERMINATED", "STOPPED", "SUSPENDED"])
async def test_a_vm_that_has_stopped_by_itself_is_deleted(bench: GceBench, status: str) -> None:
    await bench.provider.create(2, "r")
    instance = bench.project.instances["us-central1-a", "varuna-r-000"]
    instance["status"] = status
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    assert bench.project.deleted == ["varuna-r-000"]
    await bench.provider.list()
    assert bench.project.deleted == ["varuna-r-000"], "once is enough"
    await bench.advance()
    assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-001"]


async def test_a_vm_that_has_stopped_by_itself_is_deleted_again_if_google_did_not_do_it(bench: GceBench) -> None:
    await bench.provider.create(1, "r")
    instance = bench.project.instances["us-central1-a", "varuna-r-000"]
    instance["status"] = "TERMINATED"
    bench.project.refuses_deletions = True
    assert [vm.going for vm in await bench.provider.list()] == [True], "the list is valid all the same"
    bench.project.refuses_deletions = False
    await bench.provider.list()
    instance["status"] = "TERMINATED"  # Google has accepted the deletion, and it has failed
    bench.now += 60.0
    await bench.provider.list()
    assert bench.project.deleted == ["varuna-r-000", "varuna-r-000"]
    await bench.advance()
    assert list(await bench.provider.list()) == []


async def test_a_list_that_was_begun_before_another_does_not_hide_what_that_one_has(gce: FakeGce) -> None:
    async with open_gce_bench(gce, list_every_s=3600.0) as bench:
        assert [vm.id for vm in (await create_beside_held_list(bench.provider)).vms] == ["varuna-r-000"]
        assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-000"]


async def test_a_vm_that_gets_the_name_of_one_that_is_gone_is_preempted_with_notice_like_any(bench: GceBench) -> None:
    await bench.provider.create(1, "r")
    await bench.provider.delete(["varuna-r-000"])
    bench.project.settle()
    assert list(await bench.provider.list()) == []
    assert [vm.id for vm in (await bench.provider.create(1, "r")).vms] == ["varuna-r-000"]
    await bench.provider.preempt_vm("varuna-r-000", 0.0)
    assert [vm.going for vm in await bench.provider.list()] == [False]


async def test_only_google_itself_gives_notice(bench: GceBench) -> None:
    await bench.provider.create(2, "r")
    with pytest.raises(UnsupportedByProviderError, match="a notice of its own"):
        await bench.provider.preempt_vm("varuna-r-001", 30.0)


async def test_a_deletion_that_fails_is_an_error(bench: GceBench) -> None:
    await bench.provider.create(1, "r")
    await bench.cut_off()
    with pytest.raises(ProviderRefusedError, match="Internal error"):
        await bench.provider.delete(["varuna-r-000"])


async def test_without_a_price_a_fleet_with_a_limit_of_cost_gets_no_vm(bench: GceBench) -> None:
    created = await bench.make_provider(needs_prices=True).create(1, "r")
    assert created.refusal is not None
    assert "give price_per_hour in the settings" in created.refusal.reason
    bench.settings = bench.settings.model_copy(update={"price_per_hour": 1.5})
    priced = bench.make_provider(needs_prices=True)
    assert (await priced.get_offer()).price_per_hour == 1.5
    assert (await priced.create(1, "r")).vms[0].price_per_hour == 1.5


async def test_listings_are_as_rare_as_the_settings_say(gce: FakeGce) -> None:
    async with open_gce_bench(gce, list_every_s=2.0) as bench:
        await bench.provider.create(1, "r")
        await bench.take_vm("varuna-r-000", 0.0)
        assert len(await bench.provider.list()) == 1
        bench.now += 2.0
        assert list(await bench.provider.list()) == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", RefusalKind.CAPACITY),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", RefusalKind.CAPACITY),
        ("QUOTA_EXCEEDED", RefusalKind.QUOTA),
        ("RATE_LIMIT_EXCEEDED", RefusalKind.THROTTLED),
        ("RESOURCE_NOT_FOUND", RefusalKind.FAILED),
    ],
)
def test_an_operations_errors_are_told_apart(code: str, kind: RefusalKind) -> None:
    refusal = parse_operation_errors([compute_v1.Errors(code=code, message="first\nsecond")])
    assert (refusal.kind, refusal.reason) == (kind, f"{code}: first")


def test_errors_of_the_client_are_refusals() -> None:
    def reasons(reason: str) -> list[dict[str, str]]:
        return [{"reason": reason, "message": "m"}]

    assert parse_error(Forbidden("m", errors=reasons("rateLimitExceeded"))).kind is RefusalKind.THROTTLED
    assert parse_error(Forbidden("m", errors=reasons("quotaExceeded"))).kind is RefusalKind.QUOTA
    assert parse_error(Forbidden("m", errors=reasons("forbidden"))).kind is RefusalKind.FAILED
    assert parse_error(TooManyRequests("slow down")).kind is RefusalKind.THROTTLED
    assert parse_error(InternalServerError("broken\nfor now")).reason == "500: broken"
    assert parse_error(ConnectionError("refused")).reason == "Google Cloud cannot be reached: refused"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"project": "P"}, "project 'P'"),
        ({"image": "ubuntu"}, "image 'ubuntu'"),
        ({"zones": []}, "zones"),
        ({"subnetwork": "vms"}, "subnetwork 'vms'"),
    ],
)
def test_wrong_settings_are_told_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "gce.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS.model_dump(mode="json"), **changes}))
    with pytest.raises(ValueError, match=r"gce\.yaml: ") as raised:
        read_gce_settings(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
