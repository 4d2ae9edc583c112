"""`varuna plan --fleet`: what each pool gives, and what would be asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from varuna_client.cli import app
from varuna_client.errors import UserError
from varuna_planner.profile.document import Measurement, Profile, SectionProfile
from varuna_planner.profile.speed import scale_speed

V100 = {"name": "v100", "provider": "ec2:v100.yaml", "gpu_type": "V100", "price_per_hour": 0.9, "zone": "us-east-1a"}
A100 = {**V100, "name": "a100", "gpu_type": "A100", "price_per_hour": 1.5, "relative_speed": 2.5}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Four sections without messages of any size."""
    sections = tuple(
        SectionProfile(
            index=index, name=f"block.{index}", parameter_bytes=1000, gradient_bytes=1000, optimizer_bytes=2000,
            measurements=(
                Measurement(
                    micro_batch=1, forward_us=1e5, backward_us=2e5, recompute_us=1e5, output_bytes=100, input_bytes=100,
                    activation_bytes=1000,
                ),
            ),
        )
        for index in range(4)
    )  # fmt: skip
    path = tmp_path / "P.json"
    path.write_text(Profile(sections=sections).to_json())
    return path


def ask(profile: Path, *pools: dict[str, Any], gpus: int = 4, more: tuple[str, ...] = ()) -> str:
    fleet = profile.parent / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"pools": [*pools]}))
    words = ["plan", "--profile", profile, "--fleet", fleet, "--gpus", gpus, "--global-batch", 64, *more]
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def ask_json(profile: Path, *pools: dict[str, Any], gpus: int = 4) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(profile, *pools, gpus=gpus, more=("--json",)))
    return found


def test_each_pool_is_shown_with_its_rate_and_what_a_million_examples_cost(profile: Path) -> None:
    found = ask_json(profile, V100, A100)
    slow, fast = found["pools"]
    assert fast["examples_per_s"] == pytest.approx(2.5 * slow["examples_per_s"], rel=0.01)
    for pool in (slow, fast):
        assert pool["vms"] == 4
        dollars = pool["price_per_hour"] / 3600 / pool["examples_per_s"] * 1e6
        assert pool["dollars_per_million_examples"] == pytest.approx(dollars)
    assert found["mix"]["vms"] == {"a100": 4}
    assert found["mix"]["dollars_per_million_examples"] == pytest.approx(fast["dollars_per_million_examples"])
    assert found["best"]["examples_per_s"] == pytest.approx(fast["examples_per_s"])
    assert found["best"]["p"] * found["best"]["d"] <= 4


def test_the_mix_is_spread_over_pools_of_one_type(profile: Path) -> None:
    other = {**V100, "name": "v100-b", "provider": "ec2:b.yaml", "zone": "us-east-1b"}
    found = ask_json(profile, V100, other, {**A100, "price_per_hour": 9.0})
    assert found["mix"]["vms"] == {"v100": 2, "v100-b": 2}
    assert found["mix"]["price_per_hour"] == pytest.approx(4 * 0.9)
    assert found["replicas_by_zone"].keys() == {"us-east-1a", "us-east-1b"}
    assert sum(found["replicas_by_zone"].values()) == found["best"]["d"]


def test_a_pool_gives_no_more_than_it_may_have(profile: Path) -> None:
    found = ask_json(profile, {**V100, "max_vms": 3}, {**A100, "max_vms": 0})
    assert found["mix"]["vms"] == {"v100": 3}
    assert [pool["vms"] for pool in found["pools"]] == [3, 0]
    assert found["pools"][1]["why_none"] == "it may have no VM"


def test_pools_of_several_types_make_one_plan_where_none_suffices(profile: Path) -> None:
    found = ask_json(profile, {**V100, "max_vms": 2}, {**A100, "max_vms": 2})
    assert found["mix"]["vms"] == {"a100": 2, "v100": 2}
    best = found["best"]
    assert sorted(best["gpu_types"]) == ["A100", "A100", "V100", "V100"]
    alone = max(pool["examples_per_s"] for pool in found["pools"])
    assert best["examples_per_s"] == pytest.approx(alone * (2 + 5) / 5, rel=0.1)
    text = ask(profile, {**V100, "max_vms": 2}, {**A100, "max_vms": 2})
    assert f"over {best['types']}" in text


def test_people_get_a_table(profile: Path) -> None:
    text = ask(profile, V100, A100)
    assert "per million examples" in text.splitlines()[0]
    assert "asking for 4 of a100 (" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["POOL", "ZONE", "GPU", "SPEED", "$/H", "VMS", "P×D", "EX/S", "$/M", "EX", "CHOSEN"] in rows
    assert any(row[:5] == ["v100", "us-east-1a", "V100", "1", "0.9"] and row[-1] == "0" for row in rows)


def test_wrong_input_is_told_in_one_line(profile: Path) -> None:
    with pytest.raises(UserError, match=r"fleet\.yaml: pools\.0\.price_per_hour -1"):
        ask(profile, {**V100, "price_per_hour": -1})
    with pytest.raises(UserError, match=r"no VM can be asked for .*raise max_vms of a pool"):
        ask(profile, {**V100, "max_vms": 0})
    with pytest.raises(UserError, match="--fleet compares pools by price and speed"):
        ask(profile, V100, more=("--hazard", "1", "--morph-s", "3"))


def test_a_profile_scales_with_the_speed_of_the_gpu(profile: Path) -> None:
    one = Profile.from_json(profile.read_text())
    twice = scale_speed(one, 2.0)
    assert twice.sections[0].measurements[0].backward_us == 1e5
    assert twice.links == one.links
    assert scale_speed(one, 1.0) is one
    with pytest.raises(ValueError, match=r"relative speed 0\.0: it must be above 0"):
        scale_speed(one, 0.0)
