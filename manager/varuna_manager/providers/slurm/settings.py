"""Settings of the Slurm provider: a YAML or TOML file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from varuna_manager.providers.settings_file import read_settings_file

__all__ = ["SlurmSettings", "parse_time_limit", "read_slurm_settings"]

_SIGNAL_EARLY_S = 60
"""Slurm may send the signal of `--signal` that much earlier than it was asked to (sbatch's manual page)."""
_LIMIT = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)")
_OWN_OPTIONS = frozenset(
    {"--array", "--comment", "--export", "--job-name", "--nodes", "--ntasks", "--output", "--parsable", "--requeue"}
    | {"--no-requeue", "--signal", "--time", "--wrap", "--chdir", "--partition", "--qos", "--account", "--constraint"}
    | {"--gres", "--exclusive", "--mem", "--cpus-per-task", "--hold", "--wait", "--clusters"}
)


class SlurmSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    fleet: str = Field(
        default="varuna",
        pattern=r"^[a-z][a-z0-9-]{0,31}$",
        description="marks the jobs of this manager; each manager of a user has its own",
    )
    partition: str | None = Field(default=None, description="null: the cluster's default")
    account: str | None = None
    qos: str | None = None
    constraint: str | None = Field(default=None, description="features that the nodes must have")
    gpus: int = Field(default=1, ge=1, description="devices of a VM; with device cpu, its workers")
    gres: str | None = Field(
        default=None, description="such as gpu:a100:4; null: gpu:GPUS with device cuda, nothing with cpu"
    )
    cpus: int | None = Field(default=None, ge=1, description="cores of a VM; null: the partition's default")
    memory: str | None = Field(default=None, pattern=r"^\d+[KMGT]?$", description="such as 200G; null: its default")
    exclusive: bool = Field(default=False, description="whether a VM has its node for itself")
    time_limit: str | None = Field(default=None, description="such as 1-00:00:00; null: the partition's default")
    notice_s: int = Field(
        default=180, ge=10, description="how long before a job's end its VM leaves; the last steps need this time"
    )
    pending_s: float = Field(
        default=600.0, gt=0, description="how long a job waits in Slurm's queue before it counts as refused"
    )
    sbatch_options: tuple[str, ...] = Field(default=(), description="further options, such as --reservation=NAME")
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="device of the VMs' workers")
    device_memory_gib: float | None = Field(default=None, gt=0, description="memory of each GPU")
    gpu_type: str = Field(default="", max_length=100, description="name of the GPUs, for jobs with a gpu_type")
    price_per_hour: float | None = Field(default=None, ge=0, description="of a VM, in your own currency")
    agent_command: tuple[str, ...] = Field(
        default=(sys.executable, "-m", "varuna_agent.main"),
        min_length=1,
        description="starts an agent on a node; default: the manager's own Python, on a file system that all share",
    )
    before_agent: str = Field(default="", description="lines of Bash that run first, such as module load cuda")
    export: tuple[str, ...] = Field(
        default=(), description="names of the manager's environment variables that its jobs get besides PATH, HOME, ..."
    )
    scratch_dir: str = Field(
        default="/tmp",
        pattern=r"^/[^'\n]*$",
        description="folder of each node in which each VM makes a private one, and removes it at its end",
    )
    log_dir: Path = Field(
        default=Path("~/varuna-slurm"), description="folder for the agents' logs, which manager and nodes share"
    )
    list_every_s: float = Field(default=5.0, gt=0, le=60, description="time between two calls of squeue")

    @field_validator("partition", "account", "qos", "constraint", "gres")
    @classmethod
    def _is_word(cls, value: str | None) -> str | None:
        if value is not None and (not value or any(sign.isspace() for sign in value)):
            raise ValueError("expected a word without spaces")
        return value

    @field_validator("time_limit")
    @classmethod
    def _is_limit(cls, value: str | None) -> str | None:
        if value is not None:
            parse_time_limit(value)
        return value

    @field_validator("sbatch_options")
    @classmethod
    def _are_options(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            name = value.partition("=")[0]
            if not value.startswith("--") or name in _OWN_OPTIONS:
                raise ValueError(f"{value!r}: expected --NAME=VALUE of an option that varuna does not set itself")
        return values

    @model_validator(mode="after")
    def _leaves_time(self) -> SlurmSettings:
        if self.time_limit is not None and parse_time_limit(self.time_limit) <= self.notice_s + _SIGNAL_EARLY_S:
            raise ValueError(
                f"time_limit {self.time_limit!r}: its VMs would leave at once, since their notice is {self.notice_s} s "
                f"long and may come {_SIGNAL_EARLY_S} s early: give a longer limit, or a shorter notice_s"
            )
        return self

    @property
    def generic_resources(self) -> str | None:
        """The value of `--gres`."""
        return self.gres if self.gres is not None or self.device == "cpu" else f"gpu:{self.gpus}"


def parse_time_limit(text: str) -> float:
    """Seconds of a limit as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; `inf` for UNLIMITED. Raises
    ValueError."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ValueError("expected Slurm's format, such as 90 (minutes), 12:00:00 or 1-00:00:00")
    days, *with_days = (int(part or 0) for part in match.groups()[:4])
    if match[1] is not None:
        hours, minutes, seconds = with_days
        return days * 86400.0 + hours * 3600.0 + minutes * 60.0 + seconds
    parts = [int(part) for part in match.groups()[4:] if part is not None]
    if len(parts) == 1:
        return parts[0] * 60.0
    hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts)
    return hours * 3600.0 + minutes * 60.0 + seconds


def read_slurm_settings(path: Path) -> SlurmSettings:
    """Raises ValueError with one line that names the file, the field and the value."""
    return read_settings_file(path, SlurmSettings)
