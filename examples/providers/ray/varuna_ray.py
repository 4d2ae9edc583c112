"""VMs for Varuna out of a Ray cluster: on each node a detached actor, which runs the node's agent.

An actor's name is its VM's id and says which request it belongs to. Ray has no two actors of one name, so a request may
be repeated. Each actor asks for all that a node has of some resource, so that a node has room for one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.providers.base import (
    CreatedVms,
    ProviderNotice,
    ProviderVm,
    Refusal,
    RefusalKind,
    UnknownVmError,
    UnsupportedByProviderError,
    VmOffer,
)
from varuna_manager.providers.boot import AgentMachine, make_agent_flags
from varuna_manager.providers.kind import AgentStart, BootSettings, ProviderContext, ProviderKind
from varuna_manager.providers.settings_file import read_settings_file


class RaySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(default="auto", description="auto: this machine is a node; else ray://HOST:10001")
    namespace: str = Field(default="varuna", description="the fleet's own: all actors in it are its VMs")
    node_resources: dict[str, float] = Field(description="what a whole node has, such as {GPU: 8}")
    gpus: int = Field(default=1, ge=1, description="devices of a node for workers")
    device: Literal["cuda", "cpu"] = "cuda"
    start_s: float = Field(default=60.0, gt=0, description="longest wait for a free node")


class NodeAgent:
    """The actor. It ends with its agent, and the agent with it."""

    def __init__(self, flags: Sequence[str], join_token: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="varuna-agent-"))
        (folder / "join-token").touch(0o600)
        (folder / "join-token").write_text(join_token)
        command = [sys.executable, "-m", "varuna_agent.main", f"--vm-dir={folder}", *flags]
        command += [f"--join-token-file={folder / 'join-token'}"]
        set_death_signal = ctypes.CDLL(None).prctl  # PR_SET_PDEATHSIG is 1
        agent = subprocess.Popen(command, preexec_fn=lambda: set_death_signal(1, signal.SIGKILL))
        threading.Thread(target=lambda: os._exit(agent.wait()), daemon=True).start()

    def get_pid(self) -> int:
        return os.getpid()


class RayProvider:
    name = "ray"
    is_elastic = True

    def __init__(self, settings: RaySettings, boot: BootSettings) -> None:
        self._settings = settings
        self._boot = boot
        self._seen_at: dict[str, float] = {}

    async def list(self) -> Sequence[ProviderVm]:
        return [self._make_vm(name) for name in await asyncio.to_thread(self._list_names)]

    async def create(self, count: int, request: str) -> CreatedVms:
        there = [name for name in await asyncio.to_thread(self._list_names) if name.rpartition("-")[0] == request]
        numbers = (f"{request}-{number}" for number in range(count + len(there)))
        wanted = [name for name in numbers if name not in there][: max(count - len(there), 0)]
        tokens = [await self._boot.join_token(name) for name in wanted]
        started = await asyncio.to_thread(self._start_actors, wanted, tokens)
        reason = f"no node was free within {self._settings.start_s:g} s"
        refusal = None if len(started) == len(wanted) else Refusal(kind=RefusalKind.CAPACITY, reason=reason)
        return CreatedVms(vms=tuple(map(self._make_vm, [*there, *started])), refusal=refusal)

    async def delete(self, vm_ids: Sequence[str]) -> None:
        for name in vm_ids:
            await asyncio.to_thread(self._kill, name)

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return ()  # the nodes' own clouds announce what they take to the agents

    async def get_offer(self) -> VmOffer:
        return VmOffer(gpus=self._settings.gpus)

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        if notice_s:
            raise UnsupportedByProviderError("Ray announces nothing: leave notice_s out")
        if not await asyncio.to_thread(self._kill, vm_id):
            raise UnknownVmError(f"Ray has no actor {vm_id!r} in the namespace {self._settings.namespace!r}")

    async def close(self, *, end_vms: bool) -> None:
        """The actors are detached: they stay."""

    # ------------------------------------------------------------ calls that wait for Ray, each in a thread

    def _list_names(self) -> Sequence[str]:
        self._connect()
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == self._settings.namespace]

    def _start_actors(self, names: Sequence[str], tokens: Sequence[str]) -> Sequence[str]:
        """Returns those that found a node in time; the others are ended."""
        self._connect()
        calls = {}
        for name, token in zip(names, tokens, strict=True):
            machine = AgentMachine(vm_id=name, gpus=self._settings.gpus, device=self._settings.device, notices="file")
            flags = make_agent_flags(self._boot.origin, machine)
            arguments = [f"--{flag}={value}" for flag, value in flags.items()]
            calls[self._actor_class(name).remote(arguments, token).get_pid.remote()] = name
        started, late = (
            ray.wait(list(calls), num_returns=len(calls), timeout=self._settings.start_s) if calls else ([], [])
        )
        for call in late:
            self._kill(calls[call])
        return [calls[call] for call in started]

    def _actor_class(self, name: str) -> Any:
        amounts = dict(self._settings.node_resources)
        cpus, gpus = amounts.pop("CPU", 0), amounts.pop("GPU", 0)
        place = {"name": name, "namespace": self._settings.namespace, "lifetime": "detached", "get_if_exists": True}
        return ray.remote(NodeAgent).options(num_cpus=cpus, num_gpus=gpus, resources=amounts, max_restarts=0, **place)

    def _kill(self, name: str) -> bool:
        """Whether there was such an actor."""
        self._connect()
        try:
            ray.kill(ray.get_actor(name, namespace=self._settings.namespace))
        except ValueError:
            return False
        return True

    def _connect(self) -> None:
        if not ray.is_initialized():
            ray.init(self._settings.address, log_to_driver=False)

    def _make_vm(self, name: str) -> ProviderVm:
        seen_at = self._seen_at.setdefault(name, time.time())
        request = name.rpartition("-")[0]
        return ProviderVm(
            id=name, gpus=self._settings.gpus, device_memory_bytes=None, host="", created_at=seen_at, request=request
        )


def _read_ray_settings(path: Path) -> RaySettings:
    return read_settings_file(path, RaySettings)


def _make_ray_provider(settings: RaySettings, context: ProviderContext) -> RayProvider:
    return RayProvider(settings, context.boot)


KIND = ProviderKind(read_settings=_read_ray_settings, make_provider=_make_ray_provider, agents=AgentStart.INSTALLED)
