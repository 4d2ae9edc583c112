"""Machines that are there anyway: a list of hosts, on each of which somebody starts an agent.

They are neither made nor given back. A host of the list whose agent has not come is shown as missing; an agent that the
list does not name is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import Created, Notice, NotThatProviderError, Offer, ProviderVm


class Host(BaseModel):
    """One line of the list."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="the agent's --vm-id")
    gpus: int = Field(default=1, ge=1)
    price_per_hour: float | None = Field(default=None, ge=0)


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[Host, ...] = Field(min_length=1)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a YAML file. Raises ValueError naming the file, what is wrong and what is expected."""
    expected = "expected 'hosts:' with a list of {name: .., gpus: ..}"
    try:
        document = _Document.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ValueError(f"list of hosts {path} cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"list of hosts {path} is no YAML ({' '.join(str(error).split())}): {expected}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"list of hosts {path}, {place}: {first['msg']}: {expected}") from error
    names = [host.name for host in document.hosts]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"list of hosts {path}: {twice[0]!r} is there twice: every name once")
    return document.hosts


class StaticProvider:
    """`began_at`: seconds since the epoch at which the hosts were first expected."""

    name = "static"
    grows = False

    def __init__(self, hosts: Sequence[Host], began_at: float) -> None:
        self._vms = [
            ProviderVm(
                id=host.name,
                gpus=host.gpus,
                device_memory_bytes=None,
                host=host.name,
                created_at=began_at,
                price_per_hour=host.price_per_hour,
                state_of_affairs=f"missing: start its agent there (varuna agent --vm-id {host.name} ..)",
            )
            for host in hosts
        ]

    async def list(self) -> Sequence[ProviderVm]:
        """All hosts of the list: whether one is there, its agent tells."""
        return self._vms

    async def create(self, count: int, request: str) -> Created:
        reason = f"there are the {len(self._vms)} hosts of the list and no others"
        return Created(refusal=Refusal(kind=RefusalKind.QUOTA, reason=reason))

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Nothing: a host that is drained has been left by its agent, and stays a host."""

    async def notices(self) -> Sequence[Notice]:
        return ()

    async def offer(self) -> Offer:
        return Offer(gpus=max(vm.gpus for vm in self._vms))

    async def preempt(self, vm_id: str, notice_s: float) -> None:
        raise NotThatProviderError("nobody takes the hosts of the list away: drain one with varuna drain")

    async def close(self, *, end_vms: bool) -> None:
        """The agents go on."""
