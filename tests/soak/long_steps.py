"""Train with steps of tens of seconds while VMs are killed and come, and compare every loss with an undisturbed run.

    make soak-long-steps            # or, for longer, and to have the same disturbances again:
    make soak-long-steps SOAK="--minutes 30 --seed 7"

In such steps survivors keep what they have of the step under way, also with another micro-batch and other stages, and
a job grows in the middle of a step. The planner is free, no device holds the whole model, and `copies` is on.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _goodput_player import kill_vm, list_ready, list_training, run_manager
from _recovery_trial import ModelSize, make_command, wait_for

from varuna_client import Client
from varuna_proto.rest import JobSpecDocument

MODEL = ModelSize(name="long steps", width=64, layers=12, global_batch=48, micro_batch=4, example_ms=150.0)
"""A step on four VMs takes about a minute; a third of that is predicted, because calibration measures little of the
layers' waiting."""
VMS = range(2, 6)
PAUSE_S = (10.0, 50.0)
"""Between two disturbances."""
TOLERANCE = 1e-5
"""Relative. Sums of gradients in other orders differ by rounding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: another one")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    losses = train_disturbed(random.Random(given.seed), given.minutes)
    expected = train_undisturbed(max(losses))
    apart = {step: abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses.items()}
    print(f"{len(losses)} losses, the largest difference {max(apart.values()):.1e}")
    missing = sorted(set(range(1, max(losses) + 1)) - losses.keys())
    wrong = sorted(step for step, difference in apart.items() if difference > TOLERANCE)
    if wrong or missing:
        raise SystemExit(f"other losses in steps {wrong}, and none in steps {missing}")


def train_disturbed(chance: random.Random, minutes: float) -> dict[int, float]:
    """The loss of each step."""
    with run_manager(MODEL, VMS[-1], MODEL.state_bytes) as (client, folder):
        job = submit(client, MODEL, folder)
        wait_for(lambda: list_training(client, job), "the first generation that trains")
        ends_s = time.monotonic() + 60.0 * minutes
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(chance.uniform(*PAUSE_S), left_s))
            disturb(client, chance)
        print_generations(client, job)
        return read_losses(client, job)


def train_undisturbed(steps: int) -> dict[int, float]:
    model = replace(MODEL, example_ms=0.0)
    with run_manager(model, VMS[0], None) as (client, folder):
        job = submit(client, model, folder, f"--steps {steps}")
        wait_for(lambda: client.job(job)["state"] == "succeeded", "the undisturbed run")
        return read_losses(client, job)


def submit(client: Client, model: ModelSize, folder: Path, flags: str = "") -> str:
    spec: JobSpecDocument = {
        "name": "long-steps",
        "workdir": str(folder),
        "run": f"{make_command(model, folder / 'record')} {flags}",
        "global_batch": model.global_batch,
        "copies": "on",
    }
    return str(client.submit(spec)["id"])


def disturb(client: Client, chance: random.Random) -> None:
    """Kills a VM, or lets one come."""
    ready = sorted(list_ready(client))
    if len(ready) <= VMS[0] or (len(ready) < VMS[-1] and chance.random() < 0.5):
        client.set_local_capacity(len(ready) + 1)
        print(f"{len(ready)} VMs are ready, and one may come", flush=True)
    else:
        victim = chance.choice(ready)
        client.set_local_capacity(len(ready) - 1)  # before it goes, so that the market does not replace it
        kill_vm(client, victim)
        print(f"{len(ready)} VMs were ready, and {victim} is killed", flush=True)


def read_losses(client: Client, job: str) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in client.metrics(job)}


def print_generations(client: Client, job: str) -> None:
    generations = list_training(client, job)
    for before, one in pairwise(generations):
        change = (
            f"{before['p']}×{before['d']} of {before['micro_batch']} to {one['p']}×{one['d']} of {one['micro_batch']}"
        )
        print(f"{one['kind_of_morph']}, {change}, {one['micro_batches_redone']} run again: {before['end_reason']}")
    kinds = Counter(one["kind_of_morph"] for one in generations[1:])
    within = sum("; within its step, " in (one["end_reason"] or "") for one in generations)
    redone = sum(one["steps_redone"] or 0 for one in generations)
    print(f"{dict(kinds)}, {within} growths within a step, {redone} steps done again", flush=True)


if __name__ == "__main__":
    main()
