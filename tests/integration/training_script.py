"""The script that the workers of the training tests run: an ordinary Varuna training script, with faults on demand.

Its one argument is a JSON file: {"task": {...}, "out": folder, and optionally
"die", "overflow", "raise": {"rank", "step"}, "save": {"step", "url", "fails"}, "forever": bool,
"accumulate": the script steps the optimizer after so many steps, and no scheduler,
"cut_points": how many Varuna is to find, the model's own being taken out, "varuna": more arguments for it}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from small_gpt import Examples, Task, example_batch, make_model, make_optimizer, make_scheduler, states_of
from varuna import Varuna
from varuna.checkpoint import CheckpointError
from varuna.data import Batches

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""As launchers call it."""


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    train(Task(**wanted["task"]), wanted, Path(wanted["out"]))


def train(task: Task, wanted: dict[str, Any], out: Path) -> Varuna:
    """Trains as the environment says and writes what this rank then has into `out`."""
    rank = int(next((os.environ[name] for name in RANKS if name in os.environ), "0"))
    plain = make_model(replace(task, tied=task.tied and not task.declared))
    if "cut_points" in wanted:
        plain.cut_points = [nn.Identity() for _ in plain.cut_points]
    pairs = [("embedding.weight", "head.weight")] if task.declared else None
    before = torch.get_rng_state()
    model = Varuna(
        plain,
        get_batch_fn=example_batch,
        batch_size=task.global_batch,
        shared_weights=pairs,
        dtype=task.dtype,
        offload_optimizer=task.offload,
        cut_points=wanted.get("cut_points"),
        accumulate="accumulate" in wanted,
        **wanted.get("varuna", {}),
    )
    assert torch.equal(before, torch.get_rng_state())
    optimizer = make_optimizer(model.parameters(), task)
    scheduler = make_scheduler(optimizer)
    model.set_optimizer(optimizer, loss_scale=task.loss_scale or "dynamic", init_loss_scale=2**10)
    model.register_state("scheduler", scheduler)
    first = model.resume() + 1

    steps: list[dict[str, float]] = []
    last = None if wanted.get("forever") else task.steps
    for step, batch in Batches(Examples(task.padded), global_batch=task.global_batch, first_step=first, last_step=last):
        fault = {"rank": rank, "step": step}
        if wanted.get("die") == fault:
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted.get("raise") == fault:
            raise ArithmeticError(f"rank {rank} was told to raise at step {step}")
        spoilt = [
            p.register_hook(lambda g: g + torch.inf) for p in model.parameters() if wanted.get("overflow") == fault
        ]
        before = torch.get_rng_state()
        loss, overflow, norm = model.step(batch, clip_grad_max_norm=task.clip)
        assert torch.equal(before, torch.get_rng_state())
        assert overflow == (wanted.get("overflow", {}).get("step") == step)
        for hook in spoilt:
            hook.remove()
        if "accumulate" in wanted:
            if step % wanted["accumulate"] == 0:
                optimizer.step()
                optimizer.zero_grad()
        else:
            scheduler.step()
        steps.append({"step": step, "loss": loss, "norm": norm, "overflow": overflow, "next_scale": model.loss_scale})
        if wanted.get("save", {}).get("step") == step:
            failing = pytest.raises(CheckpointError) if wanted["save"].get("fails", False) else nullcontext()
            with failing:
                assert model.checkpoint(wanted["save"]["url"])
    evaluated = model.evaluate(batch, batch_size=task.global_batch)
    assert model.training

    torch.save({name: p.detach().cpu() for name, p in model.named_parameters()}, out / f"rank{rank}.pt")
    torch.save(states_of(optimizer, model.named_parameters()), out / f"rank{rank}.optimizer.pt")
    (out / f"rank{rank}.json").write_text(json.dumps({"first": first, "steps": steps, "evaluated": evaluated}))
    return model


if __name__ == "__main__":
    main()
