"""`varuna manager` whose AWS is moto in its own process.

It writes each request for an instance into a folder, the first argument, as a file with the VM's name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ec2_bench import REGION, mock_ec2
from varuna_manager.main import main
from varuna_manager.providers import ec2

folder = Path(sys.argv.pop(1))
make_client = ec2.make_ec2_client
subnets: list[str] = []


def make_noted_client(settings: Any) -> Any:
    assert settings.region == REGION
    client = make_client(settings)
    subnets.extend(subnet["SubnetId"] for subnet in client.describe_subnets()["Subnets"])
    client.meta.events.register("before-parameter-build.ec2.CreateFleet", note_request)
    return client


def note_request(params: dict[str, Any], **event: Any) -> None:
    tags = {tag["Key"]: tag["Value"] for tag in params["TagSpecifications"][1]["Tags"]}
    part = folder / f"{tags['Name']}.part"
    part.write_text(json.dumps(params))
    part.rename(folder / tags["Name"])
    for override in params["LaunchTemplateConfigs"][0]["Overrides"]:
        override["SubnetId"] = subnets[0]  # moto names its own


ec2.make_ec2_client = make_noted_client
with mock_ec2():
    sys.exit(main(sys.argv[1:]))
