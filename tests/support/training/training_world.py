"""Starts the ranks of one generation as real processes, without an agent, and collects their results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor

from small_gpt import Task, Trained
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from waiting import DEADLINE_S, wait_until

SCRIPT = Path(__file__).with_name("training_script.py")
ZYGOTE = Path(__file__).with_name("training_zygote.py")


class Zygote:
    """The process from which the ranks are forked. `imports`: modules that it imports for them."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE), *imports],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, spec: Path) -> None:
        """Starts the ranks of a world."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{spec}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)


@dataclass
class Ranks:
    """The processes of a generation. Use it in a `with` block: what still runs at its end is killed."""

    zygote: Zygote
    folder: Path
    task: Task
    p: int
    d: int
    micro_batch: int = 2
    generation: int = 1
    recompute: tuple[bool, ...] = ()
    policy: str = "work-conserving"
    run_ahead: int = 0
    stage_starts: tuple[int, ...] = ()
    """First section of each stage; empty: sections are spread evenly."""
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica; empty: as equal as can be."""
    link_connections: int = 1
    checkpoint_url: str = ""
    agent_socket: Callable[[int], str] = lambda rank: ""
    device: Callable[[int], str] = lambda rank: "cpu"
    gpu_type: Callable[[int], str] = lambda rank: ""
    zone: Callable[[int], str] = lambda rank: ""
    wanted: Mapping[str, Any] = field(default_factory=dict)
    script: Path = SCRIPT
    environ: Mapping[str, str] = field(default_factory=dict)
    """More of it, for every rank."""
    holders: tuple[int, ...] = ()
    keepers: tuple[int, ...] = ()
    copies_shares: bool = False
    launched: Callable[[int], Mapping[str, str]] | None = None
    """By rank: the variables of another launcher, in place of Varuna's."""

    @property
    def out(self) -> Path:
        return self.folder / f"generation{self.generation}"

    def environment(self, rank: int) -> WorkerEnvironment:
        return WorkerEnvironment(
            job_id="test",
            generation=self.generation,
            mode=Mode.TRAIN,
            rank=rank,
            local_rank=0,
            world_size=self.p * self.d,
            rendezvous_host="127.0.0.1",
            rendezvous_port=0,
            plan=Plan(
                p=self.p,
                d=self.d,
                micro_batch=self.micro_batch,
                global_batch=self.task.global_batch,
                policy=self.policy,
                run_ahead=self.run_ahead,
                recompute=self.recompute,
                stage_starts=self.stage_starts,
                shares=self.shares,
                link_connections=self.link_connections,
            ),
            checkpoint_url=self.checkpoint_url,
            checkpoint_interval_s=3600.0,  # there are those saves that a test asks for, however slow the machine
            agent_socket=self.agent_socket(rank),
            device=self.device(rank),
            gpu_type=self.gpu_type(rank),
            zone=self.zone(rank),
            holders=self.holders,
            keepers=self.keepers,
            copies_shares=self.copies_shares,
        )

    def holder_environment(self) -> WorkerEnvironment:
        """What a process that gives this generation its state has to know of it."""
        return replace(self.environment(0), rendezvous_port=wait_until(self._port))

    def _port(self) -> int | None:
        return next((event["port"] for event in self._list_events() if "port" in event), None)

    def __enter__(self) -> Ranks:
        self.out.mkdir(parents=True)
        job = self.out / "job.json"
        job.write_text(json.dumps({"task": asdict(self.task), "out": str(self.out), **self.wanted}))
        launched = self.launched or (lambda rank: self.environment(rank).to_environ())
        environ = [{**launched(rank), **self.environ} for rank in range(self.p * self.d)]
        spec = self.out / "world.json"
        # CUDA does not survive a fork, and some import in the zygote may have looked for a device.
        fresh = self.device(0) != "cpu"
        spec.write_text(json.dumps({"environ": environ, "script": str(self.script), "job": str(job), "fresh": fresh}))
        self.zygote.start(spec)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in (self._pids() or {}).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.exit_codes()

    def exit_codes(self) -> list[int]:
        """Waits for all ranks."""
        ends = self.ends()
        return [ends[rank]["code"] for rank in sorted(ends)]

    def ends(self) -> dict[int, dict[str, Any]]:
        """Waits for all ranks. Returns by rank the exit code, and the end on the monotonic clock."""
        return wait_until(lambda: ends if len(ends := self._events("code")) == self.p * self.d else None)

    def _pids(self) -> dict[int, int] | None:
        started = self._events("pid")
        return {rank: event["pid"] for rank, event in started.items() if rank not in self._events("code")}

    def _events(self, key: str) -> dict[int, dict[str, Any]]:
        return {event["rank"]: event for event in self._list_events() if key in event}

    def _list_events(self) -> list[dict[str, Any]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.out.glob("rank*.log")))

    def finish(self) -> Outcome:
        """Waits for all ranks, which must end well, and gathers their results."""
        codes = self.exit_codes()
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.logs()}"
        return Outcome.read(list_results(self.out, len(codes)))


