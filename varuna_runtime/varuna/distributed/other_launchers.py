"""This process as a launcher other than Varuna's started it: torchrun, srun, mpirun, or one with their variables.

Such a launcher knows neither shape nor sizes. The script gives them, or it leaves the shape open (`stages="auto"`);
then the ranks plan it when they have met (`varuna.roles.planned_shape`).

Letters: P stages, D replicas, B examples in the global batch, m in a micro-batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from varuna.devices.accelerator import default_device_kind, list_accelerators
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.stage_map import StageMap

__all__ = ["LaunchedRank", "Stages", "check_stages", "detect_launched_rank", "make_generation_number"]

Stages = int | Literal["auto"]
"""The argument of `Varuna`: P, or "auto" to leave the shape to the planner."""

_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # Those of a step: in a batch script SLURM_NTASKS and SLURM_PROCID are set, though it is one process.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Launcher, rank, number of processes. torch's own come first."""

_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """One of the processes that another launcher has started."""

    launcher: str
    rank: int
    """As the launcher numbers ranks."""
    local_rank: int
    """Its number on its machine; -1: unknown."""
    world_size: int

    def make_environment(
        self,
        stage_to_rank_map: str | None,
        *,
        stages: Stages | None,
        batch_size: int | None,
        chunk_size: int | None,
        checkpoint_url: str,
    ) -> WorkerEnvironment:
        """The environment of a worker that trains. Raises ValueError when an argument is missing or does not fit."""
        is_open = check_stages(stages) == "auto"
        stage_map = self._stage_map(stage_to_rank_map, stages)
        for name, size in (("batch_size", batch_size), ("chunk_size", chunk_size)):
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: it must be at least 1 example")
        if batch_size is None:
            raise ValueError(
                f"batch_size is not given, and {self.launcher} does not know it: give Varuna(..., batch_size=B), the "
                "examples of all replicas together in one step"
            )
        if is_open:
            open_shape = self._environment(stage_map, batch_size, chunk_size or 0, checkpoint_url)
            return replace(open_shape, shape_is_open=True)
        if chunk_size is None and stage_map.p > 1:
            raise ValueError(
                f"chunk_size is not given, and {self.launcher} does not know it: give Varuna(..., chunk_size=m), the "
                f"examples in a micro-batch; {stage_map.p} stages need several micro-batches to work at the same time"
            )
        return self._environment(stage_map, batch_size, chunk_size or -(-batch_size // stage_map.d), checkpoint_url)

    def make_profiling_environment(self) -> WorkerEnvironment:
        """The environment of a worker that measures, where neither shape nor sizes matter."""
        return self._environment(StageMap.of_shape(1, self.world_size), 0, 0, "")

    def _stage_map(self, text: str | None, stages: Stages | None) -> StageMap:
        """The map that the arguments give. That of an open shape has all ranks, as if each were a replica."""
        if text is None and stages is None:
            raise ValueError(
                f"{self.launcher} started {self.world_size} processes, but nothing says which of them train together: "
                "give Varuna(..., stages=P) for P pipeline stages (stages=1: data parallel alone), "
                "stages='auto' to let the planner choose, or a stage_to_rank_map"
            )
        if stages == "auto":
            if text is not None:
                raise ValueError(f"stages='auto' contradicts stage_to_rank_map {text!r}: give one of them")
            return StageMap.of_shape(1, self.world_size)
        if text is None:
            assert stages is not None
            if stages < 1 or self.world_size % stages:
                raise ValueError(
                    f"stages={stages} does not divide the {self.world_size} processes that {self.launcher} started: "
                    "each replica needs one process for each stage"
                )
            return StageMap.of_shape(stages, self.world_size // stages)
        stage_map = StageMap.parse(text)
        if stage_map.p * stage_map.d != self.world_size:
            raise ValueError(
                f"stage_to_rank_map {text!r} has {stage_map.p * stage_map.d} ranks, but {self.launcher} started "
                f"{self.world_size} processes: start as many as the map has"
            )
        if stages is not None and stages != stage_map.p:
            raise ValueError(f"stages={stages} contradicts stage_to_rank_map {text!r}, which has {stage_map.p}")
        return stage_map

    def _environment(
        self, stage_map: StageMap, global_batch: int, micro_batch: int, checkpoint_url: str
    ) -> WorkerEnvironment:
        stage, replica = stage_map.place_of(self.rank)
        return WorkerEnvironment(
            job_id="launched",
            generation=make_generation_number(),
            mode=Mode.TRAIN,
            rank=replica * stage_map.p + stage,
            local_rank=self._device_index(),
            world_size=self.world_size,
            rendezvous_host="127.0.0.1",
            rendezvous_port=0,
            plan=Plan(p=stage_map.p, d=stage_map.d, micro_batch=micro_batch, global_batch=global_batch),
            checkpoint_url=checkpoint_url,
            device=default_device_kind(),
            launcher_map=str(stage_map),
        )

    def _device_index(self) -> int:
        """The device of this rank. Slurm may show each task only its own device, whose index is then 0."""
        devices = len(list_accelerators())
        number = self.rank if self.local_rank < 0 else self.local_rank
        return number % devices if devices else max(self.local_rank, 0)


def check_stages(stages: object) -> Stages | None:
    """The argument `stages`. Raises ValueError when it is neither a whole number nor "auto"."""
    if stages is None or stages == "auto" or (isinstance(stages, int) and not isinstance(stages, bool)):
        return stages
    raise ValueError(f"stages={stages!r}: give the number of pipeline stages, or 'auto' to let the planner choose")


def make_generation_number() -> int:
    """A number above that of all earlier runs, which nothing counts here, so that no two write the same files."""
    return int(time.time())


def detect_launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """This process as its launcher numbers it; None when no launcher of several processes started it.

    `environ`: None: that of this process, and its default process group if there is one.

    Raises ValueError naming the variable when one is missing or malformed.
    """
    grouped = environ is None and dist.is_available() and dist.is_initialized()
    environ = os.environ if environ is None else environ
    launcher, rank, world_size = next(
        (variables for variables in _VARIABLES if variables[2] in environ), ("init_process_group", "", "")
    )
    local_rank = next((_number(environ, name) for name in _LOCAL_RANKS if name in environ), -1)
    if grouped:  # right even when the script has numbered the ranks itself
        return LaunchedRank(
            launcher=launcher, rank=dist.get_rank(), local_rank=local_rank, world_size=dist.get_world_size()
        )
    if not world_size:
        return None
    size = _number(environ, world_size)
    if size == 1:
        return LaunchedRank(launcher=launcher, rank=0, local_rank=local_rank, world_size=1)
    if rank not in environ:
        raise ValueError(f"{world_size}={size}, but {rank} is not set: give each process its own, from 0 to {size - 1}")
    found = LaunchedRank(launcher=launcher, rank=_number(environ, rank), local_rank=local_rank, world_size=size)
    if not 0 <= found.rank < found.world_size:
        raise ValueError(f"{rank}={found.rank}, but {world_size}={found.world_size}: ranks are 0 to {size - 1}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"{world_size}={size} processes are to train together, but {name} is not set: export MASTER_ADDR, the "
                "machine of rank 0, and MASTER_PORT, a free port there, the same for all ranks (for processes that "
                "train apart: WORLD_SIZE=1)"
            )
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} is not a whole number") from None
