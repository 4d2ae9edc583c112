"""The script that the workers of the training tests run: an ordinary Varuna training script, with faults on demand.

Its one argument is a JSON file: {"task": {...}, "out": folder, and optionally
"die", "overflow", "raise": {"rank", "step"}, "save": {"step", "url", "fails"}, "forever": bool,
"accumulate": the script steps the optimizer after so many steps, and no scheduler,
"dies": several such faults as "die", "dies_before_resume": a rank, "passes_first": the ranks that have passed the step
before one dies in it,
"misses_agreement": {"rank", "step"}, which loses its peers when it has sent its part and has not received the totals,
"misses_update": {"rank", "step"}, which loses them when it has the totals and has made no update,
"copies_batches", "asks_for_shape": bool, for a script that cannot follow its job into another shape,
"copies_validation": bool, the batches of "validates", "averages": bool, the model's average is what they evaluate,
"evaluates_first": bool, before the first step; "trains_other": bool, a model without one of its biases,
"lowers_rate": bool, after each step, by nothing that the others do,
"emulates_nccl": bool, for links that use NCCL on devices that it does not know,
"hosts_apart": bool, for links with several connections, whose messages are cut however small they are,
"keeps_parameters": bool, for a script that cannot take another stage; "dies_in_move": the rank that dies when it does,
by its first rank, "refuses_in_move": the same, that once does not give what another one asks for,
"dies_connecting": the same, that dies when it connects with its new stage, "data_workers": of
`Batches`, "reads_state": bool, of the optimizer, between `resume` and the first step, "reads_state_loading":
bool, in `resume`,
"validates": after each step, on so many batches of another `Batches`, "dies_validating": {"rank", "step"}, before the
last of them, "misses_evaluation": {"rank", "step", "number", "passed"}, which loses its peers when they have agreed on
that one and the ranks "passed" have passed the next step,
"rests": the step before which all ranks wait in the script until there is a file "rested" in `out`; one
that is to die in it dies when the others wait,
"pause_s": of each step from the third on; "leaves_after": {"step", "generations"}: in the first generations, all ranks
wait in the script after this step, and after each later one, until the agent has asked them to leave;
"counts": threads and descriptors of the process after each step, "waits_for_links": bool, until no thread of an ended
generation's connections is left, "waits_are_woken": bool, as no wait looks again by itself,
"weights": a file with the model's, which is on meta then,
"cut_points": how many Varuna is to find, the model's own being taken out, "varuna": more arguments for it}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import patient_holders
import varuna.distributed.departure
import varuna.distributed.link_connections
import varuna.distributed.rendezvous
import varuna.roles.membership
import varuna.roles.moving
import varuna.roles.training
from emulated_nccl import emulate_nccl
from small_gpt import Examples, Task, example_batch, fill_scale, make_model, make_optimizer, make_scheduler, states_of
from varuna import Varuna, get_varuna_config
from varuna.checkpoint import CheckpointError
from varuna.data import Batches
from varuna.distributed.agreement import StepTotals
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.groups import RankGroup
from varuna.distributed.rendezvous_protocol import AnswerStatus, pack_message
from varuna.holdings.giving import HolderServer
from varuna.roles.progress import TrainingStep
from varuna.roles.share_pass import SharePass
from varuna.roles.training import TrainingRole
from waiting import DEADLINE_S, wait_until

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""As launchers call it."""


def main() -> None:
    torch.set_num_threads(1)
    for module, name in patient_holders.WAITS:
        setattr(module, name, DEADLINE_S)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    if wanted.get("waits_are_woken"):
        varuna.distributed.departure._RECHECK_S = varuna.distributed.departure._LONG_WAIT_S = DEADLINE_S
    if wanted.get("waits_for_links"):
        varuna.roles.membership._LINKS_END_S = varuna.distributed.rendezvous._IDLE_S = DEADLINE_S
    train(Task(**wanted["task"]), wanted, Path(wanted["out"]))


def note_updates(out: Path, rank: int) -> None:
    """Leaves a file for each update of this rank, for `wait_for_others`."""
    update = TrainingRole._update

    def update_and_note(role: TrainingRole, *rest: Any) -> None:
        update(role, *rest)
        (out / f"rank{rank}.updated{role._progress.step}").touch()

    TrainingRole._update = update_and_note  # type: ignore[assignment,method-assign]


def wait_for_others(out: Path, rank: int, step: int) -> None:
    """Waits until all others have made the update of `step`: one that has not would hold the step before."""
    others = [other for other in range(int(os.environ["WORLD_SIZE"])) if other != rank]
    wait_until(lambda: all((out / f"rank{other}.updated{step}").exists() for other in others), "the others' updates")


def note_passes(out: Path, rank: int) -> None:
    """Leaves a file for each pass of this rank, for `wait_for_passes`."""
    run = SharePass.run

    def run_and_note(share: SharePass, under_way: TrainingStep, *rest: Any) -> int:
        global_batch = run(share, under_way, *rest)
        (out / f"rank{rank}.passed{share._parts.progress.step + 1}").touch()
        return global_batch

    SharePass.run = run_and_note  # type: ignore[assignment,method-assign]


