"""FLEET.yaml: the pools of a fleet, each with its provider."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from varuna_manager.domain.pools import PoolTerms

__all__ = ["FleetSettingsFile", "PoolSettings"]

_NO_POOLS = ("local", "replay", "pools")
"""Kinds of providers that cannot be a pool."""


class PoolSettings(BaseModel):
    """One pool. The text of each field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,30}$", description="small letters, digits and hyphens; never reused")
    provider: str = Field(description="KIND:FILE, as --provider takes it; FILE is relative to the fleet's file")
    zone: str = Field(default="", max_length=255, description="within which the network is fast; the provider's name")
    machine_type: str = Field(default="", max_length=255, description="the provider's name of the machines")
    gpu_type: str = Field(default="", max_length=255, description="name of the GPUs; pools with equal names are equal")
    relative_speed: float = Field(
        default=1.0, gt=0, le=1e6, allow_inf_nan=False, description="examples/s of a GPU, compared with other pools"
    )
    price_per_hour: float = Field(
        ge=0, le=1e9, allow_inf_nan=False, description="of a VM, where the provider names no price of its own"
    )
    max_vms: int | None = Field(default=None, ge=0, description="the most VMs of the pool; 0: no more are asked for")

    @field_validator("provider")
    @classmethod
    def _has_file(cls, value: str) -> str:
        name, _, path = value.partition(":")
        if name in _NO_POOLS:
            raise ValueError(f"VMs of {name!r} cannot be a pool: name another provider")
        if not path:
            raise ValueError("expected KIND:FILE, as --provider takes it")
        return value

    def make_terms(self) -> PoolTerms:
        return PoolTerms(**self.model_dump(exclude={"provider"}))


class FleetSettingsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pools: tuple[PoolSettings, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_apart(self) -> FleetSettingsFile:
        twice = [name for name, count in Counter(pool.name for pool in self.pools).items() if count > 1]
        if twice:
            raise ValueError(f"pool {twice[0]!r} occurs twice: give each pool a name of its own")
        return self
