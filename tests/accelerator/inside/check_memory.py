"""The planner's count of a stage's memory, beside the exact peak of the device that trains it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_end import AgentEnd
from memory_ranks import BATCH, Blocks, make_get_batch, make_optimizer
from repository import TRAINING_SCRIPTS
from simulated import device_of
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.profile import calibrate
from varuna.calibration.subject import CalibrationSubject
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace
from varuna_planner.search.auto_config import Pins, choose_plan
from varuna_proto.plan import Plan

DEVICE = torch.device("sim", 0)
PLENTY = 1 << 40


def make_plan(
    dtype: torch.dtype, optimizer: dict[str, Any], p: int, d: int, micro_batch: int, *, wide: bool = False
) -> Plan:
    """By a calibration on the device."""
    precision, model, get_batch = TrainingPrecision(dtype, "sim"), Blocks(wide=wide), make_get_batch(wide=wide)
    with precision.dry_run_context():
        model_map = trace(model, get_batch(2))
    subject = CalibrationSubject(model, model_map, get_batch, DEVICE, precision)
    setup = OptimizerSetup(make_optimizer(model, optimizer))
    profile = calibrate(subject, setup, global_batch=BATCH, micro_batches=[micro_batch], budget_s=1.0)
    assert profile is not None
    alike = {"forward_us": 1000.0, "backward_us": 2000.0, "recompute_us": 1000.0}  # so the cut does not depend on noise
    sections = [
        section.model_copy(update={"measurements": tuple(one.model_copy(update=alike) for one in section.measurements)})
        for section in profile.sections
    ]
    profile = profile.model_copy(update={"sections": tuple(sections)})
    pins = Pins(p=p, d=d, micro_batch=micro_batch)
    plan = choose_plan(profile, gpus=p * d, global_batch=BATCH, device_memory_bytes=PLENTY, pins=pins).best
    assert plan is not None
    return plan


def measure_peaks(zygote: Zygote, folder: Path, plan: Plan, wanted: dict[str, Any]) -> list[int]:
    """By rank."""
    with ExitStack() as stack:
        ends = [stack.enter_context(AgentEnd()) for _ in range(plan.p * plan.d)]
        ranks = Ranks(
            zygote,
            folder,
            Task(global_batch=BATCH),
            plan.p,
            plan.d,
            micro_batch=plan.micro_batch,
            recompute=plan.recompute,
            run_ahead=plan.run_ahead,
            stage_starts=plan.stage_starts,
            agent_socket=[end.path for end in ends].__getitem__,
            device=device_of,
            wanted=wanted,
            script=TRAINING_SCRIPTS / "memory_ranks.py",
        )
        with ranks as world:
            codes = world.exit_codes()
            assert codes == [0] * len(ends), world.logs()
        return [end.steps()[-1].memory_bytes for end in ends]


def compare_with_peaks(
    zygote: Zygote, folder: Path, shape: tuple[int, int], micro_batch: int, wanted: dict[str, Any]
) -> list[float]:
    """By rank, what was planned as a multiple of the peak. `wanted`: as `memory_ranks` has it."""
    dtype, wide = getattr(torch, wanted["dtype"]), wanted.get("wide", False)
    plan = make_plan(dtype, wanted["optimizer"], *shape, micro_batch, wide=wide)
    peaks = measure_peaks(zygote, folder, plan, wanted)
    ratios = [plan.memory_bytes[rank % plan.p] / peak for rank, peak in enumerate(peaks)]
    print(plan.memory_bytes, peaks, ratios)
    return ratios


@pytest.mark.parametrize(
    ("shape", "dtype", "optimizer", "clip", "micro_batch"),
    [
        pytest.param((1, 1), "float32", {"fused": True}, None, 4, id="plain"),
        pytest.param((1, 1), "bfloat16", {"fused": True}, 0.5, 4, id="autocast, clipped"),
        pytest.param((1, 1), "float32", {"foreach": True}, None, 1, id="foreach"),
        pytest.param((1, 1), "float32", {"foreach": False}, None, 1, id="one by one"),
        pytest.param((1, 2), "float32", {"fused": True}, 0.5, 1, id="replicas"),
        pytest.param((2, 2), "bfloat16", {"foreach": True}, 0.5, 1, id="stages and replicas"),
    ],
)
def test_a_stage_takes_what_was_planned(
    zygote: Zygote,
    tmp_path: Path,
    shape: tuple[int, int],
    dtype: str,
    optimizer: dict[str, Any],
    clip: float | None,
    micro_batch: int,
) -> None:
    wanted = {"dtype": dtype, "optimizer": optimizer, "clip": clip}
    ratios = compare_with_peaks(zygote, tmp_path, shape, micro_batch, wanted)
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.05)


def test_where_all_micro_batches_are_in_flight_a_little_more_is_planned(zygote: Zygote, tmp_path: Path) -> None:
    """Gradients come as the last activations go then, and the planner counts both."""
    wanted = {"dtype": "bfloat16", "optimizer": {"foreach": True}, "clip": 0.5}
    ratios = compare_with_peaks(zygote, tmp_path, (2, 2), 4, wanted)
    assert min(ratios) > 0.95
    assert max(ratios) < 1.12


def test_what_passes_between_stages_is_counted(zygote: Zygote, tmp_path: Path) -> None:
    """The model's inputs, and what a stage has sent, stay until the backward of their micro-batch."""
    wanted = {"dtype": "float32", "optimizer": {"fused": True}, "clip": None, "wide": True}
    ratios = compare_with_peaks(zygote, tmp_path, (4, 1), 1, wanted)
    assert ratios[0] == pytest.approx(1.0, abs=0.08), "it has as many micro-batches in flight as it may have"
    assert min(ratios) > 0.97, "how many the others have depends on the time"
