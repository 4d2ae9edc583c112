"""The provider passes the suite of all providers, on a Ray cluster of this machine: pytest examples/providers/ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import ray
from varuna_ray import RayProvider, RaySettings

from varuna_manager.providers.base import RefusalKind
from varuna_manager.providers.conformance import KindConformance, ProviderBench, ProviderConformance
from varuna_manager.providers.kind import BootSettings, Origin

NODES = 16
ORIGIN = Origin(managers="127.0.0.1:1", urls=("https://127.0.0.1:1",), ca_pem="no certificate")


class LossyProvider(RayProvider):
    """Its next answer may be lost."""

    loses_answer = False

    def _start_actors(self, names: Sequence[str], tokens: Sequence[str]) -> Sequence[str]:
        started = super()._start_actors(names, tokens)
        if self.loses_answer:
            raise ConnectionError("the answer is lost")
        return started


class RayBench(ProviderBench):
    """Its nodes are shares of one node, by a resource of their own. Its agents are real, and dial a manager in vain."""

    refusals = frozenset({RefusalKind.CAPACITY})

    def __init__(self, address: str) -> None:
        self._settings = RaySettings(
            address=address, namespace=uuid.uuid4().hex, node_resources={"node": 1.0}, device="cpu", start_s=5.0
        )
        self._nobody: Any = None
        """Takes the nodes that are not to be granted."""
        self._make_provider()

    def _make_provider(self) -> None:
        async def join_token(vm_id: str) -> str:
            return f"vj1.token.secret.{'0' * 64}"

        self.provider = self._lossy = LossyProvider(self._settings, BootSettings(origin=ORIGIN, join_token=join_token))

    async def restart_provider(self) -> None:
        self._make_provider()

    async def list_real_vms(self) -> Collection[str]:
        return {vm_id for vm_id in map(_read_vm_id, psutil.process_iter()) if vm_id is not None}

    async def lose_next_answer(self) -> None:
        self._lossy.loses_answer = True

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        taken = {"node": float(NODES - len(await self.list_real_vms()) - granted)}
        nobody = ray.remote(type("Nobody", (), {})).options(num_cpus=0, resources=taken)
        self._nobody = nobody.remote()  # ends with its handle
        ray.get(self._nobody.__ray_ready__.remote(), timeout=60)

    async def end_refusals(self) -> None:
        if self._nobody is not None:
            ray.kill(self._nobody)
            self._nobody = None

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        actor = ray.get_actor(vm_id, namespace=self._settings.namespace)
        os.kill(ray.get(actor.get_pid.remote(), timeout=60), signal.SIGKILL)

    async def cut_off(self) -> None:
        ray.shutdown()
        self._lossy._settings = self._settings.model_copy(update={"address": "ray://127.0.0.1:1"})

    async def reconnect(self) -> None:
        self._lossy.loses_answer = False
        self._lossy._settings = self._settings


def _read_vm_id(process: psutil.Process) -> str | None:
    try:
        command = process.cmdline()
    except psutil.Error:
        return None
    if "varuna_agent.main" not in command:
        return None
    return next((flag.partition("=")[2] for flag in command if flag.startswith("--vm-id=")), None)


@pytest.fixture(scope="class")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A cluster of one node, as `ray start --head` makes it."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        port, client_port, environment_port = (each.getsockname()[1] for each in sockets)
    program = str(Path(sys.executable).with_name("ray"))
    options = [f"--port={port}", f"--ray-client-server-port={client_port}", "--num-cpus=4", "--num-gpus=0"]
    options += [f"--runtime-env-agent-port={environment_port}"]
    options += ["--include-dashboard=false", "--disable-usage-stats", f'--resources={{"node": {NODES}}}']
    subprocess.run([program, "start", "--head", *options], check=True, capture_output=True, timeout=600)
    request.cls.address = f"ray://127.0.0.1:{client_port}"
    yield
    ray.shutdown()
    subprocess.run([program, "stop", "--force"], check=True, capture_output=True, timeout=600)


@pytest.mark.usefixtures("cluster")
class TestRay(ProviderConformance):
    address: ClassVar[str]

    @asynccontextmanager
    async def open_bench(self, folder: Path) -> AsyncIterator[RayBench]:
        bench = RayBench(self.address)
        try:
            yield bench
        finally:
            await bench.reconnect()
            await bench.end_refusals()
            for vm in await bench.provider.list():
                await bench.provider.delete([vm.id])


class TestRayKind(KindConformance):
    name = "ray"
