"""Every point at which a rank may be killed, and how the other ranks then end.

Letters: P stages, D replicas, N micro-batches of a replica.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

SCRIPT = Path(__file__).with_name("killing_script.py")
SHAPES = [(3, 1), (2, 2)]
N = 4
STEP = 2
"""The step in which ranks are killed."""


@dataclass(frozen=True)
class Kill:
    """One rank of one shape is killed at one point."""

    p: int
    d: int
    rank: int
    at: str
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.p}x{self.d} rank {self.rank} at {self.at} {' '.join(f'{k}={v}' for k, v in self.details.items())}"
        )


def op_kills(p: int, d: int, rank: int) -> Iterator[Kill]:
    """At every op of the first, a middle and the last micro-batch: just before it, and when it has computed."""
    for op in ("F", "R", "B"):
        if op == "R" and rank % p == p - 1:
            continue  # the last stage never recomputes
        for micro_batch in (0, N // 2, N - 1):
            for after in (False, True):
                yield Kill(p, d, rank, "op", {"op": op, "micro_batch": micro_batch, "after": after, "step": STEP})


def phase_kills(p: int, d: int, rank: int) -> Iterator[Kill]:
    """At everything else that a rank does."""
    groups = 5 if p * d == 4 or rank == 1 else 3  # links, replicas, tied weights, all: as many as every rank has
    for count in range(1, groups + 1):
        yield Kill(p, d, rank, "building", {"count": count})
    yield Kill(p, d, rank, "built", {"count": groups})
    yield Kill(p, d, rank, "copying parameters")
    for phase in ("sending", "receiving", "all-reduce", "before the sums", "agreement", "agreed"):
        yield Kill(p, d, rank, phase, {"step": STEP})
    for phase in ("save", "saving", "saved"):
        yield Kill(p, d, rank, phase)
    for phase in ("loading", "loaded"):
        yield Kill(p, d, rank, phase)


def make_checkpoint(zygote: Zygote, folder: Path) -> str:
    """Trains what ranks that are killed while loading resume from. Returns its store."""
    url = str(folder / "store")
    task = Task(steps=2, tied=True)
    with Ranks(zygote, folder, task, 2, 1, wanted={"save": {"step": 2, "url": url}}) as world:
        world.finish()
    return url


def seconds_until_survivors_left(zygote: Zygote, folder: Path, kill: Kill, checkpoint: str) -> list[float]:
    """From the kill to the end of each survivor's process.

    Fails when a survivor ends for another reason than a lost peer, or notices the loss only at a time limit.
    """
    loads = kill.at in ("loading", "loaded")
    wanted = {
        "kill": {"rank": kill.rank, "at": kill.at, **kill.details},
        "save": {"step": STEP, "url": str(folder / "own-store")},
        "forever": True,
    }
    with Ranks(
        zygote,
        folder,
        Task(global_batch=2 * N * kill.d, tied=True),
        kill.p,
        kill.d,
        generation=2,
        recompute=(True,) * (kill.p - 1) + (False,),
        run_ahead=1,
        script=SCRIPT,
        checkpoint_url=checkpoint if loads else "",
        wanted=wanted,
    ) as world:
        ends = world.ends()
    died = ends.pop(kill.rank)
    assert died["code"] == -signal.SIGKILL, f"{kill}: {died}\n{world.logs()}"
    codes = [end["code"] for end in ends.values()]
    assert codes == [EXIT_PEER_LOST] * len(codes), f"{kill}: exit codes {codes}\n{world.logs()}"
    assert "timed out" not in world.logs(), f"{kill}\n{world.logs()}"
    return [end["at"] - died["at"] for end in ends.values()]
