"""The environment of this process as a worker: from Varuna's launchers, another launcher, or the script's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from varuna.devices.accelerator import default_device_kind
from varuna.distributed.other_launchers import Stages, check_stages, detect_launched_rank, make_generation_number
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.stage_map import StageMap

__all__ = [
    "get_this_rank_config_varuna",
    "get_varuna_config",
    "list_shape_readers",
    "read_process_environment",
    "read_worker_environment",
    "record_environment",
]

_shape_readers: set[str] = set()
"""The functions through which the script has read its place in the shape."""

_joined: list[WorkerEnvironment] = []
"""The environment of this process' newest worker. Other launchers' variables have no shape, so it is kept here."""


def record_environment(environment: WorkerEnvironment) -> None:
    """Records the environment of a `Varuna(...)` for `read_process_environment`."""
    _joined[:] = [environment]


def read_process_environment() -> WorkerEnvironment | None:
    """The environment that Varuna's launchers give, or under another launcher a `Varuna` here; None in a plain process.

    Raises ValueError when another launcher started several processes and there is no `Varuna` yet.
    """
    environment = WorkerEnvironment.from_environ(os.environ)
    if environment is not None:
        return environment
    if _joined:
        return _joined[0]
    launched = detect_launched_rank()
    if launched is None or launched.world_size == 1:
        return None
    raise ValueError(
        f"{launched.launcher} started {launched.world_size} processes, but which of them train together is known only "
        "once the model is wrapped: make the Varuna object first, or give a stage_to_rank_map"
    )


def list_shape_readers() -> list[str]:
    """The functions by which the script of this process knows its place in the shape, which a morph changes."""
    return sorted(_shape_readers)


def get_varuna_config(stage_to_rank_map: str | None = None) -> tuple[int, int]:
    """(P, D): pipeline stages and data-parallel replicas of a stage-to-rank map.

    None: those of this process, which are (1, 1) where no launcher started it. Raises ValueError when malformed.
    """
    _shape_readers.add("get_varuna_config")
    if stage_to_rank_map is None:
        environment = read_process_environment()
        return (1, 1) if environment is None else (environment.plan.p, environment.plan.d)
    stage_map = StageMap.parse(stage_to_rank_map)
    return stage_map.p, stage_map.d


def get_this_rank_config_varuna(stage_to_rank_map: str | None = None, rank: int = -1) -> tuple[int, int]:
    """(stage, replica) of `rank`; of this process where either is left out (rank -1 is what scripts begin with).

    Raises ValueError when the map is malformed or the rank is not in it.
    """
    _shape_readers.add("get_this_rank_config_varuna")
    if stage_to_rank_map is None:
        environment = read_process_environment()
        stage_map = StageMap.of_shape(1, 1) if environment is None else StageMap.parse(environment.stage_to_rank_map)
    else:
        stage_map = StageMap.parse(stage_to_rank_map)
    return stage_map.place_of(_own_rank() if rank < 0 else rank)


def _own_rank() -> int:
    """This process' rank as its launcher numbers it."""
    environment = WorkerEnvironment.from_environ(os.environ)
    if environment is not None:
        return environment.rank
    launched = detect_launched_rank()
    return 0 if launched is None else launched.rank


def read_worker_environment(
    environ: Mapping[str, str] | None = None,
    *,
    stage_to_rank_map: str | None = None,
    stages: Stages | None = None,
    batch_size: int | None = None,
    chunk_size: int | None = None,
    profiles: bool = False,
) -> WorkerEnvironment:
    """The environment that the launcher gives this process; without a launcher, a single process: P = D = 1.

    The arguments are the script's own; None leaves one to the launcher. torchrun and its like know neither shape nor
    sizes, so there the arguments give them. Sizes that are not given are 0. `stages="auto"` leaves the shape to the
    launcher, and to the planner where the launcher knows none. `profiles`: no shape is needed, because the process
    measures and does not train.
    Raises ValueError when an argument contradicts the launcher, or one that it does not know is missing.
    """
    launched, stages = None, check_stages(stages)
    environment = WorkerEnvironment.from_environ(os.environ if environ is None else environ)
    if environment is None:
        launched = detect_launched_rank(environ)
    if launched is not None and profiles:
        return launched.make_profiling_environment()
    if launched is not None:
        url = (os.environ if environ is None else environ).get("VARUNA_CHECKPOINT_URL", "")
        if launched.world_size > 1 or stages == "auto":
            return launched.make_environment(
                stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size, checkpoint_url=url
            )
        alone = read_worker_environment(
            {}, stage_to_rank_map=stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size
        )
        return replace(alone, generation=make_generation_number(), checkpoint_url=url, launcher_map="0")
    stages = None if stages == "auto" else stages
    if environment is None:
        for name, value, p, d in (
            ("stage_to_rank_map", stage_to_rank_map, *get_varuna_config(stage_to_rank_map or "0")),
            ("stages", stages, 1 if stages is None else stages, 1),
        ):
            if (p, d) != (1, 1):
                raise ValueError(
                    f"{name}={value!r} needs {p * d} processes, but this one was not started by the varuna launcher, "
                    "torchrun or the like: submit the script as a job, start it with one of these, or leave the "
                    "argument out to run as a single process"
                )
        return WorkerEnvironment.alone(
            "local",
            micro_batch=chunk_size or batch_size or 0,
            global_batch=batch_size or 0,
            device=default_device_kind(),
        )
    if environment.mode is not Mode.TRAIN:
        return environment  # sizes and shape of the coming plan are not known yet
    for name, value, known in (
        ("stage_to_rank_map", _without_semicolon(stage_to_rank_map), environment.stage_to_rank_map),
        ("stages", stages, environment.plan.p),
        ("batch_size", batch_size, environment.plan.global_batch),
        ("chunk_size", chunk_size, environment.plan.micro_batch),
    ):
        if value is not None and value != known:
            raise ValueError(
                f"{name}={value!r} contradicts the launcher, which gives {known!r}: leave the argument out"
                + (" or submit the job with this global batch" if name == "batch_size" else "")
            )
    return environment


def _without_semicolon(stage_to_rank_map: str | None) -> str | None:
    """The map in the current spelling."""
    return None if stage_to_rank_map is None else str(StageMap.parse(stage_to_rank_map))