def wait_for_passes(out: Path, ranks: Sequence[int], step: int) -> None:
    """Waits until these have passed `step`: what one has not begun is nothing that it keeps."""
    wait_until(lambda: all((out / f"rank{rank}.passed{step}").exists() for rank in ranks), "the others' passes")


def rest(out: Path, rank: int, *, dies: bool) -> None:
    """Waits in the script: a rank that is to die, until all others wait; the others, until the test lets them go on."""
    (out / f"rank{rank}.rests").touch()
    files = [out / f"rank{other}.rests" for other in range(int(os.environ["WORLD_SIZE"]))] if dies else [out / "rested"]
    wait_until(lambda: all(file.exists() for file in files), "the end of a rest")


def wait_for_leave(departure: Departure, step: int, generations: int, done: int) -> None:
    if done >= step and int(os.environ["VARUNA_GENERATION"]) <= generations:
        wait_until(lambda: departure.hold_first or departure.exit_code is not None, "the leave")


def count_threads(name: str) -> int:
    return [thread.name for thread in threading.enumerate()].count(name)


def miss_agreement(out: Path, rank: int, step: int) -> None:
    """Loses the totals of `step` on this rank after all other ranks have had time to get them and to go on."""
    agree, calls = varuna.roles.training.agree_on_totals, 0

    def agree_or_miss(group: RankGroup, own: StepTotals) -> StepTotals:
        nonlocal calls
        totals = agree(group, own)
        calls += 1
        if calls == step:
            lose_peers(group._departure, out, rank, step)
        return totals

    varuna.roles.training.agree_on_totals = agree_or_miss


def miss_update(out: Path, rank: int, step: int) -> None:
    """Leaves when this rank has the totals of `step`, as `miss_agreement` does."""
    update = TrainingRole._update

    def update_or_miss(role: TrainingRole, under_way: TrainingStep, *rest: Any) -> None:
        if role._progress.step + 1 == step and not under_way.was_interrupted:
            lose_peers(role._worker.departure, out, rank, step)
        update(role, under_way, *rest)

    TrainingRole._update = update_or_miss  # type: ignore[assignment,method-assign]


def miss_evaluation(out: Path, own: int, rank: int, step: int, number: int, passed: Sequence[int]) -> None:
    """Leaves, as `miss_agreement` does, when the others have the loss of the evaluation `number` after `step`, and the
    ranks `passed` have passed the next step."""
    evaluate, count = TrainingRole._evaluate_together, 0

    def evaluate_or_miss(role: TrainingRole, *rest: Any, **named: Any) -> float:
        nonlocal count
        loss = evaluate(role, *rest, **named)
        count += role._progress.step == step
        if (own, count) == (rank, number):
            count += 1
            wait_for_passes(out, passed, step + 1)
            lose_peers(role._worker.departure, out, rank, step)
        return loss

    TrainingRole._evaluate_together = evaluate_or_miss  # type: ignore[assignment,method-assign]


