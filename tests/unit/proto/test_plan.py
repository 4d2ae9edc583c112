"""One plan, in all the forms in which it travels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.plan_message import make_plan_spec, parse_plan_spec
from varuna_proto.v1 import agent_pb2 as pb

PLAN = Plan(
    p=2,
    d=3,
    micro_batch=4,
    global_batch=48,
    stage_starts=(0, 5),
    policy="varuna",
    run_ahead=7,
    recompute=(True, False),
    predicted_minibatch_s=1.5,
    examples_per_s=32.0,
    memory_bytes=(10, 20),
    shares=(6, 4, 2),
    gpu_types=("V100", "A100", "V100", "A100", "V100", "A100"),
    link_connections=4,
)
SENT = replace(PLAN, predicted_minibatch_s=0.0, examples_per_s=0.0, memory_bytes=(), gpu_types=())
"""Workers need neither predictions nor the types of GPUs."""


def test_every_field_of_the_example_differs_from_its_default() -> None:
    plain = asdict(Plan(p=1, d=1, micro_batch=1, global_batch=1))
    assert all(value != plain[name] for name, value in asdict(PLAN).items())


def test_a_plan_comes_back_from_its_document() -> None:
    assert Plan.from_document(PLAN.to_document()) == PLAN


def test_a_document_of_an_earlier_version_lacks_what_came_later() -> None:
    later = ("shares", "gpu_types", "link_connections")
    document = {name: value for name, value in PLAN.to_document().items() if name not in later}
    assert Plan.from_document(document) == replace(PLAN, shares=(), gpu_types=(), link_connections=1)


def test_a_plan_comes_back_from_its_message_without_predictions() -> None:
    assert parse_plan_spec(make_plan_spec(PLAN)) == SENT


def test_what_a_message_leaves_out_has_its_default() -> None:
    assert parse_plan_spec(pb.PlanSpec(p=1, d=1)) == Plan(p=1, d=1, micro_batch=0, global_batch=0)


def test_a_plan_comes_back_from_a_workers_environment_without_predictions() -> None:
    alone = replace(WorkerEnvironment.alone("job", micro_batch=1, global_batch=1), plan=PLAN, world_size=6)
    parsed = WorkerEnvironment.from_environ(alone.to_environ())
    assert parsed is not None
    assert parsed.plan == SENT


@pytest.mark.processes
def test_the_plan_and_the_environment_need_the_standard_library_only() -> None:
    loaded = (
        "import varuna_proto.environment, sys; print({'numpy', 'numba', 'torch', 'google.protobuf'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
