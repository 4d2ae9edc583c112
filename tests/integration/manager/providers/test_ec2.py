"""The EC2 provider with AWS's own SDK against moto: what it asks for, and what it makes of the answers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError, NoCredentialsError
from sqlalchemy import select

from ec2_bench import Ec2Bench, mock_ec2, open_ec2_bench
from held_listing import create_beside_held_list, list_beside_held_creations
from migrated_stores import migrated
from rest_world import rest_world
from varuna_manager.controllers.fleet_controller import FleetController
from varuna_manager.controllers.vm_requests import FleetSettings
from varuna_manager.db.models import VmRow
from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.providers.base import UnknownVmError, UnsupportedByProviderError
from varuna_manager.providers.boot import render_cloud_init
from varuna_manager.providers.ec2_kind import describe_machine
from varuna_manager.providers.ec2_market import parse_error, parse_fleet_errors
from varuna_manager.providers.ec2_requests import make_fleet_request, make_template_data, name_template
from varuna_manager.providers.ec2_settings import Ec2Settings
from varuna_manager.providers.kind import Origin
from varuna_manager.world.bell import Bell
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from waiting import until

SETTINGS = Ec2Settings(
    region="us-east-1",
    instance_types=("p4d.24xlarge", "p4de.24xlarge"),
    gpus=8,
    device_memory_gib=40,
    image_id="ami-0123456789abcdef0",
    subnet_ids=("subnet-a", "subnet-b"),
    security_group_ids=("sg-1",),
)
MOST_USER_DATA = 16 * 1024
"""EC2's limit, before it is encoded."""


@pytest.fixture
def aws() -> Iterator[None]:
    with mock_ec2():
        yield


@pytest.fixture
async def bench(aws: None) -> AsyncIterator[Ec2Bench]:
    async with open_ec2_bench() as opened:
        yield opened


# ---------------------------------------------------------------- what it asks for


