"""What a user submits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from varuna_proto.bounds import MOST_GPUS, MOST_INT, MOST_SECONDS, MOST_STEP, NAME_CHARS, URL_CHARS, text_flaw

_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SECRET_VARIABLE = r"^(?!VARUNA_)[A-Za-z_][A-Za-z0-9_]{0,254}$"
_SECRET = r"^((file|env):[A-Za-z0-9_][A-Za-z0-9._-]{0,126}|vault:[A-Za-z0-9-]{1,127})$"
_VARIABLE = re.compile(r"[^=\s\0]+")
_MOST_BYTES = 100_000
"""Of a command, or of a variable: the kernel takes no more than 128 KiB in one."""
_MOST_VARIABLES = 1000
_MOST_ENVIRONMENT_BYTES = 500_000
"""A quarter of what a process can be started with."""


def _storable(text: str) -> str:
    flaw = text_flaw(text)
    if flaw is not None:
        raise ValueError(flaw)
    if len(text.encode()) > _MOST_BYTES:
        raise ValueError(f"has {len(text.encode())} bytes, and at most {_MOST_BYTES} are taken: put it in a file")
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""Such as can be sent to an agent, stored, and handed to a process."""
Path = Annotated[str, StringConstraints(max_length=URL_CHARS), AfterValidator(_storable)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def is_label_key(key: str) -> bool:
    """Whether a label may be called so. Stores find labels by JSON paths: what would need quoting there may not be."""
    return _LABEL_KEY.fullmatch(key) is not None


class Resources(_Strict):
    min_gpus: int = Field(default=1, ge=1, le=MOST_GPUS, description="the job waits until there are so many")
    max_gpus: int | None = Field(
        default=None, ge=1, le=MOST_GPUS, description="the job takes no more than these; null: all that help"
    )
    gpu_type: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="only GPUs with this in their name, in capitals or not, such as A100; null: any",
    )
    min_gpu_memory_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="only GPUs with so much memory, by what their VMs say; null: any",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Resources:
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            raise ValueError(
                f"max_gpus {self.max_gpus} is below min_gpus {self.min_gpus}: raise the one or lower the other"
            )
        return self


class VmLimits(_Strict):
    """Of all processes of the job on one VM together: workers, what they start, and `setup`."""

    memory_gib: float | None = Field(
        default=None,
        ge=0.0625,
        le=65536,
        allow_inf_nan=False,
        description="GiB of host memory, beyond which the kernel kills one of them; null: all that the VM has",
    )
    cpus: float | None = Field(
        default=None,
        ge=0.1,
        le=4096,
        allow_inf_nan=False,
        description="processors that they may keep busy on the average; null: all that the VM has",
    )
    processes: int | None = Field(
        default=None, ge=64, le=4_194_304, description="processes and threads at a time; null: 32768"
    )


class CheckpointSpec(_Strict):
    url: Path | None = Field(
        default=None,
        description="where checkpoints go: a path that all VMs share, or file://, s3://, gs://, abfs://, …; "
        "null: a folder of the manager's data directory",
    )
    interval_s: float | None = Field(
        default=None,
        gt=0,
        le=MOST_SECONDS,
        allow_inf_nan=False,
        description="seconds between automatic checkpoints; null: as often as pays, by what saves cost and VMs vanish",
    )
    may_start_over: bool = Field(
        default=False,
        description="train from step 0 again when checkpoints that were saved cannot be read any more; "
        "false: the job fails and says so",
    )


class PlanPins(_Strict):
    """Parts of the plan that the user wants as they are."""

    p: int | None = Field(default=None, ge=1, le=MOST_GPUS, description="pipeline stages; null: the planner's choice")
    d: int | None = Field(
        default=None, ge=1, le=MOST_GPUS, description="data-parallel replicas; null: the planner's choice"
    )
    micro_batch: int | None = Field(
        default=None, ge=1, le=MOST_INT, description="examples in a micro-batch; null: the planner's choice"
    )


class JobLimits(_Strict):
    """A job over one of these is saved and ended. They count from its submission, or from its last retry."""

    max_duration_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="seconds from its first start, whether it trains or waits for VMs; null: any number",
    )
    max_cost: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="of its VMs, in the provider's currency; VMs whose price is not known count nothing; null: any",
    )
    queue_timeout_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="seconds that it waits to be started; null: for ever"
    )


