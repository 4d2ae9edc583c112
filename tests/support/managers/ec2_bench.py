"""The EC2 provider with AWS's own SDK against moto, an EC2 in this process.

moto makes instances for a fleet request as EC2 does, but always has capacity, answers at once, and ignores client
tokens. So this bench stands between the SDK and moto: it refuses in EC2's own words, loses answers, and answers a
repeated client token as it did before.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs

import boto3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.models import botocore_stubber
from moto.ec2.models import ec2_backends

from varuna_manager.providers.base import RefusalKind
from varuna_manager.providers.conformance import ProviderBench
from varuna_manager.providers.ec2 import Ec2Provider
from varuna_manager.providers.ec2_settings import Ec2Settings

REGION = "eu-west-1"
_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
_NO_INSTANCES = (
    f'<DescribeInstancesResponse xmlns="{_NAMESPACE}"><requestId>r</requestId><reservationSet/>'
    "</DescribeInstancesResponse>"
).encode()
_PAUSES_S = 3600.0
_CODES = {
    RefusalKind.CAPACITY: (
        "InsufficientInstanceCapacity",
        "There is no Spot capacity available that matches your request.",
    ),
    RefusalKind.QUOTA: ("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded"),
}


class Ec2Bench(ProviderBench):
    refusals = frozenset({RefusalKind.CAPACITY, RefusalKind.QUOTA, RefusalKind.THROTTLED})

    def __init__(self, **changes: Any) -> None:
        self.plain = self._make_client()
        """Reaches moto without disturbances."""
        subnets = self.plain.describe_subnets()["Subnets"][:2]
        groups = self.plain.describe_security_groups()["SecurityGroups"][:1]
        settings = Ec2Settings(
            region=REGION,
            instance_types=("p3.2xlarge", "g5.xlarge"),
            gpus=1,
            image_id=self.plain.register_image(Name=uuid.uuid4().hex, RootDeviceName="/dev/sda1")["ImageId"],
            subnet_ids=tuple(subnet["SubnetId"] for subnet in subnets),
            security_group_ids=tuple(group["GroupId"] for group in groups),
            list_every_s=0,
        )
        self.settings = settings.model_copy(update=changes)
        self.now = 1000.0
        self.requests: list[dict[str, Any]] = []
        self.granted: int | None = None
        self.refusal = RefusalKind.CAPACITY
        self.is_cut_off = False
        self.hides_instances = False
        """The list has no instance yet."""
        self._loses_answer = False
        self._answers: dict[str, tuple[int, bytes]] = {}
        """By client token."""
        self._lock = threading.RLock()  # moto is not made for threads
        self._providers: list[Ec2Provider] = []
        self.provider: Ec2Provider = self.make_provider()

    def make_provider(self, **options: Any) -> Ec2Provider:
        client = self._make_client()
        client.meta.events.unregister("before-send", botocore_stubber)
        client.meta.events.register("before-send.ec2", self._answer)
        client.meta.events.register("before-parameter-build.ec2.CreateFleet", self._note_request)
        made = Ec2Provider(self.settings, client, _make_boot_script, now=lambda: self.now, **options)
        self._providers.append(made)
        return made

    def _make_client(self) -> Any:
        return boto3.client("ec2", region_name=REGION, config=Config(retries={"total_max_attempts": 1}))

    async def close(self) -> None:
        for provider in self._providers:
            await provider.close(end_vms=False)
        self.plain.close()

    # ------------------------------------------------------------ between the SDK and moto

    def _note_request(self, params: dict[str, Any], **event: Any) -> None:
        self.requests.append(params)

    def _answer(self, request: AWSPreparedRequest, **event: Any) -> AWSResponse:
        fields = parse_qs(request.body if isinstance(request.body, str) else request.body.decode())
        with self._lock:
            if self.is_cut_off:
                raise EndpointConnectionError(endpoint_url=request.url)
            if fields["Action"] == ["CreateFleet"]:
                status, body = self._create_fleet(fields["ClientToken"][0], request)
            elif fields["Action"] == ["DescribeInstances"] and self.hides_instances:
                status, body = 200, _NO_INSTANCES
            else:
                status, body = _pass_on(request)
            return AWSResponse(request.url, status, {}, _Raw(body))  # type: ignore[arg-type] # as moto does

    def _create_fleet(self, token: str, request: AWSPreparedRequest) -> tuple[int, bytes]:
        if self.granted is not None and self.refusal is RefusalKind.THROTTLED:
            return 503, _render_error("RequestLimitExceeded", "Request limit exceeded.")
        if token not in self._answers:
            if self.granted == 0:
                self._answers[token] = 200, _render_fleet_errors(*_CODES[self.refusal])
            else:
                self._answers[token] = _pass_on(request)
                if self.granted is not None:
                    self.granted -= 1
        if self._loses_answer:
            self.is_cut_off = True
            raise EndpointConnectionError(endpoint_url=request.url)
        return self._answers[token]

    # ------------------------------------------------------------ ProviderBench

    async def restart_provider(self) -> None:
        self.provider = self.make_provider()

    async def list_real_vms(self) -> Collection[str]:
        return {name for name, state in self.list_instances() if state != "terminated"}

    def list_instances(self) -> Sequence[tuple[str, str]]:
        """Name and state of all instances of the fleet."""
        filters = [{"Name": "tag:varuna-fleet", "Values": [self.settings.fleet]}]
        reservations = self.plain.describe_instances(Filters=filters)["Reservations"]
        instances = [instance for reservation in reservations for instance in reservation["Instances"]]
        return [(_name(instance), instance["State"]["Name"]) for instance in instances]

    def set_state(self, name: str, state: str) -> None:
        """moto ends instances at once, and EC2 does not."""
        instances = ec2_backends[DEFAULT_ACCOUNT_ID][REGION].all_instances()
        (instance,) = [each for each in instances if name in {tag["value"] for tag in each.get_tags()}]
        instance._state.name = state

    async def lose_next_answer(self) -> None:
        self._loses_answer = True

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        self.granted, self.refusal = granted, kind

    async def end_refusals(self) -> None:
        self.granted = None
        self.now += _PAUSES_S

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        filters = [{"Name": "tag:Name", "Values": [vm_id]}]
        (reservation,) = self.plain.describe_instances(Filters=filters)["Reservations"]
        self.plain.terminate_instances(InstanceIds=[reservation["Instances"][0]["InstanceId"]])

    async def cut_off(self) -> None:
        self.is_cut_off = True

    async def reconnect(self) -> None:
        self.is_cut_off = self._loses_answer = False

    async def add_stranger(self) -> str | None:
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": "stranger"}]}]
        self.plain.run_instances(ImageId=self.settings.image_id, MinCount=1, MaxCount=1, TagSpecifications=tags)
        return "stranger"

    async def list_leftovers(self) -> Sequence[str]:
        return [volume["VolumeId"] for volume in self.plain.describe_volumes()["Volumes"] if not volume["Attachments"]]


@contextmanager
def mock_ec2() -> Iterator[None]:
    """moto, empty, in the place of AWS. Loading its images takes a second."""
    with patch.dict(os.environ, {"MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}), mock_aws():
        yield


@asynccontextmanager
async def open_ec2_bench(**changes: Any) -> AsyncIterator[Ec2Bench]:
    """Use it within `mock_ec2`."""
    bench = Ec2Bench(**changes)
    try:
        yield bench
    finally:
        await bench.close()


class _Raw(BytesIO):
    def stream(self, **options: Any) -> Any:
        yield self.read()


async def _make_boot_script(name: str) -> str:
    return f"#cloud-config\n# {name}\n"


def _pass_on(request: AWSPreparedRequest) -> tuple[int, bytes]:
    """moto's answer."""
    answer = botocore_stubber.process_request(request)
    assert answer is not None
    status, _, body = answer
    return status, body if isinstance(body, bytes) else body.encode()


def _name(instance: dict[str, Any]) -> str:
    return next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "Name")


def _render_error(code: str, message: str) -> bytes:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>".encode()


def _render_fleet_errors(code: str, message: str) -> bytes:
    item = f"<errorCode>{code}</errorCode><errorMessage>{message}</errorMessage><lifecycle>spot</lifecycle>"
    return (
        f'<CreateFleetResponse xmlns="{_NAMESPACE}"><requestId>r</requestId><fleetId>fleet-1</fleetId>'
        f"<errorSet><item>{item}</item></errorSet><fleetInstanceSet/></CreateFleetResponse>"
    ).encode()
