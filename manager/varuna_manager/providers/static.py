"""A fixed list of hosts. An operator starts an agent on each of them.

They are neither made nor given back. A host whose agent has not connected is shown as missing; an agent that the list
does not name is refused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import CreatedVms, ProviderNotice, ProviderVm, UnsupportedByProviderError, VmOffer
from varuna_manager.providers.kind import AgentStart, ProviderContext, ProviderKind

_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML has it: it reads 10,000 hosts ten times as fast, and agents wait while a manager starts."""


class StaticHost(BaseModel):
    """One entry of the list."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="the agent's --vm-id")
    gpus: int = Field(default=1, ge=1)
    price_per_hour: float | None = Field(default=None, ge=0)


class _HostsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[StaticHost, ...] = Field(min_length=1)


def read_hosts(path: Path) -> tuple[StaticHost, ...]:
    """The hosts of a YAML file. Raises ValueError naming the file, what is wrong and what is expected."""
    expected = "expected 'hosts:' with a list of {name: .., gpus: ..}"
    try:
        document = _HostsFile.model_validate(yaml.load(path.read_text(), Loader=_YAML_LOADER))
    except OSError as error:
        raise ValueError(f"list of hosts {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"list of hosts {path} is no text in UTF-8: {expected}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"list of hosts {path}, {place}: {first['msg']}: {expected}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"list of hosts {path} is not YAML ({' '.join(str(error).split())}): {expected}") from error
    names = [host.name for host in document.hosts]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"list of hosts {path}: {twice[0]!r} occurs twice: give each name once")
    return document.hosts


class StaticProvider:
    """`began_at`: when the hosts were first expected, in seconds since the epoch."""

    name = "static"
    is_elastic = False

    def __init__(self, hosts: Sequence[StaticHost], began_at: float) -> None:
        self._vms = [
            ProviderVm(
                id=host.name,
                gpus=host.gpus,
                device_memory_bytes=None,
                host=host.name,
                created_at=began_at,
                price_per_hour=host.price_per_hour,
                reason_before_hello=f"missing: start its agent there (varuna agent --vm-id {host.name} ..)",
            )
            for host in hosts
        ]

    async def list(self) -> Sequence[ProviderVm]:
        """All hosts of the list; whether one is alive is known from its agent."""
        return self._vms

    async def create(self, count: int, request: str) -> CreatedVms:
        reason = f"the list has only {len(self._vms)} hosts"
        return CreatedVms(refusal=Refusal(kind=RefusalKind.QUOTA, reason=reason))

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Does nothing: a drained host stays in the list."""

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return ()

    async def get_offer(self) -> VmOffer:
        return VmOffer(gpus=max(vm.gpus for vm in self._vms))

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        raise UnsupportedByProviderError("hosts of a list cannot be preempted: drain one with varuna drain")

    async def close(self, *, end_vms: bool) -> None:
        """The agents go on."""


def _make_static_provider(hosts: Sequence[StaticHost], context: ProviderContext) -> StaticProvider:
    return StaticProvider(hosts, time.time())


KIND = ProviderKind(
    read_settings=read_hosts,
    make_provider=_make_static_provider,
    agents=AgentStart.BY_OPERATOR,
    argument="HOSTS.yaml",
)
