"""The manager's settings: flags beat environment variables VARUNA_MANAGER_*, which beat the defaults here."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from varuna_manager.domain.observed import Rules


class ManagerSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VARUNA_MANAGER_", frozen=True, extra="forbid")

    data_dir: Path = Field(default=Path("varuna-data"), description="store, VM folders, checkpoints without a URL")
    database_url: str | None = Field(
        default=None, description="sqlite:///... or postgresql://...; default: SQLite in data_dir"
    )
    host: str = Field(default="127.0.0.1", description="loopback only in this version")
    http_port: int = Field(default=8750, ge=0, le=65535, description="REST and status page; 0: a free one, kept")
    grpc_port: int = Field(default=8751, ge=0, le=65535, description="agents; 0: a free one, kept over restarts")
    profile_cache_url: str | None = Field(
        default=None,
        description="folder or object store of profiles, so that no model is measured twice on the same hardware; "
        "'' for none; default: profiles in data_dir",
    )
    vms: int | None = Field(default=None, ge=0, description="local VMs wanted; default: as before, at first 0")
    capacity: int | None = Field(
        default=None, ge=0, description="VMs that the local market grants at first; default: any"
    )
    gpus_per_vm: int = Field(default=1, ge=1, description="devices of a local VM")
    device_memory_bytes: int = Field(default=2 * 1024**3, ge=1, description="memory of each device of a local VM")
    agent_command: tuple[str, ...] | None = Field(
        default=None, description="JSON list: what starts an agent on this machine; default: this Python's varuna_agent"
    )
    local_ephemeral: bool = Field(default=False, description="end the local VMs when the manager is told to end")
    heartbeat_interval_s: float = Field(default=1.0, gt=0, description="between an agent's heartbeats")
    suspect_after_s: float = Field(default=5.0, gt=0, description="silence after which nothing is launched on a VM")
    lost_after_s: float = Field(default=10.0, gt=0, description="silence after which a VM's workers are given up")
    lease_s: float = Field(default=60.0, gt=0, description="silence after which an agent ends its workers")
    growth_settle_s: float = Field(
        default=2.0, ge=0, description="how long new devices must have been there to be used"
    )
    start_settle_s: float = Field(default=5.0, ge=0, description="how long a new job waits for VMs on their way")
    first_step_timeout_s: float = Field(default=120.0, gt=0, description="from a launch to its first step")
    hang_minimum_s: float = Field(default=30.0, gt=0, description="time without a step that may be a hang")
    slow_threshold: float = Field(
        default=0.15, gt=0, description="a VM that takes this much longer than its peers for the same work is slow"
    )
    slow_looks: int = Field(default=3, ge=1, description="looks in a row (5 s apart) before a VM counts as slow")
    quarantine_s: float = Field(default=600.0, gt=0, description="for how long a slow VM is left alone at first")
    reconcile_interval_s: float = Field(default=0.5, gt=0, description="between looks when nothing rings")
    log_level: str = Field(default="info", description="debug, info, warning or error")

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        if host != "localhost" and not _is_loopback(host):
            raise ValueError(
                f"{host!r} is not a loopback address: agents and users are not authenticated in this version, "
                "so only 127.0.0.1, ::1 or localhost is taken"
            )
        return host

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, level: str) -> str:
        if level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"{level!r} is none of debug, info, warning, error")
        return level

    def profile_cache(self, data_dir: Path) -> str:
        """The URL of the profile cache; empty: none. What is no URL is a folder, seen from where the manager runs."""
        url = str(data_dir / "profiles") if self.profile_cache_url is None else self.profile_cache_url
        return url if "://" in url or not url else Path(url).expanduser().absolute().as_uri()

    def rules(self) -> Rules:
        """The thresholds of the decisions."""
        return Rules(
            heartbeat_interval_s=self.heartbeat_interval_s,
            suspect_after_s=self.suspect_after_s,
            lost_after_s=self.lost_after_s,
            lease_s=self.lease_s,
            growth_settle_s=self.growth_settle_s,
            start_settle_s=self.start_settle_s,
            first_step_timeout_s=self.first_step_timeout_s,
            hang_minimum_s=self.hang_minimum_s,
            slow_threshold=self.slow_threshold,
            slow_looks=self.slow_looks,
            quarantine_s=self.quarantine_s,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
