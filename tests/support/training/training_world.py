"""Starts the ranks of one generation as real processes, without an agent, and collects their results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from small_gpt import Task
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
    checkpoint_url: str = ""
    agent_socket: Callable[[int], str] = lambda rank: ""
    device: Callable[[int], str] = lambda rank: "cpu"
    wanted: Mapping[str, Any] = field(default_factory=dict)
    script: Path = SCRIPT
    environ: Mapping[str, str] = field(default_factory=dict)
    """More of it, for every rank."""
    holders: tuple[int, ...] = ()
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
            ),
            checkpoint_url=self.checkpoint_url,
            agent_socket=self.agent_socket(rank),
            device=self.device(rank),
            holders=self.holders,
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
        return Outcome.read(self.out, len(codes))


@dataclass(frozen=True)
class Outcome:
    """What the ranks wrote."""

    ranks: list[dict[str, Any]]
    held: list[dict[str, Tensor]]
    optimized: list[dict[str, dict[str, Tensor]]]

    @classmethod
    def read(cls, out: Path, world_size: int) -> Outcome:
        ranks = range(world_size)
        return cls(
            [json.loads((out / f"rank{rank}.json").read_text()) for rank in ranks],
            [torch.load(out / f"rank{rank}.pt") for rank in ranks],
            [torch.load(out / f"rank{rank}.optimizer.pt") for rank in ranks],
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
        assert all(column == columns[0] for column in columns), f"ranks differ in {key}: {columns}"
        return columns[0]

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