def list_results(out: Path, world_size: int) -> list[Path]:
    """Where the ranks of a generation leave their results, for `Outcome.read`."""
    return [out / f"rank{rank}" for rank in range(world_size)]


@dataclass(frozen=True)
class Outcome:
    """What the ranks wrote."""

    ranks: list[dict[str, Any]]
    held: list[dict[str, Tensor]]
    optimized: list[dict[str, dict[str, Tensor]]]

    @classmethod
    def read(cls, paths: Collection[Path]) -> Outcome:
        """`paths`: of each rank's files, without their suffixes."""
        return cls(
            [json.loads(path.with_suffix(".json").read_text()) for path in paths],
            [torch.load(path.with_suffix(".pt")) for path in paths],
            [torch.load(path.with_suffix(".optimizer.pt")) for path in paths],
        )

    @property
    def losses(self) -> list[float]:
        """By step; the same on every rank."""
        return self._same("loss")

    @property
    def norms(self) -> list[float]:
        return self._same("norm")

    def _same(self, key: str) -> list[float]:
        columns = [[step[key] for step in rank["steps"]] for rank in self.ranks]
        longest = max(columns, key=len)  # a process that has joined later lacks the first steps
        assert all(column == longest[len(longest) - len(column) :] for column in columns), (
            f"ranks differ in {key}: {columns}"
        )
        return longest

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those of all stages; where several ranks hold one, they must hold the same to the last bit."""
        merged: dict[str, Tensor] = {}
        for held in self.held:
            for name, tensor in held.items():
                assert torch.equal(merged.setdefault(name, tensor), tensor), f"ranks differ in {name}"
        return merged

    @property
    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's, by parameter."""
        merged: dict[str, dict[str, Tensor]] = {}
        for kept in self.optimized:
            for name, state in kept.items():
                for key, tensor in state.items():
                    first = merged.setdefault(name, {}).setdefault(key, tensor)
                    assert torch.equal(first, tensor), f"ranks differ in the optimizer's {key} of {name}"
        return merged


def assert_exact(outcome: Outcome, expected: Outcome | Trained, task: Task, *, after: int = 0) -> None:
    """That losses, gradient norms and parameters differ from the undisturbed training's only by rounding.

    Relative to each loss and norm, and to the largest value of each parameter, and so that the order of sums does not
    count: 1e-6 in fp32 and 1e-12 in float64. Only the parameters of Adam and LAMB may differ by 2e-5 of their norm in
    fp32, since these divide by the roots of squares, and make as much of a small gradient's rounding as of a large one:
    single values whose gradients nearly cancel out differ by more, and by how much depends on the processor.

    Args:
        after: `outcome` has only the steps after this one.
    """
    within = 1e-12 if task.doubled else 1e-6
    assert outcome.losses == pytest.approx(expected.losses[after:], rel=within, abs=0.0)
    assert outcome.norms == pytest.approx(expected.norms[after:], rel=within, abs=0.0)
    assert outcome.parameters.keys() == expected.parameters.keys()
    is_amplified = task.optimizer in ("adamw", "lamb") and not task.doubled
    for name, value in expected.parameters.items():
        order, bound = (2.0, 2e-5) if is_amplified else (math.inf, within)
        difference, size = (float(each.norm(order)) for each in (outcome.parameters[name] - value, value))
        assert difference <= bound * size, f"{name}: {difference:.2g} of {size:.2g}"
