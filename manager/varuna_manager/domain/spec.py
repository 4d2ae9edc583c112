"""What a user submits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

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
from varuna_proto.wording import count_of

_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_IN_PLACE_SWITCH = "VARUNA_IN_PLACE"
"""A job's variable; 0: each generation gets new processes, which keep nothing of the one before."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SECRET_VARIABLE = r"^(?!VARUNA_)[A-Za-z_][A-Za-z0-9_]{0,254}$"
_SECRET = r"^((file|env):[A-Za-z0-9_][A-Za-z0-9._-]{0,126}|vault:[A-Za-z0-9-]{1,127})$"
_VARIABLE = re.compile(r"[^=\s\0]+")
_MOST_BYTES = 100_000
"""The length of a command or of a variable: the kernel takes at most 128 KiB in one."""
_MOST_VARIABLES = 1000
_MOST_ENVIRONMENT_BYTES = 500_000
"""A quarter of the kernel's limit for the environment of a process."""


def _storable(text: str) -> str:
    flaw = text_flaw(text)
    if flaw is not None:
        raise ValueError(flaw)
    if len(text.encode()) > _MOST_BYTES:
        raise ValueError(f"has {len(text.encode())} bytes, but the limit is {_MOST_BYTES}: put it in a file")
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""Text that can be sent to an agent, stored, and passed to a process."""
Path = Annotated[str, StringConstraints(max_length=URL_CHARS), AfterValidator(_storable)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def is_label_key(key: str) -> bool:
    """Whether `key` can name a label. The store finds labels by JSON paths, so keys need no quoting there."""
    return _LABEL_KEY.fullmatch(key) is not None


class Resources(_Strict):
    min_gpus: int = Field(default=1, ge=1, le=MOST_GPUS, description="the job waits until this many GPUs are free")
    max_gpus: int | None = Field(
        default=None,
        ge=1,
        le=MOST_GPUS,
        description="the most GPUs that the job takes; null: as many as make it faster",
    )
    gpu_type: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="the job takes only GPUs whose name contains this, such as A100, in upper or lower case; null: any",
    )
    min_gpu_memory_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="the job takes only GPUs with at least this much memory, as their VMs report it; null: any",
    )
    mix_gpu_types: bool = Field(
        default=True,
        description="whether a job that shares the fleet with no other may train on GPUs of several types at a time, "
        "where that is faster; false: all its GPUs are of one type",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Resources:
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            raise ValueError(
                f"max_gpus {self.max_gpus} is below min_gpus {self.min_gpus}: raise max_gpus or lower min_gpus"
            )
        return self


class VmLimits(_Strict):
    """Limits of all processes of the job on one VM together: workers, their child processes, and `setup`."""

    memory_gib: float | None = Field(
        default=None,
        ge=0.0625,
        le=65536,
        allow_inf_nan=False,
        description="GiB of host memory; beyond that, the kernel kills a process; null: all of the VM's memory",
    )
    cpus: float | None = Field(
        default=None,
        ge=0.1,
        le=4096,
        allow_inf_nan=False,
        description="processors that they may keep busy on average; null: all of the VM's processors",
    )
    processes: int | None = Field(
        default=None, ge=64, le=4_194_304, description="processes and threads at the same time; null: 32768"
    )


class CheckpointSpec(_Strict):
    url: Path | None = Field(
        default=None,
        description="where checkpoints are stored: a path that all VMs share, or file://, s3://, gs://, abfs://, …; "
        "null: --default-checkpoint-url of the manager, or with local VMs a folder of its data directory",
    )
    interval_s: float | None = Field(
        default=None,
        gt=0,
        le=MOST_SECONDS,
        allow_inf_nan=False,
        description="seconds between automatic checkpoints; "
        "null: chosen from the cost of a save and the rate at which VMs are lost",
    )
    may_start_over: bool = Field(
        default=False,
        description="true: train from step 0 again when no saved checkpoint can be read any longer; "
        "false: the job fails with an error",
    )


class PlanPins(_Strict):
    """Parts of the plan that the user fixes."""

    p: int | None = Field(default=None, ge=1, le=MOST_GPUS, description="pipeline stages; null: the planner's choice")
    d: int | None = Field(
        default=None, ge=1, le=MOST_GPUS, description="data-parallel replicas; null: the planner's choice"
    )
    micro_batch: int | None = Field(
        default=None, ge=1, le=MOST_INT, description="examples in a micro-batch; null: the planner's choice"
    )


class JobLimits(_Strict):
    """A job that reaches one of these is saved and ended. They count from its submission or its last retry."""

    max_duration_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="seconds since its first start, whether it trains or waits for VMs; null: no limit",
    )
    max_cost: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="cost of its VMs, in the provider's currency; VMs without a price count as free; null: no limit",
    )
    queue_timeout_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="seconds that it waits for its first start; null: no limit"
    )


class JobSpec(_Strict):
    name: str = Field(description="unique among the jobs that have not ended")
    workdir: Path = Field(description="absolute path; without `archive`, `run` starts there on every VM")
    archive: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the packed and uploaded workdir: `run` starts in a copy of it; "
        "null: the workdir is on every VM already",
    )
    setup: Text | None = Field(
        default=None,
        min_length=1,
        description="shell command that runs once on each VM, in the workdir, before the job starts there; null: none",
    )
    run: Text = Field(
        min_length=1, description="shell command that every worker runs; there is one worker for each GPU"
    )
    global_batch: int = Field(ge=1, le=MOST_INT, description="examples in a mini-batch, over all replicas")
    steps: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEP,
        description="number of steps that the script trains, used only for progress bars and the remaining time; "
        "null: N, if `run` has `--steps N`",
    )
    resources: Resources = Field(default=Resources(), description="how many GPUs the job takes, and which")
    vm_limits: VmLimits = Field(default=VmLimits(), description="limits of its processes on each VM that has cgroup v2")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="where its state is saved, and how often")
    env: dict[str, Text] = Field(
        default_factory=dict, max_length=_MOST_VARIABLES, description="environment variables of `run` and `setup`"
    )
    secrets: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="environment variables of `run` (not of `setup`) whose values only the manager has. The job names "
        "them: `file:NAME`, a file in the manager's secrets folder; `env:NAME`, the manager's variable "
        "VARUNA_MANAGER_SECRET_NAME; `vault:NAME`, a secret of its Azure Key Vault",
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
        description="seconds that a VM may take to fetch the workdir and to run `setup`; after that, `setup` is killed "
        "and has failed on this VM",
    )
    plan: PlanPins = Field(default=PlanPins(), description="parts of the plan that are fixed")
    profile_only: bool = Field(
        default=False, description="true: the job has succeeded as soon as its profile is measured"
    )
    max_restarts_on_errors: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="how many times the job is restarted from its checkpoint after its script has failed",
    )
    on_nonfinite: Literal["skip", "stop", "go_on"] = Field(
        default="skip",
        description="a step whose loss or gradient is not finite: skip: it updates nothing, and more than the script's "
        "`max_non_finite_steps` (10) in a row fail the job; stop: the first one fails the job; go_on: its update is "
        "made, as in plain PyTorch. stop and go_on take precedence over the script's `max_non_finite_steps`",
    )
    copies: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="copies in other VMs' memories: of each stage's state, so that the loss of a VM costs no section, "
        "and of the sums of gradients in long steps, so that it costs seconds of the step under way. auto: for each "
        "generation, those that are worth the time that they take, by the fleet's losses and the length of steps; on: "
        "all that are possible; off: none",
    )
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="jobs of higher priority get their GPUs first, if needed from jobs of lower priority",
    )
    limits: JobLimits = Field(default=JobLimits(), description="limits at which the job is saved and ended")
    labels: dict[str, str] = Field(
        default_factory=dict,
        max_length=32,
        description="your own keys and values, by which `varuna ps --label KEY=VALUE` finds jobs",
    )

    @property
    def holds_state(self) -> bool:
        """Whether its processes hold their state when a generation ends, for the next one."""
        return self.env.get(_IN_PLACE_SWITCH) != "0"

    @property
    def needs_preparing(self) -> bool:
        """Whether a VM has to prepare the workdir before workers can start there."""
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
                    f"{name[:80]!r} is not a valid variable name: use 1 to {NAME_CHARS} characters, no blanks, no '='"
                )
        total = sum(len(name.encode()) + len(value.encode()) for name, value in env.items())
        if total > _MOST_ENVIRONMENT_BYTES:
            raise ValueError(
                f"has {total} bytes in all, but the limit is {_MOST_ENVIRONMENT_BYTES}: put some into files"
            )
        return env

    @field_validator("secrets")
    @classmethod
    def _references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, reference in secrets.items():
            if not re.fullmatch(_SECRET_VARIABLE, variable):
                raise ValueError(
                    f"{variable!r} is not a valid variable: use letters, digits and '_', and do not begin with VARUNA_"
                )
            if not re.fullmatch(_SECRET, reference):
                # The value is not repeated: it may be the secret itself.
                raise ValueError(
                    f"{variable} must be file:NAME, env:NAME or vault:NAME: a job only names its secrets, and the "
                    "manager's operator provides the values"
                )
        return secrets

    @field_validator("copies", mode="before")
    @classmethod
    def _read_yaml_words(cls, copies: Any) -> Any:
        """YAML reads a bare `on` or `off` as a truth value."""
        return {True: "on", False: "off"}[copies] if isinstance(copies, bool) else copies

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
            raise ValueError(f"{twice[0]} is in env and in secrets: remove it from one of them")
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
                f"the pinned plan needs {count_of(needed, 'GPU')}, but the limit is {MOST_GPUS}: lower plan.p or plan.d"
            )
        if self.resources.max_gpus is not None and needed > self.resources.max_gpus:
            raise ValueError(
                f"the pinned plan needs {count_of(needed, 'GPU')} but resources.max_gpus is {self.resources.max_gpus}: "
                "raise max_gpus or lower plan.p or plan.d"
            )
        return self


def read_spec(document: object) -> tuple[JobSpec, str]:
    """A stored spec, and the error in it; empty: none.

    A spec that an earlier version accepted may be invalid now. It is replaced by a spec that trains nothing.
    """
    try:
        return JobSpec.model_validate(document), ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        is_shown = where and not where.startswith(("env", "secrets")) and not isinstance(first["input"], Mapping)
        given = f" is {repr(first['input'])[:80]}" if is_shown else ""
        text = f"its stored spec is invalid: {where or 'it'}{given}: {first['msg'].removeprefix('Value error, ')}"
        return _NOTHING, " ".join(text.encode(errors="backslashreplace").decode().split())


_NOTHING = JobSpec(name="nothing", workdir="/", run="false", global_batch=1)
