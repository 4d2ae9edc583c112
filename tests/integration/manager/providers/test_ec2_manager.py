"""A manager with instances of EC2: the user data of one lets an agent join, and the instance is given back.

EC2 is moto, in the manager's process. The agent is started here, with the flags of the user data.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ec2_bench import REGION
from repository import WORKERS
from secure_world import secure_manager
from waiting import DEADLINE_S, wait_until

SETTINGS = {
    "region": REGION,
    "instance_types": ["p3.2xlarge"],
    "gpus": 1,
    "image_id": "ami-0123456789abcdef0",
    "subnet_ids": ["subnet-a"],
    "security_group_ids": ["sg-a"],
    "device": "cpu",
    "list_every_s": 0.2,
}


@pytest.mark.xdist_group("ec2")
@pytest.mark.parametrize("pool", [None, pytest.param("aws-1", marks=pytest.mark.slow)])
def test_an_instances_user_data_lets_its_agent_join(tmp_path: Path, pool: str | None) -> None:
    """Also as a pool of a fleet."""
    settings, requests, wheels = tmp_path / "ec2.yaml", tmp_path / "requests", tmp_path / "wheels"
    settings.write_text(yaml.safe_dump(SETTINGS))
    requests.mkdir()
    wheels.mkdir()
    (wheels / "varuna_spot-0.whl").touch()  # nobody fetches it: the agent is installed here
    fleet, provider = tmp_path / "fleet.yaml", f"ec2:{settings}"
    if pool is not None:
        fleet.write_text(yaml.safe_dump({"pools": [{"name": pool, "provider": "ec2:ec2.yaml", "price_per_hour": 1.0}]}))
        provider = f"pools:{fleet}"
    flags = ("--provider", provider, "--agent-wheel", str(wheels))
    program = (str(WORKERS / "manager_on_fake_ec2.py"), str(requests))
    with secure_manager(tmp_path / "data", *flags, program=program) as manager:
        admin = manager.admin()
        assert admin.put("/fleet", json={"target": 1}).status_code == 200
        (request,) = wait_until(lambda: [path for path in requests.iterdir() if not path.suffix], "a request")
        agent = start_agent(tmp_path / "vm", request)
        try:

            def states() -> dict[str, str]:
                return {vm["id"]: vm["state"] for vm in admin.get("/vms", params={"gone": True}).json()}

            wait_until(lambda: states() == {request.name: "ready"}, "the agent")
            assert admin.get(f"/vms/{request.name}").json()["pool"] == pool
            assert [one["vms"] for one in admin.get("/fleet").json()["pools"]] == ([] if pool is None else [1])
            assert admin.put("/fleet", json={"target": 0}).status_code == 200
            wait_until(lambda: states() == {request.name: "gone"}, "the instance is given back")
            assert agent.wait(DEADLINE_S) == 0, (tmp_path / "vm" / "agent.log").read_text()
        finally:
            agent.kill()
            agent.wait()


def start_agent(folder: Path, request: Path) -> subprocess.Popen[bytes]:
    """As the unit of its user data does, apart from the user of its jobs."""
    (config,) = json.loads(request.read_text())["LaunchTemplateConfigs"]
    user_data = base64.b64decode(config["LaunchTemplateSpecification"]["LaunchTemplateSpecificationUserData"])
    files = {file["path"]: file["content"] for file in yaml.safe_load(user_data)["write_files"]}
    folder.mkdir()
    (folder / "token").write_text(files["/etc/varuna/join-token"])
    flags = files["/etc/varuna/agent.env"].strip().partition("=")[2].split()
    kept = [flag for flag in flags if not flag.startswith(("--run-as", "--notices", "--join-token-file"))]
    command = [sys.executable, "-m", "varuna_agent.main", "--vm-dir", str(folder / "state"), *kept]
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--join-token-file", str(folder / "token")], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
