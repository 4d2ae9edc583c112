"""How true the planner's predictions are: predicted against real mini-batch times.

    python benchmarks/_planner_accuracy.py [--json accuracy.json] [--steps 20] [--rounds 5]

(a) The emulated-device runs of `benchmarks/pipeline.py`: stages sleep, all else is real; what the engine takes per
action is calibrated in another shape. (b) The example GPT on this machine's CPU: a calibration by as many ranks as will
train, as the manager makes it, then the planner's prediction for each shape and the real steps. Only shapes of up to 2
ranks are honest on 2 cores; on more, pass more with --shapes. Beside every error stands the noise of what it is
compared with: half the distance of the quartiles, relative. The GPT is calibrated once more at the end: what changed
meanwhile is the machine, and is told as drift.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpt"))

from varuna_planner.auto_config import Pins, choose_plan  # noqa: E402
from varuna_planner.profile import Profile  # noqa: E402
from varuna_planner.schedule import Policy  # noqa: E402
from varuna_planner.simulator import simulate, uniform  # noqa: E402
from varuna_proto.environment import Mode, WorkerEnvironment  # noqa: E402

SHAPES = ("1x1x2", "1x1x4", "2x1x2", "2x1x4", "1x2x2", "1x2x4")
"""P × D × micro-batch."""
GLOBAL_BATCH = 32
EMULATED_STAGES, EMULATED_MICRO_BATCHES = (2, 4), (8, 32)
CALIBRATION_SHAPE = (2, 16)
"""(P, N) of the emulated run from which the engine's overhead is taken; none of those that are predicted."""
WARM_UP_STEPS = 3
RANK_LIMIT_S = 300
TARGET_WORST, TARGET_MEAN = 0.05, 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` reads."""
    parser.add_argument("--steps", type=int, default=20, help="measured steps of the example GPT per shape")
    parser.add_argument("--rounds", type=int, default=5, help="measured mini-batches of each emulated shape")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="PxDxM", help="of the example GPT")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both comparisons. Arguments of `add_arguments` that are not there have their defaults."""
    steps, rounds = getattr(args, "steps", 20), getattr(args, "rounds", 5)
    emulated = emulated_rows(rounds)
    gpt, drift = gpt_rows([_parse_shape(shape) for shape in getattr(args, "shapes", SHAPES)], steps)
    return {
        "emulated": {"rows": emulated, **_summary(emulated)},
        "gpt": {"rows": gpt, "drift": drift, **_summary(gpt)},
        "target": {"worst": TARGET_WORST, "mean": TARGET_MEAN},
        "environment": {"cores": os.cpu_count(), "load_1_minute": os.getloadavg()[0]},
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'':<28} {'predicted':>11} {'real':>11} {'error':>7} {'noise':>7}"]
    overhead_us = result["emulated"]["rows"][0]["overhead_us"]
    for part, name in (("emulated", "emulated"), ("gpt", "example GPT")):
        for row in result[part]["rows"]:
            lines.append(
                f"{name + ' ' + row['shape']:<28} {row['predicted_s'] * 1e3:>8.1f} ms {row['real_s'] * 1e3:>8.1f} ms "
                f"{row['error']:>+7.1%} {row['noise']:>7.1%}"
            )
    for part, name in (("emulated", "emulated"), ("gpt", "example GPT")):
        found = result[part]
        drift = f", calibrated again {found['drift']:+.1%}" if "drift" in found else ""
        lines.append(f"{name}: mean error {found['mean_error']:.1%}, worst {found['worst_error']:.1%}{drift}")
    bare = ", ".join(f"{row['without_overhead']:+.1%}" for row in result["emulated"]["rows"])
    lines.append(f"emulated, without the engine's own {overhead_us:.0f} µs per action: {bare}")
    return "\n".join(lines)


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows]
    return {"mean_error": statistics.fmean(errors), "worst_error": max(errors)}


def _row(shape: str, predicted_s: float, real: Sequence[float]) -> dict[str, Any]:
    """`real` in seconds; its median is what counts, so that a step which was interrupted does not."""
    median = statistics.median(real)
    quartiles = statistics.quantiles(real, n=4) if len(real) > 1 else [median] * 3
    return {
        "shape": shape,
        "predicted_s": predicted_s,
        "real_s": median,
        "error": predicted_s / median - 1,
        "noise": (quartiles[2] - quartiles[0]) / 2 / median,
        "runs": len(real),
    }


# ---------------------------------------------------------------- (a) emulated devices


def emulated_rows(rounds: int) -> list[dict[str, Any]]:
    """Runs `pipeline.py`. One shape beside those that are predicted calibrates what the engine takes for each action,
    which the emulated device's times do not have; `without_overhead` is the error when it is left out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pipeline.json"
        p, n = CALIBRATION_SHAPE
        stages = [str(stages) for stages in sorted({p, *EMULATED_STAGES})]
        micro_batches = [str(count) for count in sorted({n, *EMULATED_MICRO_BATCHES})]
        shapes = ["--stages", *stages, "--micro-batches", *micro_batches]
        own = ["--systems", "work-conserving", "--rounds", str(rounds), "--json", str(out)]
        command = [sys.executable, str(HERE.parent / "pipeline.py"), *shapes, *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RANK_LIMIT_S)
        found = json.loads(out.read_text())
    runs = {(row["p"], row["n"]): row for row in found["rows"]}
    overhead_us = _engine_overhead_us(found["setting"], runs[CALIBRATION_SHAPE])
    rows = []
    for p, n in itertools.product(EMULATED_STAGES, EMULATED_MICRO_BATCHES):
        real = [milliseconds / 1e3 for milliseconds in runs[p, n]["rounds_ms"]]
        row = _row(f"P={p} N={n}", _emulated_s(found["setting"], runs[p, n], overhead_us), real)
        bare = _emulated_s(found["setting"], runs[p, n], 0.0)
        rows.append({**row, "without_overhead": bare / row["real_s"] - 1, "overhead_us": overhead_us})
    return rows


def _emulated_s(setting: dict[str, Any], row: dict[str, Any], overhead_us: float) -> float:
    """The simulator's time of one of `pipeline.py`'s rows."""
    pipeline = uniform(
        row["p"],
        row["n"],
        forward_us=setting["forward_ms"] * 1e3 + overhead_us,
        recompute_us=setting["recompute_ms"] * 1e3 + overhead_us,
        backward_us=setting["backward_ms"] * 1e3 + overhead_us,
        latency_us=row["message_ms"] * 1e3,
    )
    return simulate(pipeline, Policy.WORK_CONSERVING, run_ahead=row["run_ahead"]).makespan_us / 1e6


def _engine_overhead_us(setting: dict[str, Any], row: dict[str, Any]) -> float:
    """Per action, by the slope of the simulated time: with every action longer by the same, it is all but a line."""
    real_s, probe_us = statistics.median(row["rounds_ms"]) / 1e3, 100.0
    bare_s = _emulated_s(setting, row, 0.0)
    slope = (_emulated_s(setting, row, probe_us) - bare_s) / probe_us
    return max(0.0, (real_s - bare_s) / slope)


# ---------------------------------------------------------------- (b) the example GPT


def gpt_rows(shapes: Sequence[tuple[int, int, int]], steps: int) -> tuple[list[dict[str, Any]], float]:
    """(rows, relative change of the calibrated times from before to after)."""
    worlds = sorted({p * d for p, d, _ in shapes})
    sizes = sorted({m for _, _, m in shapes})
    before = {world: _calibrate(world, sizes) for world in worlds}
    rows = [_gpt_row(shape, before[shape[0] * shape[1]], steps) for shape in shapes]
    after = {world: _calibrate(world, sizes) for world in worlds}
    changes = [_compute_us(after[world]) / _compute_us(before[world]) - 1 for world in worlds]
    return rows, max(changes, key=abs)


def _gpt_row(shape: tuple[int, int, int], profile: Profile, steps: int) -> dict[str, Any]:
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
    plan = choice.best

    def environment(rank: int, port: int) -> WorkerEnvironment:
        return _environment(
            rank,
            port,
            p,
            d,
            micro_batch,
            stage_starts=plan.stage_starts,
            run_ahead=plan.run_ahead,
            recompute=plan.recompute,
            policy=plan.policy,
        )

    real = json.loads(_run_ranks(p * d, environment, ["--train", str(steps)]))
    return _row(f"{p}×{d} m={micro_batch}", plan.predicted_minibatch_s, real)


def _calibrate(world: int, sizes: Sequence[int]) -> Profile:
    """By `world` ranks at once, each on its core."""
    text = _run_ranks(
        world,
        lambda rank, port: _environment(rank, port, 1, world, sizes[-1], mode=Mode.CALIBRATE),
        ["--calibrate", *map(str, sizes)],
    )
    return Profile.from_json(text)


def _compute_us(profile: Profile) -> float:
    return sum(m.forward_us + m.backward_us for m in profile.at(profile.micro_batches[-1]))


def _environment(
    rank: int, port: int, p: int, d: int, micro_batch: int, *, mode: Mode = Mode.TRAIN, **plan: Any
) -> WorkerEnvironment:
    return WorkerEnvironment(
        job_id="accuracy",
        generation=1,
        mode=mode,
        rank=rank,
        local_rank=rank,
        world_size=p * d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        p=p,
        d=d,
        micro_batch=micro_batch,
        global_batch=GLOBAL_BATCH,
        **plan,
    )


def _run_ranks(world: int, environment: Callable[[int, int], WorkerEnvironment], task: Sequence[str]) -> str:
    """What rank 0 wrote. Raises RuntimeError with the last lines of a rank that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, str(HERE), "--as-rank", str(out), *task]
        logs = [Path(folder) / f"{rank}.log" for rank in range(world)]
        ranks = []
        try:
            for rank, log in enumerate(logs):
                environ = {**os.environ, **environment(rank, port).to_environ(), "OMP_NUM_THREADS": "1"}
                with log.open("wb") as output:
                    ranks.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))
            codes = [rank.wait(RANK_LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for number, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {number} ended with {code}:\n{logs[number].read_text()[-2000:]}")
        return out.read_text()


def _as_rank(out: Path, given: argparse.Namespace) -> None:
    """One rank: measures, and rank 0 writes what was found."""
    import torch

    from recipe import build_model, build_optimizer, load_dataset

    torch.set_num_threads(1)
    dataset = load_dataset()
    rank = int(os.environ["RANK"])

    def get_batch(size: int, device: object = None) -> dict[str, torch.Tensor]:
        return dataset.batch(list(range(size)))

    if given.calibrate:
        text = _calibrate_here(get_batch, build_model(), build_optimizer, given.calibrate)
    else:
        text = json.dumps(_train_here(dataset, get_batch, build_model(), build_optimizer, given.train))
    if rank == 0 and text is not None:
        out.write_text(text)


def _calibrate_here(get_batch: Any, model: Any, build_optimizer: Any, sizes: Sequence[int]) -> str | None:
    import torch

    from varuna.launch import worker_environment
    from varuna.partition import trace
    from varuna.profiler import calibrate
    from varuna.worker import Worker

    worker = Worker.join(worker_environment())
    profile = calibrate(
        model,
        trace(model, get_batch(2)),
        get_batch,
        optimizer=build_optimizer(model.parameters()),
        device=torch.device("cpu"),
        global_batch=GLOBAL_BATCH,
        rank=worker.environment.rank,
        world_size=worker.environment.world_size,
        store=worker.rendezvous.store,
        connect=worker.rendezvous.gloo,
        micro_batches=sizes,
    )
    return None if profile is None else profile.to_json()


def _train_here(dataset: Any, get_batch: Any, model: Any, build_optimizer: Any, steps: int) -> list[float]:
    """Seconds of each step."""
    from varuna import Varuna
    from varuna.data import Batches

    varuna = Varuna(model, get_batch_fn=get_batch)
    varuna.set_optimizer(build_optimizer(varuna.parameters()))
    taken = []
    for step, batch in Batches(dataset, seed=0, first_step=1, last_step=steps + WARM_UP_STEPS):
        started = time.perf_counter()
        varuna.step(batch)
        if step > WARM_UP_STEPS:
            taken.append(time.perf_counter() - started)
    return taken


def _parse_shape(text: str) -> tuple[int, int, int]:
    try:
        p, d, micro_batch = (int(part) for part in text.split("x"))
    except ValueError:
        raise SystemExit(f"--shapes {text}: write PxDxM, such as 2x1x4") from None
    return p, d, micro_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same figures there")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank is not None:
        _as_rank(given.as_rank, given)
        return
    result = run(given)
    print(table(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
