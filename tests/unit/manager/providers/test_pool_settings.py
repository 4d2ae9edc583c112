"""FLEET.yaml: what is read from it, and how a mistake in it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from varuna_manager.domain.pools import PoolTerms
from varuna_manager.providers.choice import check_choice, get_agent_start, get_request_timeout_s
from varuna_manager.providers.kind import CLOUD_REQUEST_TIMEOUT_S, AgentStart
from varuna_manager.providers.pools.kind import read_fleet_settings

EC2 = """
region: us-east-1
instance_types: [p3.2xlarge]
gpus: 1
image_id: ami-0123456789abcdef0
subnet_ids: [subnet-a]
security_group_ids: [sg-a]
"""
POOL = {"name": "aws-1a", "provider": "ec2:aws.yaml", "price_per_hour": 0.9}


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    for name in ("aws.yaml", "other.yaml"):
        (tmp_path / name).write_text(EC2)
    return tmp_path / "fleet.yaml"


def write(path: Path, *pools: dict[str, object]) -> str:
    path.write_text(yaml.safe_dump({"pools": [*pools]}))
    return f"pools:{path}"


def test_pools_are_read_with_their_files_beside_the_fleets(fleet: Path) -> None:
    more = {"zone": "us-east-1a", "machine_type": "p3.2xlarge", "gpu_type": "V100", "relative_speed": 2, "max_vms": 8}
    chosen = write(fleet, {**POOL, **more}, {**POOL, "name": "aws-1b", "provider": "ec2:other.yaml"})
    assert check_choice(chosen) == chosen
    first, second = read_fleet_settings(fleet).pools
    assert first.provider == f"ec2:{fleet.parent / 'aws.yaml'}"
    assert first.make_terms() == PoolTerms(name="aws-1a", price_per_hour=0.9, **more)  # type: ignore[arg-type]
    assert second.make_terms() == PoolTerms(name="aws-1b", price_per_hour=0.9)


def test_a_fleet_needs_what_its_pools_need(fleet: Path) -> None:
    chosen = write(fleet, POOL)
    assert get_agent_start(chosen) is AgentStart.FROM_MANAGER
    assert get_request_timeout_s(chosen) == CLOUD_REQUEST_TIMEOUT_S


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([], "pools: Tuple should have at least 1 item"),
        ([{**POOL, "name": "Aws"}], r"pools\.0\.name 'Aws': String should match"),
        ([{**POOL, "name": "a" * 32}], r"pools\.0\.name 'a+': String should match"),
        ([POOL, {**POOL, "provider": "ec2:other.yaml"}], "pool 'aws-1a' occurs twice: give each pool a name"),
        ([POOL, {**POOL, "name": "b", "provider": "ec2:./aws.yaml"}], "pools aws-1a and b have the same provider"),
        ([{**POOL, "provider": "ec2"}], r"pools\.0\.provider 'ec2': expected KIND:FILE"),
        ([{**POOL, "provider": "local"}], "VMs of 'local' cannot be a pool: name another provider"),
        ([{**POOL, "provider": "pools:f.yaml"}], "VMs of 'pools' cannot be a pool"),
        ([{**POOL, "provider": "cloud:x"}], "pool aws-1a, provider cloud:x: expected local, replay"),
        ([{**POOL, "provider": "ec2:no.yaml"}], "pool aws-1a, provider ec2:no.yaml: .*no.yaml: No such file"),
        ([{**POOL, "price_per_hour": -1}], r"pools\.0\.price_per_hour -1: Input should be greater"),
        ([{**POOL, "relative_speed": 0}], r"pools\.0\.relative_speed 0: Input should be greater than 0"),
        ([{**POOL, "max_vms": -1}], r"pools\.0\.max_vms -1"),
        ([{**POOL, "colour": "blue"}], r"pools\.0\.colour 'blue'"),
        ([{"name": "a", "provider": "ec2:aws.yaml"}], r"pools\.0\.price_per_hour: Field required"),
    ],
)
def test_a_mistake_is_told_in_one_line_that_names_the_file(
    fleet: Path, pools: list[dict[str, object]], message: str
) -> None:
    chosen = write(fleet, *pools)
    with pytest.raises(ValueError, match=message) as raised:
        check_choice(chosen)
    assert str(raised.value).startswith(str(fleet))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["pools: 2026-13-45\n", "[" * 5000])
def test_values_that_yaml_cannot_make_are_told_in_one_line_too(fleet: Path, text: str) -> None:
    chosen = write(fleet, POOL)
    fleet.write_text(text)
    with pytest.raises(ValueError, match="not YAML: ") as raised:
        check_choice(chosen)
    assert str(raised.value).startswith(str(fleet))
    assert "\n" not in str(raised.value)
