"""Which ranks run where, and what each is told. Pure.

Letters: P stages, D replicas, B examples in the global batch, m in a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_planner.batching import micro_batch_sizes
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["LaunchError", "Layout", "script_arguments"]


class LaunchError(Exception):
    """What was asked for cannot be started; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Layout:
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
                f"{self.p} stages x {max(1, self.replicas)} replicas need {self.p * max(1, self.replicas)} GPUs, and "
                f"{self.machines} x {self.gpus_per_node} = {gpus} are there: lower --nstages or add machines"
            )
        if self.micro_batch > self.global_batch:
            raise LaunchError(f"chunk_size {self.micro_batch} is more than batch_size {self.global_batch}: lower it")
        count = len(micro_batch_sizes(self.global_batch, self.micro_batch))
        if self.d > count:
            raise LaunchError(
                f"{self.d} replicas have only {count} micro-batches between them (batch_size {self.global_batch}, "
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

    def ranks(self, machine: int) -> range:
        """The ranks of one machine; those of a machine that is not used are none."""
        first = min(machine * self.gpus_per_node, self.world_size)
        return range(first, min(first + self.gpus_per_node, self.world_size))

    def environment(
        self, rank: int, *, job_id: str, generation: int, host: str, port: int, checkpoint_url: str, device: str
    ) -> WorkerEnvironment:
        """What the worker of `rank` is told."""
        return WorkerEnvironment(
            job_id=job_id,
            generation=generation,
            mode=Mode.TRAIN,
            rank=rank,
            local_rank=rank % self.gpus_per_node,
            world_size=self.world_size,
            rendezvous_host=host,
            rendezvous_port=port,
            p=self.p,
            d=self.d,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            checkpoint_url=checkpoint_url,
            device=device,
        )


def script_arguments(environment: WorkerEnvironment, resume_step: int | None) -> list[str]:
    """The arguments that the seeds' scripts ask for; `--batch-size` is one replica's share of the global batch.

    Raises LaunchError when the replicas' shares differ: such a script multiplies its share by D.
    """
    share, rest = divmod(environment.global_batch, environment.d)
    if rest:
        raise LaunchError(
            f"batch_size {environment.global_batch} is no multiple of the {environment.d} replicas, and the script's "
            "--batch-size is the same for all: choose another batch_size, or start a script that takes its sizes from "
            "the environment with --no_arguments"
        )
    arguments = [
        f"--rank={environment.rank}",
        f"--chunk_size={environment.micro_batch}",
        f"--local_rank={environment.local_rank}",
        f"--stage_to_rank_map={environment.stage_to_rank_map}",
        f"--batch-size={share}",
    ]
    return arguments if resume_step is None else [*arguments, f"--resume_step={resume_step}"]
