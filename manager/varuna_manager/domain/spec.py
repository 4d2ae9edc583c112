"""What a user submits."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(_Strict):
    min_gpus: int = Field(default=1, ge=1, description="the job waits until there are so many")
    max_gpus: int | None = Field(
        default=None, ge=1, description="the job takes no more than these; null: all that help"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Resources:
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            raise ValueError(
                f"max_gpus {self.max_gpus} is below min_gpus {self.min_gpus}: raise the one or lower the other"
            )
        return self


class CheckpointSpec(_Strict):
    url: str | None = Field(
        default=None,
        description="where checkpoints go: a path that all VMs share, or file://, s3://, gs://, abfs://, …; "
        "null: a folder of the manager's data directory",
    )
    interval_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="seconds between automatic checkpoints; null: as often as pays, by what saves cost and VMs vanish",
    )


class PlanPins(_Strict):
    """Parts of the plan that the user wants as they are."""

    p: int | None = Field(default=None, ge=1, description="pipeline stages; null: the planner's choice")
    d: int | None = Field(default=None, ge=1, description="data-parallel replicas; null: the planner's choice")
    micro_batch: int | None = Field(
        default=None, ge=1, description="examples in a micro-batch; null: the planner's choice"
    )


class JobSpec(_Strict):
    name: str = Field(description="unique among the jobs that are not over")
    workdir: str = Field(description="absolute path; without `archive`, `run` starts there on every VM")
    archive: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the workdir, packed and uploaded: `run` starts in a copy of that; "
        "null: the workdir is on every VM already",
    )
    setup: str | None = Field(
        default=None,
        min_length=1,
        description="shell command, run in the workdir once on each VM, before the job; null: nothing is run",
    )
    run: str = Field(min_length=1, description="shell command, which every worker runs: one on each GPU")
    global_batch: int = Field(ge=1, description="examples in a mini-batch, over all replicas")
    steps: int | None = Field(
        default=None,
        ge=1,
        description="how many the script trains, for progress bars and the time left and nothing else; "
        "null: N, if `run` has `--steps N`",
    )
    resources: Resources = Field(default=Resources(), description="how many GPUs it may have")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="where its state is saved, and how often")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of `run` and `setup`")
    plan: PlanPins = Field(default=PlanPins(), description="parts of the plan that stay as they are said here")
    profile_only: bool = Field(default=False, description="the job has succeeded when its profile is measured")
    max_restarts_on_errors: int = Field(
        default=0, ge=0, le=1000, description="so often is the job restarted from its checkpoint when its script fails"
    )
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="jobs of higher priority get their GPUs first, from lower ones if needed",
    )

    @property
    def needs_preparing(self) -> bool:
        """Whether a VM has something to do before workers can start there."""
        return self.archive is not None or self.setup is not None

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("must be 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit")
        return name

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, workdir: str) -> str:
        if not PurePosixPath(workdir).is_absolute():
            raise ValueError("must be an absolute path, as the agents see it")
        return workdir

    @model_validator(mode="after")
    def _pins_can_be_met(self) -> JobSpec:
        pins = self.plan
        micro_batches = -(-self.global_batch // (pins.micro_batch or 1))
        if pins.d is not None and pins.d > micro_batches:
            raise ValueError(
                f"plan.d {pins.d} is more than the {micro_batches} micro-batches of global_batch {self.global_batch}: "
                f"each replica needs one; lower plan.d or raise global_batch"
            )
        if pins.micro_batch is not None and pins.micro_batch > self.global_batch:
            raise ValueError(
                f"plan.micro_batch {pins.micro_batch} is more than global_batch {self.global_batch}: lower it"
            )
        needed = (pins.p or 1) * (pins.d or 1)
        if self.resources.max_gpus is not None and needed > self.resources.max_gpus:
            raise ValueError(
                f"the pinned plan needs {needed} GPUs but resources.max_gpus is {self.resources.max_gpus}: "
                "raise max_gpus or lower plan.p or plan.d"
            )
        return self