class JobSpec(_Strict):
    name: str = Field(description="unique among the jobs that are not over")
    workdir: Path = Field(description="absolute path; without `archive`, `run` starts there on every VM")
    archive: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the workdir, packed and uploaded: `run` starts in a copy of that; "
        "null: the workdir is on every VM already",
    )
    setup: Text | None = Field(
        default=None,
        min_length=1,
        description="shell command, run in the workdir once on each VM, before the job; null: nothing is run",
    )
    run: Text = Field(min_length=1, description="shell command, which every worker runs: one on each GPU")
    global_batch: int = Field(ge=1, le=MOST_INT, description="examples in a mini-batch, over all replicas")
    steps: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEP,
        description="how many the script trains, for progress bars and the time left and nothing else; "
        "null: N, if `run` has `--steps N`",
    )
    resources: Resources = Field(default=Resources(), description="how many GPUs it may have")
    vm_limits: VmLimits = Field(
        default=VmLimits(), description="what its processes may take on each VM, where that has cgroup v2"
    )
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="where its state is saved, and how often")
    env: dict[str, Text] = Field(
        default_factory=dict, max_length=_MOST_VARIABLES, description="environment variables of `run` and `setup`"
    )
    secrets: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="environment variables of `run` (not of `setup`) whose values the manager has and this job only "
        "names: `file:NAME`, a file in its secrets folder; `env:NAME`, its variable VARUNA_MANAGER_SECRET_NAME; "
        "`vault:NAME`, a secret of its Azure Key Vault",
        json_schema_extra={
            "propertyNames": {"pattern": _SECRET_VARIABLE},
            "additionalProperties": {"type": "string", "pattern": _SECRET},
        },
    )
    setup_timeout_s: float = Field(
        default=3600.0,
        ge=1,
        le=7 * 86_400,
        allow_inf_nan=False,
        description="seconds that a VM may take to fetch the workdir and to run `setup`; then that is killed, and has "
        "failed there",
    )
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
    limits: JobLimits = Field(default=JobLimits(), description="what it may take before it is saved and ended")
    labels: dict[str, str] = Field(
        default_factory=dict,
        max_length=32,
        description="words of yours by which jobs are found: varuna ps --label KEY=VALUE",
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

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not _VARIABLE.fullmatch(name) or len(name) > NAME_CHARS or text_flaw(name) is not None:
                raise ValueError(
                    f"{name[:80]!r} is no name of a variable: 1 to {NAME_CHARS} characters without blanks and '='"
                )
        total = sum(len(name.encode()) + len(value.encode()) for name, value in env.items())
        if total > _MOST_ENVIRONMENT_BYTES:
            raise ValueError(
                f"has {total} bytes in all, and at most {_MOST_ENVIRONMENT_BYTES} are taken: put some into files"
            )
        return env

    @field_validator("secrets")
    @classmethod
    def _references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, reference in secrets.items():
            if not re.fullmatch(_SECRET_VARIABLE, variable):
                raise ValueError(f"{variable!r} can be no variable: use letters, digits and '_', and not VARUNA_...")
            if not re.fullmatch(_SECRET, reference):
                # The value is not repeated: it may be the secret itself.
                raise ValueError(
                    f"{variable} must be file:NAME, env:NAME or vault:NAME, which the manager's operator has laid out: "
                    "a job names its secrets, and never has them"
                )
        return secrets

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, workdir: str) -> str:
        if not PurePosixPath(workdir).is_absolute():
            raise ValueError("must be an absolute path, as the agents see it")
        return workdir

    @field_validator("labels")
    @classmethod
    def _plain_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not is_label_key(key):
                raise ValueError(f"key {key!r} must be 1 to 63 letters, digits, '.', '_', '-' or '/'")
            if len(value) > 255 or not value.isprintable():
                raise ValueError(f"{key}: its value must be at most 255 printable characters")
        return labels

    @model_validator(mode="after")
    def _one_value_each(self) -> JobSpec:
        twice = sorted(self.env.keys() & self.secrets.keys())
        if twice:
            raise ValueError(f"{twice[0]} is in env and in secrets: leave it in one of them")
        return self

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
        if needed > MOST_GPUS:
            raise ValueError(
                f"the pinned plan needs {needed} GPUs, and at most {MOST_GPUS} are taken: lower plan.p or plan.d"
            )
        if self.resources.max_gpus is not None and needed > self.resources.max_gpus:
            raise ValueError(
                f"the pinned plan needs {needed} GPUs but resources.max_gpus is {self.resources.max_gpus}: "
                "raise max_gpus or lower plan.p or plan.d"
            )
        return self


def read_spec(document: object) -> tuple[JobSpec, str]:
    """A spec as it was stored, and what is wrong with it; empty: nothing.

    What an earlier version has taken may be wrong by now. In place of a wrong one comes one that trains nothing.
    """
    try:
        return JobSpec.model_validate(document), ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        is_shown = where and not where.startswith(("env", "secrets")) and not isinstance(first["input"], Mapping)
        given = f" is {repr(first['input'])[:80]}" if is_shown else ""
        text = f"its stored spec cannot be used: {where or 'it'}{given}: {first['msg'].removeprefix('Value error, ')}"
        return _NOTHING, " ".join(text.encode(errors="backslashreplace").decode().split())


_NOTHING = JobSpec(name="nothing", workdir="/", run="false", global_batch=1)
