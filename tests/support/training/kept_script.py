"""`training_script` with long passes, a trace of all forwards, and ranks that kill themselves in one of them.

More in its JSON file: "kills": several faults as `killing_script` has one in "kill"; "p": stages; "op_s": seconds by
which each op is longer; "slow": {"rank", "op_s"}, the same for one rank; "variant": "frozen" (the first blocks train
nothing), "checkpointed" (the model runs each block again in its backward) or "ledger" (losses and gradients tell which
examples were counted, and how often); "marks_every": micro-batches between two marks of a share, in which a rank waits
until all stages have theirs; "lossy": ranks whose copies are never whole; "copies_states": a rank waits in its pass
until the copy of its state is whole; "keeps_inputs": also in short steps, ranks whose script cannot follow the shape
keep their inputs for the rest of the step; "leaves_at": {"step", "op", "generations"}: in the first generations, the
passes of a step wait before this op ("F": the second forward, "B": the first backward) until the agent has asked the
rank to leave within the step, or at once, and ranks wait for one another's votes for as long as that takes; "parting":
{"fails", "dies"}: ranks that cannot send what they leave to others, or die before that; "sums_after_backward": ranks
that have moved fetch the sums of the step when they have run a backward or have none to run, and leave `sums.*`.

Each forward is a line of `trace.rank*.jsonl`: [generation, step, number of the micro-batch, its examples' places]. Each
pass without micro-batches is one of `idle.rank*.jsonl`: [generation, step].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import copies_script
import killing_script
import training_script
import varuna.copies.rank_shares
import varuna.roles.early_end
import varuna.roles.kept_inputs
from killing_script import arm, meet_before
from late_marks import LateMarks
from small_gpt import SmallGPT, Task
from varuna.copies.parting import Parting
from varuna.copies.rank_shares import RankShares
from varuna.copies.replica_marks import ReplicaMarks
from varuna.copies.sending import PacedConnection
from varuna.copies.share_owner import ShareOwner
from varuna.cut_point import CutPoint
from varuna.distributed.departure import Departure
from varuna.pipeline.engine import Engine
from varuna.pipeline.pass_timer import PassTimer
from varuna.roles.late_state import LateState
from varuna.roles.moving import NewcomerMove, StageMove
from waiting import wait_until

LEDGER_BASE = 4


def trace_forwards(path: Path) -> None:
    run_forward = Engine._run_forward

    @wraps(run_forward)
    def trace(engine: Engine, run: Any, seed: int, step: int) -> None:
        micro_batch = run.micro_batches[run.forwards]
        places = [micro_batch.first_example, micro_batch.first_example + micro_batch.examples]
        with path.open("a") as lines:
            lines.write(json.dumps([int(os.environ["VARUNA_GENERATION"]), step, micro_batch.index, places]) + "\n")
        run_forward(engine, run, seed, step)

    Engine._run_forward = trace  # type: ignore[method-assign, assignment]


def trace_idle_passes(path: Path) -> None:
    run_pass = Engine.run_training_pass

    @wraps(run_pass)
    def trace(engine: Engine, micro_batches: Any, **options: Any) -> Any:
        if not micro_batches:
            with path.open("a") as lines:
                lines.write(json.dumps([int(os.environ["VARUNA_GENERATION"]), options["step"]]) + "\n")
        return run_pass(engine, micro_batches, **options)

    Engine.run_training_pass = trace  # type: ignore[method-assign, assignment]


def slow_ops(op_s: float) -> None:
    measure = PassTimer.measure_op

    @contextmanager
    def measure_slowly(timer: PassTimer, name: str, number: int) -> Iterator[None]:
        with measure(timer, name, number):
            time.sleep(op_s)
            yield

    PassTimer.measure_op = measure_slowly  # type: ignore[method-assign, assignment]


def hold_passes(step: int, op: str, generations: int) -> None:
    varuna.roles.early_end._PATIENCE_S = 1e9
    name = {"F": "_run_forward", "B": "_run_backward"}[op]
    run_op = getattr(Engine, name)

    def is_due(run: Any, of_step: int) -> bool:
        is_held = of_step == step and int(os.environ["VARUNA_GENERATION"]) <= generations
        return is_held and (run.forwards >= 1 if op == "F" else run.backwards == 0)

    def is_asked_to_leave(departure: Departure) -> bool:
        return departure.leaves_within_step or departure.is_deferred or departure.exit_code is not None

    @wraps(run_op)
    def wait_and_run(engine: Engine, run: Any, *arguments: Any) -> None:
        if is_due(run, arguments[-1]):
            wait_until(lambda: is_asked_to_leave(engine._departure), "the leave")
        run_op(engine, run, *arguments)

    setattr(Engine, name, wait_and_run)


def spoil_parting(own: int, *, fails: Sequence[int] = (), dies: Sequence[int] = ()) -> None:
    def spoil(*_: Any) -> None:
        if own in dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("as the test wants it")

    if own in (*fails, *dies):
        Parting._send = spoil  # type: ignore[method-assign, assignment]


def hold_sums(note: Path) -> None:
    has_run = False
    run_backward, begin, wait = Engine._run_backward, LateState.begin, LateState.wait_for_sums

    def run_and_say(engine: Engine, *arguments: Any) -> None:
        nonlocal has_run
        run_backward(engine, *arguments)
        has_run = True

    def begin_anew(state: LateState) -> None:
        nonlocal has_run
        has_run = False
        begin(state)

    def say_and_wait(state: LateState) -> None:
        nonlocal has_run
        has_run = True
        wait(state)

    def hold_back(move: type[StageMove | NewcomerMove]) -> None:
        read = move.read_sums

        def wait_and_read(of: Any) -> Any:
            wait_until(lambda: has_run, "a backward")
            note.touch()
            return read(of)

        move.read_sums = wait_and_read  # type: ignore[method-assign,assignment]

    for move in (StageMove, NewcomerMove):
        hold_back(move)
    Engine._run_backward = run_and_say  # type: ignore[method-assign,assignment]
    LateState.begin = begin_anew  # type: ignore[method-assign,assignment]
    LateState.wait_for_sums = say_and_wait  # type: ignore[method-assign,assignment]


class NumberedExamples(torch.utils.data.Dataset):
    """As many as a global batch has, so that each step has every one."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"entries": torch.tensor(LEDGER_BASE**index, dtype=torch.float64)}


class LedgerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tally = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, entries: Tensor) -> Tensor:
        return x + self.tally * entries


class Ledger(nn.Module):
    """Its loss and the gradient of each block are the mean entry of the examples that were counted.

    An entry is a power of `LEDGER_BASE`, so that the digits of the sum say how often each example was counted.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LedgerBlock() for _ in range(task.blocks))
        self.cut_points = [CutPoint() for _ in range(task.blocks - 1)]

    def forward(self, entries: Tensor) -> Tensor:
        x = torch.zeros_like(entries)
        for block, cut_point in zip(self.blocks, [*self.cut_points, None], strict=True):
            x = block(x, entries)
            if cut_point is not None:
                x = cut_point(x)
        return (entries + (x - x.detach())).mean()


def make_entries(size: int, device: str = "cpu") -> dict[str, Tensor]:
    return {"entries": torch.zeros(size, dtype=torch.float64, device=device)}


def keep_ledger(task: Task) -> None:
    """Makes the script train a `Ledger`."""
    training_script.make_model = Ledger  # type: ignore[assignment]
    training_script.Examples = lambda _: NumberedExamples(task.global_batch)  # type: ignore[assignment,misc]
    training_script.example_batch = make_entries  # type: ignore[assignment]


def make_marks(interval: int, *, lossy: bool, finishes: bool) -> None:
    """Makes each rank copy its sums at this interval, and go on when those of all stages are kept."""
    RankShares.is_worth_finishing = lambda _: finishes  # type: ignore[method-assign, assignment]
    varuna.copies.rank_shares.micro_batches_between_marks = lambda _: interval  # type: ignore[assignment]
    varuna.copies.rank_shares.MARKS_SHARE = 1e9
    copy_sums = ShareOwner.copy_sums

    def copy_and_wait(owner: ShareOwner, *args: Any) -> None:
        copy_sums(owner, *args)
        copy = owner._current
        assert copy is not None

        def is_settled() -> bool:
            is_reported = owner._marks.read_reports(copy.series, copy.marked.mark.key) is not None
            return owner._keeper.is_stopped or (copy.is_sent and (is_reported or not is_served(owner._marks)))

        wait_until(is_settled, "the copies of the share")

    def fail_to_send(*_: Any) -> None:
        raise ConnectionError("as the test wants it")

    ShareOwner.copy_sums = copy_and_wait  # type: ignore[method-assign, assignment]
    if lossy:
        PacedConnection.send_files = fail_to_send  # type: ignore[method-assign, assignment]


def is_served(marks: ReplicaMarks) -> bool:
    """Whether rank 0, where ranks say what became of their marks, is there."""
    try:
        marks._store.num_keys()
    except dist.DistError:
        return False
    return True


def die_when_others_work(out: Path, kills: list[dict[str, Any]], own: int, p: int) -> None:
    """Puts this rank's death off until the ranks that are to keep their shares are in the pass."""
    die = killing_script.die
    number = next(number for number, kill in enumerate(kills) if kill["rank"] == own)
    step, hit = kills[number]["step"], {kill["rank"] // p for kill in kills[: number + 1]}
    others = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank // p not in hit]

    def has_begun(rank: int) -> bool:
        generation = int(os.environ["VARUNA_GENERATION"])
        # The rest of a step may be too short to have a part for each replica.
        paths = [path for kind in ("trace", "idle") if (path := out / f"{kind}.rank{rank}.jsonl").exists()]
        # What a rank is just writing is no line yet.
        lines = [line for path in paths for line in path.read_text().split("\n")[:-1]]
        return any(json.loads(line)[:2] == [generation, step] for line in lines)

    def wait_and_die() -> None:
        wait_until(lambda: all(map(has_begun, others)), "the other replicas' passes")
        die()

    killing_script.die = wait_and_die


def die_when_all_have_moved(out: Path) -> None:
    """Puts this rank's death off until no rank lacks late state."""
    die, marks = killing_script.die, LateMarks(out.parent)

    def wait_and_die() -> None:
        marks.wait_for_all()
        die()

    killing_script.die = wait_and_die


class Checkpointed(nn.Module):
    """Runs a block again in its backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def vary_model(variant: str) -> None:
    make = training_script.make_model

    def make_varied(task: Task) -> SmallGPT:
        model = make(task)
        if variant == "frozen":
            for part in (model.embedding, *model.blocks[:2]):
                part.requires_grad_(False)
        elif variant == "checkpointed":
            model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        return model

    training_script.make_model = make_varied


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    own = int(os.environ["RANK"])
    slow = wanted.get("slow", {})
    slow_ops(slow["op_s"] if slow.get("rank") == own else wanted.get("op_s", 0.0))
    trace_forwards(Path(wanted["out"]) / f"trace.rank{own}.jsonl")
    trace_idle_passes(Path(wanted["out"]) / f"idle.rank{own}.jsonl")
    if wanted.get("variant") == "ledger":
        keep_ledger(Task(**wanted["task"]))
    else:
        vary_model(wanted.get("variant", ""))
    if wanted.get("marks_every"):
        make_marks(wanted["marks_every"], lossy=own in wanted.get("lossy", []), finishes=wanted["finishes"])
    if wanted.get("copies_states"):
        copies_script.wait_for_copies({})
    if wanted.get("leaves_at"):
        hold_passes(**wanted["leaves_at"])
    if wanted.get("sums_after_backward"):
        hold_sums(Path(wanted["out"]) / f"sums.generation{os.environ['VARUNA_GENERATION']}.rank{own}")
    spoil_parting(own, **wanted.get("parting", {}))
    if wanted.get("keeps_inputs"):
        varuna.roles.kept_inputs._LEAST_STEP_S = 0.0
    kills = wanted.get("kills", [])
    meet_before(*(kill["rank"] for kill in kills))
    die_when_all_have_moved(Path(wanted["out"]))
    if own in [kill["rank"] for kill in kills if "step" in kill]:
        die_when_others_work(Path(wanted["out"]), kills, own, wanted["p"])
    for kill in kills:
        if kill.pop("rank") == own:
            arm(**kill)
    training_script.main()
