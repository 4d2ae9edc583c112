"""`varuna profile` without a fleet: the schema, whether two profiles are of one model, and what `run` submits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from varuna_client.cli import app
from varuna_client.errors import UserError
from varuna_client.planning.profile_run import profiling_job
from varuna_manager.domain.spec import JobSpec
from varuna_planner.profile.document import Measurement, Profile, SectionProfile


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["profile", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def write(path: Path, *names: str) -> str:
    times = {"forward_us": 1.0, "backward_us": 2.0, "recompute_us": 1.0}
    measured = Measurement(micro_batch=1, output_bytes=1, input_bytes=1, activation_bytes=1, **times)
    state = {"parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 1}
    sections = tuple(
        SectionProfile(index=i, name=name, measurements=(measured,), **state) for i, name in enumerate(names)
    )
    path.write_text(Profile(sections=sections).to_json())
    return str(path)


def test_the_schema_is_that_of_the_documents() -> None:
    assert json.loads(run("schema"))["properties"]["schema"]["const"] == "varuna.profile/1"


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    one, other = write(tmp_path / "P.json", "a", "b"), write(tmp_path / "Q.json", "a", "c")
    assert "valid, 2 sections" in run("validate", one, "--against", one)
    with pytest.raises(
        UserError, match=r"of another model than .*: section 1 is 'b' in this profile and 'c' in the model"
    ):
        run("validate", one, "--against", other)


def test_the_job_that_only_profiles_has_a_name_beside_the_others() -> None:
    spec = {"name": "n" * 63, "workdir": "/", "run": "true", "global_batch": 4}
    made = JobSpec.model_validate(profiling_job(spec))
    assert made.name == "n" * 55 + "-profile"
    assert made.profile_only
    assert profiling_job({**spec, "name": "gpt"})["name"] == "gpt-profile"