def die(*_: object, **_named: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def lose_peers(departure: Departure, out: Path, rank: int, step: int) -> None:
    wait_for_others(out, rank, step)
    time.sleep(0.5)
    departure.leave_generation(PeerLost("the test leaves the others"))
    departure.raise_if_leaving()


def refuse_once() -> None:
    """Does not give the first file that another process asks for."""
    answer, refused = HolderServer._answer_request, False

    def answer_or_refuse(server: HolderServer, connection: socket.socket, *request: Any) -> None:
        nonlocal refused
        if refused:
            answer(server, connection, *request)
        else:
            refused = True
            connection.sendall(pack_message(AnswerStatus.REFUSED, [b"it was told to refuse"]))

    HolderServer._answer_request = answer_or_refuse  # type: ignore[assignment,method-assign]


class StateReader:
    """A registered state that looks into the optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, list[int]]:
        return {"steps": sorted({int(one["step"]) for one in self._optimizer.state.values()})}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        assert self.state_dict() == state


def train(task: Task, wanted: dict[str, Any], out: Path) -> Varuna:
    """Trains as the environment says and writes what this rank then has into `out`."""
    rank = int(next((os.environ[name] for name in RANKS if name in os.environ), "0"))
    if wanted.get("emulates_nccl"):
        emulate_nccl(rank)
    if wanted.get("hosts_apart"):
        setattr(socket, "gethostname", lambda: f"host-{rank}")  # noqa: B010 - no type of a patch
        varuna.distributed.link_connections.WHOLE_BYTES = 0
    plain = make_model(replace(task, tied=task.tied and not task.declared))
    if "cut_points" in wanted:
        plain.cut_points = [nn.Identity() for _ in plain.cut_points]
    if wanted.get("trains_other"):
        plain.blocks[0].feed[0].bias = None
    if "weights" in wanted:
        plain.to("meta")
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
        weights=wanted.get("weights"),
        **wanted.get("varuna", {}),
    )
    assert torch.equal(before, torch.get_rng_state())
    if task.scaled:
        fill_scale(model)
    optimizer = make_optimizer(model.parameters(), task)
    scheduler = make_scheduler(optimizer)
    own_list = list(model.parameters()) if wanted.get("keeps_parameters") else []
    model.set_optimizer(optimizer, loss_scale=task.loss_scale or "dynamic", init_loss_scale=2**10)
    model.register_state("scheduler", scheduler)
    if wanted.get("reads_state_loading"):
        model.register_state("reader", StateReader(optimizer))
    if wanted.get("dies_before_resume") == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if wanted.get("dies_in_move") == rank:
        setattr(varuna.roles.moving.StageMove, "take_stage", die)  # noqa: B010 - no type of a patch
    if wanted.get("refuses_in_move") == rank:
        refuse_once()
    if wanted.get("dies_connecting") == rank:
        setattr(varuna.roles.membership, "connect_stage", die)  # noqa: B010 - no type of a patch
    first = model.resume() + 1
    if wanted.get("reads_state"):
        assert {int(one["step"]) for one in optimizer.state_dict()["state"].values()} - {first - 1} == set()
        assert len(optimizer.state) == (len(list(model.parameters())) if first > 1 else 0)
    note_updates(out, rank)
    note_passes(out, rank)
    if wanted.get("misses_agreement", {}).get("rank") == rank:
        miss_agreement(out, **wanted["misses_agreement"])
    if wanted.get("misses_update", {}).get("rank") == rank:
        miss_update(out, **wanted["misses_update"])
    if "misses_evaluation" in wanted:
        miss_evaluation(out, rank, **wanted["misses_evaluation"])

    steps: list[dict[str, Any]] = []
    counts: list[dict[str, int]] = []
    last = None if wanted.get("forever") else task.steps
    make_batches = partial(Batches, Examples(task.padded), global_batch=task.global_batch)
    for step, batch in make_batches(first_step=first, last_step=last, workers=wanted.get("data_workers", 0)):
        fault = {"rank": rank, "step": step}
        if fault in (wanted.get("die"), wanted.get("raise")) and step > first:
            wait_for_others(out, rank, step - 1)
        if fault == wanted.get("die"):
            wait_for_passes(out, wanted.get("passes_first", ()), step)
        if wanted.get("rests") == step:
            rest(out, rank, dies=fault == wanted.get("die"))
        if wanted.get("die") == fault or fault in wanted.get("dies", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted.get("raise") == fault:
            raise ArithmeticError(f"rank {rank} was told to raise at step {step}")
        spoilt = [
            p.register_hook(lambda g: g + torch.inf) for p in model.parameters() if wanted.get("overflow") == fault
        ]
        if wanted.get("evaluates_first"):
            model.evaluate(batch, batch_size=task.global_batch)
        before = torch.get_rng_state()
        if wanted.get("copies_batches"):
            batch = {**batch}
        if wanted.get("asks_for_shape"):
            get_varuna_config()
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
        for group in optimizer.param_groups if wanted.get("lowers_rate") else ():
            group["lr"] *= 0.5
        validated = []
        for number, others in make_batches(seed=1, last_step=wanted["validates"]) if "validates" in wanted else ():
            if wanted.get("dies_validating") == fault and number == wanted["validates"]:
                die()
            others = {**others} if wanted.get("copies_validation") else others
            validated.append(model.evaluate(others, batch_size=task.global_batch, ema=wanted.get("averages", False)))
        if step > 2:
            time.sleep(wanted.get("pause_s", 0.0))
        if "leaves_after" in wanted:
            wait_for_leave(model._worker.departure, **wanted["leaves_after"], done=step)
        if wanted.get("counts"):
            wait_until(lambda: count_threads("varuna-rendezvous") <= 1, "the end of the stores of earlier generations")
            folders = {"threads": Path("/proc/self/task"), "descriptors": Path("/proc/self/fd")}
            counts.append({name: len(list(folder.iterdir())) for name, folder in folders.items()})
        did = {"loss": loss, "norm": norm, "overflow": overflow, "next_scale": model.loss_scale, "validated": validated}
        steps.append({"step": step, **did})
        if wanted.get("save", {}).get("step") == step:
            failing = pytest.raises(CheckpointError) if wanted["save"].get("fails", False) else nullcontext()
            with failing:
                assert model.checkpoint(wanted["save"]["url"])
    assert all(parameter.requires_grad for parameter in own_list)
    if not steps:
        [(_, batch)] = make_batches(first_step=task.steps, last_step=task.steps)
    evaluated = model.evaluate(batch, batch_size=task.global_batch)
    assert model.training

    torch.save({name: p.detach().cpu() for name, p in model.named_parameters()}, out / f"rank{rank}.pt")
    torch.save(states_of(optimizer, model.named_parameters()), out / f"rank{rank}.optimizer.pt")
    (out / f"rank{rank}.json").write_text(
        json.dumps({"first": first, "steps": steps, "evaluated": evaluated, "counts": counts})
    )
    return model


if __name__ == "__main__":
    main()
