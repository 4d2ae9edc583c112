"""Which ranks run on which machine, and the environment of each. Pure.

Letters: P stages, D replicas, B examples in the global batch, m in a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_planner.schedule.batching import micro_batch_sizes
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

__all__ = ["LaunchError", "RankLayout", "make_script_arguments"]


class LaunchError(Exception):
    """The ranks cannot be started; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """P×D ranks over machines with equally many devices, machine by machine. Raises LaunchError when they do not fit.

    Devices that no whole replica can use stay idle.
    """

    machines: int
    gpus_per_node: int
    p: int
    global_batch: int
    micro_batch: int
    replicas: int = 0
    """D; 0: as many as fit."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("number of machines", self.machines),
            ("gpus per node", self.gpus_per_node),
            ("nstages", self.p),
            ("batch_size", self.global_batch),
            ("chunk_size", self.micro_batch),
        ):
            if value < 1:
                raise LaunchError(f"{flag} {value}: it must be at least 1")
        gpus = self.machines * self.gpus_per_node
        if self.p * max(1, self.replicas) > gpus:
            raise LaunchError(
                f"{self.p} stages x {max(1, self.replicas)} replicas need {self.p * max(1, self.replicas)} GPUs, but "
                f"there are {self.machines} x {self.gpus_per_node} = {gpus}: lower --nstages or add machines"
            )
        if self.micro_batch > self.global_batch:
            raise LaunchError(f"chunk_size {self.micro_batch} exceeds batch_size {self.global_batch}: lower it")
        count = len(micro_batch_sizes(self.global_batch, self.micro_batch))
        if self.d > count:
            raise LaunchError(
                f"{self.d} replicas share only {count} micro-batches (batch_size {self.global_batch}, "
                f"chunk_size {self.micro_batch}): lower --chunk_size, or raise --nstages or --batch_size"
            )

    @property
    def d(self) -> int:
        return self.replicas or self.machines * self.gpus_per_node // self.p

    @property
    def world_size(self) -> int:
        return self.p * self.d

    @property
    def machines_used(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    def list_ranks(self, machine: int) -> range:
        """The ranks of one machine; empty for a machine that is not used."""
        first = min(machine * self.gpus_per_node, self.world_size)
        return range(first, min(first + self.gpus_per_node, self.world_size))

    def make_environment(
        self, rank: int, *, job_id: str, generation: int, host: str, port: int, checkpoint_url: str, device: str
    ) -> WorkerEnvironment:
        """The environment of the worker of `rank`."""
        return WorkerEnvironment(
            job_id=job_id,
            generation=generation,
            mode=Mode.TRAIN,
            rank=rank,
            local_rank=rank % self.gpus_per_node,
            world_size=self.world_size,
            rendezvous_host=host,
            rendezvous_port=port,
            plan=Plan(p=self.p, d=self.d, micro_batch=self.micro_batch, global_batch=self.global_batch),
            checkpoint_url=checkpoint_url,
            device=device,
        )


def make_script_arguments(environment: WorkerEnvironment, resume_step: int | None) -> list[str]:
    """The arguments of scripts that ask for their rank and sizes; `--batch-size` is one replica's share of the batch.

    Raises LaunchError when the replicas' shares differ: such a script multiplies its share by D.
    """
    plan = environment.plan
    share, rest = divmod(plan.global_batch, plan.d)
    if rest:
        raise LaunchError(
            f"batch_size {plan.global_batch} is not a multiple of the {plan.d} replicas, but the script's "
            "--batch-size is the same for all: choose another batch_size, or, if the script takes its sizes from "
            "the environment, add --no_arguments"
        )
    if len(set(plan.shares)) > 1:
        raise LaunchError(
            f"the replicas run {', '.join(map(str, plan.shares))} micro-batches, but the script's --batch-size "
            "is the same for all: use GPUs of one type, or, if the script takes its sizes from the "
            "environment, add --no_arguments"
        )
    arguments = [
        f"--rank={environment.rank}",
        f"--chunk_size={plan.micro_batch}",
        f"--local_rank={environment.local_rank}",
        f"--stage_to_rank_map={environment.stage_to_rank_map}",
        f"--batch-size={share}",
    ]
    return arguments if resume_step is None else [*arguments, f"--resume_step={resume_step}"]
