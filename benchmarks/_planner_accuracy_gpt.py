"""The example GPT's part of `_planner_accuracy.py`: it is calibrated as the manager does it, then it trains, and the
same ranks calibrate again between the steps. The calibrations before and after the compared steps separate the error of
a prediction from changes of the machine.

Run as a script, this is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpt"))

from varuna_planner.profile.document import Profile  # noqa: E402
from varuna_planner.search.auto_config import Pins, choose_plan  # noqa: E402
from varuna_planner.what_if import SimulatedPlan, SimulationRequest, simulate_plan  # noqa: E402
from varuna_proto.environment import Mode, WorkerEnvironment  # noqa: E402
from varuna_proto.plan import Plan  # noqa: E402

SHAPES = ("1x1x2", "1x1x4", "2x1x2", "2x1x4", "1x2x2", "1x2x4")
"""P × D × micro-batch."""
GLOBAL_BATCH = 32
WARM_UP_STEPS = 3
CALIBRATION_S = 2.0
"""Budget of each calibration between steps."""
RANK_LIMIT_S = 600

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class TrainingRun:
    """The measurements of the ranks of one shape."""

    profiles: list[Profile]
    """Before the first round, and after each."""
    step_s: list[list[float]]
    """Of each round."""
    op_us: list[list[list[float]]]
    """[rank][round]: forward and backward of a micro-batch, the median over the steps."""


def gpt_rows(shapes: Sequence[Shape], rounds: int, steps: int) -> list[dict[str, Any]]:
    """One row for each shape."""
    sizes = sorted({m for _, _, m in shapes})
    profiles = {world: _calibrate(world, sizes) for world in sorted({p * d for p, d, _ in shapes})}
    return [_row(shape, profiles[shape[0] * shape[1]], rounds, steps) for shape in shapes]


def parse_shape(text: str) -> Shape:
    """Parses a shape such as those in SHAPES. Raises SystemExit if it is malformed."""
    try:
        p, d, micro_batch = (int(part) for part in text.split("x"))
    except ValueError:
        raise SystemExit(f"--shapes {text}: write PxDxM, such as 2x1x4") from None
    return p, d, micro_batch


def _row(shape: Shape, profile: Profile, rounds: int, steps: int) -> dict[str, Any]:
    p, d, micro_batch = shape
    plan = _plan(shape, profile)
    found = _train(shape, plan, rounds, steps)
    again_s = [_simulated(each, plan).minibatch_us / 1e6 for each in found.profiles]
    rounds_s = [statistics.median(step_s) for step_s in found.step_s]
    all_s = [step_s for round_s in found.step_s for step_s in round_s]
    real_s = statistics.median(all_s)
    quartiles = statistics.quantiles(all_s, n=4)
    off = [(before + after) / 2 / real - 1 for (before, after), real in zip(pairwise(again_s), rounds_s, strict=True)]
    return {
        "shape": f"{p}×{d} m={micro_batch}",
        "predicted_s": plan.predicted_minibatch_s,
        "real_s": real_s,
        "error": plan.predicted_minibatch_s / real_s - 1,
        "noise": (quartiles[2] - quartiles[0]) / 2 / real_s,
        "at_once_error": statistics.median(off),
        "at_once_errors": off,
        "drift": (max(again_s) - min(again_s)) / statistics.median(again_s),
        "ops_error": _ops_error(plan, found),
        "runs": len(all_s),
    }


def _ops_error(plan: Plan, found: TrainingRun) -> float:
    """The part of the error in the forwards and backwards of all ranks, against the calibration at the same time. The
    rest is in what comes on top of them: waiting, reducing, stepping."""
    errors = []
    for number, both in enumerate(pairwise(found.profiles)):
        ops_us = [_simulated(profile, plan).pipeline for profile in both]
        predicted = statistics.fmean(float((each.forward_us + each.backward_us)[0].sum()) for each in ops_us) * plan.d
        errors.append(predicted / sum(rank[number] for rank in found.op_us) - 1)
    return statistics.median(errors)


def _plan(shape: Shape, profile: Profile) -> Plan:
    p, d, micro_batch = shape
    choice = choose_plan(
        profile,
        gpus=p * d,
        global_batch=GLOBAL_BATCH,
        device_memory_bytes=None,
        gpus_per_vm=p * d,
        pins=Pins(p=p, d=d, micro_batch=micro_batch),
    )
    assert choice.best is not None, choice.reason
    return choice.best


def _simulated(profile: Profile, plan: Plan) -> SimulatedPlan:
    """The same plan by another profile."""
    return simulate_plan(
        SimulationRequest(
            profile=profile,
            p=plan.p,
            d=plan.d,
            micro_batch=plan.micro_batch,
            global_batch=plan.global_batch,
            stage_starts=plan.stage_starts,
            run_ahead=plan.run_ahead,
            recompute=plan.recompute,
            gpus_per_vm=plan.p * plan.d,
        )
    )


# ---------------------------------------------------------------- ranks


def _calibrate(world: int, sizes: Sequence[int]) -> Profile:
    """By `world` ranks at once, each on its core."""

    def environment(rank: int, port: int) -> WorkerEnvironment:
        plan = Plan(p=1, d=world, micro_batch=sizes[-1], global_batch=GLOBAL_BATCH)
        return _environment(rank, port, plan, mode=Mode.CALIBRATE)

    return Profile.from_json(_run_ranks(world, environment, ["calibrate", *map(str, sizes)])[0]["profile"])


def _train(shape: Shape, plan: Plan, rounds: int, steps: int) -> TrainingRun:
    p, d, micro_batch = shape

    def environment(rank: int, port: int) -> WorkerEnvironment:
        return _environment(rank, port, plan)

    found = _run_ranks(p * d, environment, ["train", str(micro_batch), str(rounds), str(steps)])
    return TrainingRun(
        profiles=[Profile.from_json(text) for text in found[0]["profiles"]],
        step_s=found[0]["step_s"],
        op_us=[rank["op_us"] for rank in found],
    )


def _environment(rank: int, port: int, plan: Plan, *, mode: Mode = Mode.TRAIN) -> WorkerEnvironment:
    return WorkerEnvironment(
        job_id="accuracy",
        generation=1,
        mode=mode,
        rank=rank,
        local_rank=rank,
        world_size=plan.p * plan.d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        plan=plan,
    )


def _run_ranks(
    world: int, environment: Callable[[int, int], WorkerEnvironment], task: Sequence[str]
) -> list[dict[str, Any]]:
    """Each rank's results. Raises RuntimeError with the last lines of a rank that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = [folder / f"{rank}.log" for rank in range(world)]
        ranks = []
        try:
            for rank, log in enumerate(logs):
                environ = {**os.environ, **environment(rank, port).to_environ(), "OMP_NUM_THREADS": "1"}
                command = [sys.executable, str(HERE), str(folder / f"{rank}.json"), *task]
                with log.open("wb") as output:
                    ranks.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))
            codes = [rank.wait(RANK_LIMIT_S) for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
        for number, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {number} ended with {code}:\n{logs[number].read_text()[-2000:]}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _as_rank(task: str, numbers: Sequence[int]) -> dict[str, Any]:
    """One rank's work."""
    import torch

    from recipe import load_dataset

    torch.set_num_threads(1)
    dataset = load_dataset()

    def get_batch(size: int, device: object = None) -> dict[str, torch.Tensor]:
        return dataset.batch(list(range(size)))

    if task == "calibrate":
        return {"profile": _calibrate_here(get_batch, numbers, "alone", budget_s=None)}
    micro_batch, rounds, steps = numbers
    return _train_here(dataset, get_batch, micro_batch=micro_batch, rounds=rounds, steps=steps)


def _calibrate_here(get_batch: Any, sizes: Sequence[int], name: str, budget_s: float | None) -> str | None:
    """The profile, on rank 0. `name`: another one in each call."""
    import torch
    from torch._C._distributed_c10d import PrefixStore

    from recipe import build_model, build_optimizer
    from varuna.calibration.optimizer_costs import OptimizerSetup
    from varuna.calibration.peers import CalibrationPeers
    from varuna.calibration.profile import calibrate
    from varuna.calibration.subject import CalibrationSubject
    from varuna.distributed.worker_environment import read_worker_environment
    from varuna.optim.precision import TrainingPrecision
    from varuna.partition import trace
    from varuna.worker.worker import WorkerProcess

    worker, model = WorkerProcess.join_generation(read_worker_environment()), build_model()
    profile = calibrate(
        CalibrationSubject(
            model, trace(model, get_batch(2)), get_batch, torch.device("cpu"), TrainingPrecision(torch.float32, "cpu")
        ),
        OptimizerSetup(build_optimizer(model.parameters())),
        global_batch=GLOBAL_BATCH,
        peers=CalibrationPeers(
            worker.environment.rank,
            worker.environment.world_size,
            PrefixStore(name, worker.rendezvous.store),
            connect=lambda group, ranks: worker.rendezvous.connect_gloo(f"{name}/{group}", ranks),
        ),
        budget_s=budget_s,
        micro_batches=sizes,
    )
    return None if profile is None else profile.to_json()


def _train_here(dataset: Any, get_batch: Any, *, micro_batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Steps and calibrations in turn. Op times are the engine's own of each pass."""
    from recipe import build_model, build_optimizer
    from varuna import Varuna
    from varuna.data import Batches
    from varuna.pipeline.engine import Engine
    from varuna.pipeline.pass_state import PassResult
    from varuna.roles.training import TrainingRole

    passes: list[PassResult] = []

    class Observed(Engine):
        def run_training_pass(self, *args: Any, **kwargs: Any) -> PassResult:
            passes.append(super().run_training_pass(*args, **kwargs))
            return passes[-1]

    varuna = Varuna(build_model(), get_batch_fn=get_batch)
    cast(TrainingRole, varuna._role).assembly.engine.__class__ = Observed
    varuna.set_optimizer(build_optimizer(varuna.parameters()))
    batches = iter(Batches(dataset, seed=0, first_step=1, last_step=(WARM_UP_STEPS + steps) * (rounds + 1)))

    def step_s() -> float:
        _, batch = next(batches)
        started_s = time.perf_counter()
        varuna.step(batch)
        return time.perf_counter() - started_s

    for _ in range(WARM_UP_STEPS):
        step_s()
    profiles = [_calibrate_here(get_batch, [micro_batch], "before", CALIBRATION_S)]
    taken: list[list[float]] = []
    op_us: list[float] = []
    for number in range(rounds):
        step_s()  # the calibration's memory is in the caches
        passes.clear()
        taken.append([step_s() for _ in range(steps)])
        op_us.append(statistics.median(each.forward_us + each.backward_us for each in passes))
        profiles.append(_calibrate_here(get_batch, [micro_batch], f"after{number}", CALIBRATION_S))
    return {"profiles": profiles, "step_s": taken, "op_us": op_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("task", choices=("calibrate", "train"))
    parser.add_argument("numbers", type=int, nargs="+")
    given = parser.parse_args()
    found = _as_rank(given.task, given.numbers)
    given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