def test_a_request_is_an_instant_fleet_of_one_spot_instance_over_all_types_and_subnets() -> None:
    request = make_fleet_request(SETTINGS, "varuna-r-000", "r", 0, "#cloud-config\n")
    assert request["Type"] == "instant"
    assert request["TargetCapacitySpecification"] == {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"}
    assert request["SpotOptions"]["AllocationStrategy"] == "price-capacity-optimized"
    (config,) = request["LaunchTemplateConfigs"]
    places = [(override["InstanceType"], override["SubnetId"]) for override in config["Overrides"]]
    assert places == [(each, subnet) for each in SETTINGS.instance_types for subnet in SETTINGS.subnet_ids]
    assert not [override for override in config["Overrides"] if {"MaxPrice", "Priority"} & override.keys()]
    script = config["LaunchTemplateSpecification"]["LaunchTemplateSpecificationUserData"]
    assert base64.b64decode(script) == b"#cloud-config\n"
    assert [each["ResourceType"] for each in request["TagSpecifications"]] == ["fleet", "instance"]


def test_a_repeated_request_has_the_same_client_token_until_its_outcome_is_known() -> None:
    def token(name: str, request: str, attempt: int, script: str = "") -> str:
        made: str = make_fleet_request(SETTINGS, name, request, attempt, script)["ClientToken"]
        return made

    first = token("varuna-r-000", "r", 0)
    assert first == token("varuna-r-000", "r", 0, "another join token")
    assert (
        len({first, token("varuna-r-001", "r", 0), token("varuna-r-000", "s", 0), token("varuna-r-000", "r", 1)}) == 4
    )
    assert len(first) <= 64


def test_prices_and_priorities_go_with_each_type() -> None:
    changes = {"max_price_per_hour": 2.5, "allocation_strategy": "capacity-optimized-prioritized"}
    request = make_fleet_request(SETTINGS.model_copy(update=changes), "v", "r", 0, "")
    overrides = request["LaunchTemplateConfigs"][0]["Overrides"]
    assert {override["MaxPrice"] for override in overrides} == {"2.5"}
    assert {override["InstanceType"]: override["Priority"] for override in overrides} == {
        "p4d.24xlarge": 0.0,
        "p4de.24xlarge": 1.0,
    }


def test_the_template_has_what_all_instances_share_and_a_name_for_each_content() -> None:
    data = make_template_data(SETTINGS)
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"] is True
    assert "IamInstanceProfile" not in data
    named = SETTINGS.model_copy(update={"instance_profile": "jobs", "key_name": "ops"})
    assert make_template_data(named)["IamInstanceProfile"] == {"Name": "jobs"}
    by_arn = SETTINGS.model_copy(update={"instance_profile": "arn:aws:iam::1:instance-profile/jobs"})
    assert make_template_data(by_arn)["IamInstanceProfile"] == {"Arn": "arn:aws:iam::1:instance-profile/jobs"}
    assert len({name_template(settings) for settings in (SETTINGS, named, by_arn)}) == 3
    assert name_template(SETTINGS.model_copy(update={"instance_types": ("p3.2xlarge",)})) == name_template(SETTINGS)


def test_the_user_data_fits_and_its_agent_asks_awss_metadata_service() -> None:
    origin = Origin(managers="10.0.0.10:8751", urls=("https://10.0.0.10:8750",), ca_pem="x" * 2000)
    document = render_cloud_init(origin, describe_machine(SETTINGS, "varuna-r-000"), f"vj1.a.b.{'0' * 64}")
    assert len(document.encode()) <= MOST_USER_DATA
    files = {file["path"]: file["content"] for file in yaml.safe_load(document)["write_files"]}
    flags = files["/etc/varuna/agent.env"]
    assert {"--notices=aws", "--gpus=8", f"--device-memory-bytes={40 << 30}"} <= set(flags.split())
    leaving = SETTINGS.model_copy(update={"on_rebalance": "leave"})
    assert describe_machine(leaving, "v").notices == "aws-rebalance"


# ---------------------------------------------------------------- what it makes of the answers


async def test_an_instance_is_spot_and_carries_its_name_its_fleet_and_its_request(bench: Ec2Bench) -> None:
    created = await bench.provider.create(1, "r")
    (instance,) = bench.plain.describe_instances()["Reservations"][0]["Instances"]
    assert instance["InstanceLifecycle"] == "spot"
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert tags == {"Name": "varuna-r-000", "varuna-fleet": "varuna", "varuna-request": "r"}
    assert created.vms[0].ref["type"] == instance["InstanceType"] == "p3.2xlarge"
    data = bench.plain.describe_instance_attribute(InstanceId=instance["InstanceId"], Attribute="userData")
    assert base64.b64decode(data["UserData"]["Value"]).decode() == "#cloud-config\n# varuna-r-000\n"


async def test_one_template_serves_all_requests_and_managers(bench: Ec2Bench) -> None:
    await bench.provider.create(1, "r")
    await bench.restart_provider()
    await bench.provider.create(1, "s")
    (template,) = bench.plain.describe_launch_templates()["LaunchTemplates"]
    assert template["LaunchTemplateName"] == name_template(bench.settings)


async def test_an_instance_that_aws_does_not_list_yet_is_there_for_two_minutes(bench: Ec2Bench) -> None:
    bench.hides_instances = True
    created = await bench.provider.create(1, "r")
    assert [vm.id for vm in created.vms] == ["varuna-r-000"]
    assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-000"]
    bench.hides_instances = False
    assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-000"]
    bench.hides_instances = True
    assert list(await bench.provider.list()) == [], "AWS listed it, and does so no longer"
    await bench.provider.create(1, "s")
    bench.now += 120.0
    assert list(await bench.provider.list()) == []


async def test_the_fleet_learns_where_an_instance_is_when_aws_lists_it(bench: Ec2Bench, tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        database, bell, registry = world.database, Bell(), VmRegistry()
        fleet = FleetService(database, world.events, registry, bench.provider, world.reports, bell)
        controller = FleetController(database, World(database, registry), fleet, world.events, bell, FleetSettings())

        async def look(is_complete: bool) -> VmRow | None:
            await controller.reconcile_once()
            async with database.read() as session:
                row = await session.scalar(select(VmRow))
            return row if row is not None and bool(row.zone) is is_complete else None

        bench.hides_instances = True
        await fleet.set_target(1)
        early = await until(lambda: look(False), "the instance")
        assert (early.zone, early.machine_type, early.ref.keys()) == (None, None, {"id"})
        bench.hides_instances = False
        late = await until(lambda: look(True), "its zone")
        assert (late.machine_type, late.ref) == ("p3.2xlarge", {**early.ref, "type": "p3.2xlarge", "zone": late.zone})
        await controller.close()


async def test_after_a_refusal_one_instance_is_tried_first(bench: Ec2Bench) -> None:
    await bench.refuse_creations(RefusalKind.CAPACITY, 0)
    for request, asked in (("r", 4), ("s", 5), ("t", 6)):
        assert (await bench.provider.create(4, request)).refusal is not None
        assert len(bench.requests) == asked
    assert {*bench.provider._attempts} == {"varuna-t-000"}, "it remembers no request that is over"
    await bench.end_refusals()
    assert len((await bench.provider.create(4, "t")).vms) == 4
    await bench.refuse_creations(RefusalKind.CAPACITY, 1)
    created = await bench.provider.create(3, "u")
    assert (len(created.vms), len(bench.requests)) == (1, 6 + 4 + 3), "what was made is asked for as a whole"


async def test_a_deleted_instance_is_deleted_before_aws_lists_it(bench: Ec2Bench) -> None:
    bench.hides_instances = True
    await bench.provider.create(1, "r")
    await bench.provider.delete(["varuna-r-000"])
    assert bench.list_instances() == [("varuna-r-000", "terminated")]
    assert list(await bench.provider.list()) == []


async def test_an_instance_that_shuts_down_is_going(bench: Ec2Bench) -> None:
    await bench.provider.create(2, "r")
    bench.set_state("varuna-r-000", "shutting-down")
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    created = await bench.provider.create(2, "r")
    assert sorted(vm.id for vm in created.vms) == ["varuna-r-001", "varuna-r-002"]


async def test_an_instance_that_has_stopped_by_itself_is_terminated(bench: Ec2Bench) -> None:
    await bench.provider.create(2, "r")
    bench.set_state("varuna-r-000", "stopping")
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    assert dict(bench.list_instances())["varuna-r-000"] == "stopping", "it may still be about to be terminated"
    bench.set_state("varuna-r-000", "stopped")
    assert {vm.id: vm.going for vm in await bench.provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    assert dict(bench.list_instances())["varuna-r-000"] == "terminated"
    assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-001"]


async def test_a_list_that_was_begun_before_another_does_not_hide_what_that_one_has(aws: None) -> None:
    async with open_ec2_bench(list_every_s=3600.0) as bench:
        assert [vm.id for vm in (await create_beside_held_list(bench.provider)).vms] == ["varuna-r-000"]
        assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-000"]


async def test_creations_that_take_long_hold_up_neither_a_list_nor_other_work(bench: Ec2Bench) -> None:
    created = await list_beside_held_creations(bench.provider, bench.provider._client, "create_fleet", at_once=8)
    assert (created.refusal, len(created.vms)) == (None, 8)


async def test_prices_are_those_of_the_market(bench: Ec2Bench) -> None:
    assert (await bench.provider.get_offer()).price_per_hour == 0.00001
    created = await bench.make_provider(needs_prices=True).create(1, "r")
    assert created.refusal is None


async def test_the_first_list_of_a_manager_has_the_prices_of_the_market(
    bench: Ec2Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings = bench.settings.model_copy(update={"price_per_hour": 1.5})
    (made,) = (await bench.provider.create(1, "r")).vms
    place = (made.machine_type, made.zone)
    monkeypatch.setattr("varuna_manager.providers.ec2.fetch_spot_prices", lambda *_: {place: 0.25})
    assert [vm.price_per_hour for vm in await bench.make_provider().list()] == [0.25]


async def test_without_prices_a_fleet_with_a_limit_of_cost_gets_no_vm(bench: Ec2Bench) -> None:
    bench.settings = bench.settings.model_copy(update={"instance_types": ("x9.unknown",)})
    created = await bench.make_provider(needs_prices=True).create(1, "r")
    assert created.refusal is not None
    assert "give price_per_hour in the settings" in created.refusal.reason
    bench.settings = bench.settings.model_copy(update={"price_per_hour": 1.5})
    assert (await bench.make_provider(needs_prices=True).get_offer()).price_per_hour == 1.5


async def test_listings_are_as_rare_as_the_settings_say(aws: None) -> None:
    async with open_ec2_bench(list_every_s=2.0) as bench:
        await bench.provider.create(1, "r")
        await bench.take_vm("varuna-r-000", 0.0)
        assert len(await bench.provider.list()) == 1
        bench.now += 2.0
        assert list(await bench.provider.list()) == []


async def test_a_vm_is_preempted_without_notice_only(bench: Ec2Bench) -> None:
    await bench.provider.create(2, "r")
    await bench.provider.preempt_vm("varuna-r-000", 0.0)
    assert [vm.id for vm in await bench.provider.list()] == ["varuna-r-001"]
    with pytest.raises(UnknownVmError, match="no VM 'varuna-r-000' in the fleet varuna"):
        await bench.provider.preempt_vm("varuna-r-000", 0.0)
    with pytest.raises(UnsupportedByProviderError, match="Fault Injection Service"):
        await bench.provider.preempt_vm("varuna-r-001", 30.0)


def fleet_error(code: str) -> dict[str, Any]:
    return {"ErrorCode": code, "ErrorMessage": f"{code}.\nmore", "Lifecycle": "spot"}


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["InsufficientInstanceCapacity"], RefusalKind.CAPACITY),
        (["UnfulfillableCapacity"], RefusalKind.CAPACITY),
        (["SpotMaxPriceTooLow"], RefusalKind.CAPACITY),
        (["MaxSpotInstanceCountExceeded"], RefusalKind.QUOTA),
        (["VcpuLimitExceeded"], RefusalKind.QUOTA),
        (["RequestLimitExceeded"], RefusalKind.THROTTLED),
        (["InvalidFleetConfiguration"], RefusalKind.FAILED),
        (["InvalidFleetConfiguration", "InsufficientInstanceCapacity"], RefusalKind.CAPACITY),
        (["MaxSpotInstanceCountExceeded", "InsufficientInstanceCapacity"], RefusalKind.CAPACITY),
        ([], RefusalKind.CAPACITY),
    ],
)
def test_a_fleets_errors_are_told_apart(codes: list[str], kind: RefusalKind) -> None:
    refusal = parse_fleet_errors([fleet_error(code) for code in codes])
    assert refusal.kind is kind
    assert "\n" not in refusal.reason


def test_errors_of_the_sdk_are_refusals() -> None:
    throttled = {"Error": {"Code": "RequestLimitExceeded", "Message": "Request limit exceeded."}}
    assert parse_error(ClientError(throttled, "CreateFleet")).kind is RefusalKind.THROTTLED
    forbidden = {"Error": {"Code": "UnauthorizedOperation", "Message": "You are not authorized."}}
    refusal = parse_error(ClientError(forbidden, "CreateFleet"))
    assert (refusal.kind, refusal.reason) == (RefusalKind.FAILED, "UnauthorizedOperation: You are not authorized.")
    assert "AWS cannot be reached: Unable to locate credentials" in parse_error(NoCredentialsError()).reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": "Europe"}, "region 'Europe'"),
        ({"image_id": "ubuntu"}, "image_id 'ubuntu'"),
        ({"instance_types": []}, "instance_types"),
        ({"allocation_strategy": "cheapest"}, "allocation_strategy 'cheapest'"),
        ({"gpus": 0}, "gpus 0"),
    ],
)
def test_wrong_settings_are_told_in_one_line(tmp_path: Any, changes: dict[str, Any], message: str) -> None:
    from varuna_manager.providers.ec2_settings import read_ec2_settings

    path = tmp_path / "ec2.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS.model_dump(mode="json"), **changes}))
    with pytest.raises(ValueError, match=r"ec2\.yaml: ") as raised:
        read_ec2_settings(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
