"""VMs that are agent processes on this machine, from an emulated spot market.

Each VM is a process group of its own with a folder `<data_dir>/vms/<id>/`: `vm.json` names its process (pid and start
time, so that a reused pid is not mistaken for it), `agent.log` has its output, `notice.json` the notice that its agent
polls for. VMs outlive the manager: a manager that starts again on the same folder finds them. Of a VM that is gone,
only the logs stay for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import CreatedVms, ProviderNotice, ProviderVm, UnknownVmError, VmOffer
from varuna_proto.names import is_plain, plain
from varuna_proto.wording import count_of

_KILL_TIMEOUT_S = 10.0
_KEPT_LOGS = 100
"""How many of the last VMs that are gone keep their logs."""
_LOGS = frozenset({"vm.json", "agent.log", "jobs"})
"""What stays in the folder of a VM that is gone."""


@dataclass(frozen=True, kw_only=True)
class LocalMachine:
    """The properties of every local VM."""

    gpus: int = 1
    device_memory_bytes: int = 2 * 1024**3
    host: str = "127.0.0.1"
    agent_command: tuple[str, ...] = (sys.executable, "-m", "varuna_agent.main")


class LocalProvider:
    """See the module's docstring. `manager_address`: host:port that the agents dial."""

    name = "local"
    is_elastic = True

    def __init__(
        self,
        data_dir: Path,
        manager_address: str,
        machine: LocalMachine,
        capacity: int | None,
        join_token: Callable[[str], Awaitable[str | None]] | None = None,
        manager_url: str = "",
    ) -> None:
        self._join_token = join_token
        self._manager_url = manager_url
        self._vms_dir = data_dir / "vms"
        self._vms_dir.mkdir(parents=True, exist_ok=True)
        self._market_file = data_dir / "local.json"
        self._manager_address = manager_address
        self._machine = machine
        market = _read_json(self._market_file) or {}
        self._capacity: int | None = market.get("capacity", capacity)
        self._next = int(market.get("next", 1))
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._deadlines: dict[str, asyncio.Task[None]] = {}
        self._gone: dict[str, None] = {}
        """VMs that are gone and have a folder, in the order in which they were found gone."""
        self._clearing: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[ProviderVm]] = set()

    # ------------------------------------------------------------ Provider

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs whose agent process lives."""
        vms: list[ProviderVm] = []
        gone: list[ProviderVm] = []
        for folder in sorted(self._vms_dir.iterdir()):
            vm = self._read_vm(folder.name) if folder.name not in self._gone else None
            if vm is not None:
                (gone if self._process(vm) is None else vms).append(vm)
        self._watch_notices(vms)
        if gone:
            self._gone |= dict.fromkeys(vm.id for vm in sorted(gone, key=lambda vm: vm.created_at))
            task = asyncio.create_task(asyncio.to_thread(self._clear, [vm.id for vm in gone], tuple(self._gone)))
            self._clearing.add(task)  # in the background: there may be gigabytes
            task.add_done_callback(self._clearing.discard)
        return vms

    async def create(self, count: int, request: str) -> CreatedVms:
        """Start agent processes, as many as the market's capacity has room for."""
        alive = list(await self.list())
        made = [vm for vm in alive if vm.request == request]
        while len(made) < count:
            if self._capacity is not None and len(alive) >= self._capacity:
                text = f"the local market grants {count_of(self._capacity, 'VM')}, and has granted {len(alive)}"
                return CreatedVms(vms=tuple(made), refusal=Refusal(kind=RefusalKind.CAPACITY, reason=text))
            vm_id = f"local-{self._next}"
            self._next += 1
            self._write_market()
            token = await self._join_token(vm_id) if self._join_token is not None else None
            starting = asyncio.create_task(asyncio.to_thread(self._start, vm_id, request, token))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            vm = await asyncio.shield(starting)  # a thread goes on when its caller ends, and `close` waits for it
            made.append(vm)
            alive.append(vm)
        return CreatedVms(vms=tuple(made))

    async def delete(self, vm_ids: Sequence[str]) -> None:
        for vm_id in vm_ids:
            vm = self._read_vm(vm_id)
            if vm is not None:
                await asyncio.to_thread(self._kill, vm)

    async def get_offer(self) -> VmOffer:
        return VmOffer(gpus=self._machine.gpus, device_memory_bytes=self._machine.device_memory_bytes)

    async def list_notices(self) -> Sequence[ProviderNotice]:
        found = []
        for vm in await self.list():
            document = _read_json(self._vms_dir / vm.id / "notice.json")
            if document is not None:
                found.append(
                    ProviderNotice(id=document["id"], vm_id=vm.id, deadline_unix_s=document["deadline_unix_s"])
                )
        return found

    # ------------------------------------------------------------ EmulatedProvider

    @property
    def capacity(self) -> int | None:
        return self._capacity

    async def set_capacity(self, capacity: int | None) -> None:
        """Set how many VMs the market grants from now on. Present VMs stay."""
        self._capacity = capacity
        self._write_market()

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Take the VM as a spot market does: at once (SIGKILL to all its processes), or after a notice."""
        vm = self._read_vm(vm_id)
        if vm is None or self._process(vm) is None:
            raise UnknownVmError(
                f"the local provider has no running VM {vm_id!r}: varuna vms (GET /api/v1/vms) lists those that do"
            )
        if notice_s <= 0:
            await asyncio.to_thread(self._kill, vm)
            return
        path = self._vms_dir / vm_id / "notice.json"
        if not path.exists():  # a repeated request does not change the first notice
            _write_json(path, {"id": str(uuid.uuid4()), "deadline_unix_s": time.time() + notice_s})
        self._watch_notices([vm])

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        """Where the agent keeps the log of a worker."""
        return self._vms_dir / plain(vm_id, "VM") / "jobs" / plain(job_id, "job") / f"g{generation}" / f"rank{rank}.log"

    async def list_ended_vms(self) -> Mapping[str, float]:
        return await asyncio.to_thread(self._find_ended_vms)

    def _find_ended_vms(self) -> dict[str, float]:
        found = {}
        for folder in self._vms_dir.iterdir():
            vm = self._read_vm(folder.name)  # None while it is being made
            if vm is not None and not _lives(vm):
                log = folder / "agent.log"
                found[vm.id] = log.stat().st_mtime if log.exists() else vm.created_at
        return found

    async def forget_vm(self, vm_id: str) -> None:
        vm = self._read_vm(vm_id)
        if vm is not None and not _lives(vm):
            await asyncio.to_thread(shutil.rmtree, self._vms_dir / vm_id)

    async def close(self, *, end_vms: bool) -> None:
        """Stop watching; the VMs live on unless `end_vms`."""
        for task in self._deadlines.values():
            task.cancel()
        await asyncio.gather(*self._deadlines.values(), *self._clearing, *self._starting, return_exceptions=True)
        if end_vms:
            for vm in await self.list():
                await asyncio.to_thread(self._kill, vm)

    # ------------------------------------------------------------ helpers

    def _start(self, vm_id: str, request: str, join_token: str | None) -> ProviderVm:
        folder = self._vms_dir / vm_id
        folder.mkdir()
        machine = self._machine
        flags = {
            "manager": self._manager_address,
            "vm-id": vm_id,
            "vm-dir": str(folder),
            "gpus": str(machine.gpus),
            "device-memory-bytes": str(machine.device_memory_bytes),
            "host": machine.host,
        }
        if join_token is not None:
            _write_secret(folder / "join-token", join_token)  # not in its arguments, which any user can list
            flags |= {"join-token-file": str(folder / "join-token"), "join-url": self._manager_url}
        arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
        with (folder / "agent.log").open("ab") as log:
            child = subprocess.Popen(
                [*machine.agent_command, *arguments],
                env={name: value for name, value in os.environ.items() if not name.startswith("VARUNA_MANAGER_")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[vm_id] = child
        document = {
            "pid": child.pid,
            "process_created_at": psutil.Process(child.pid).create_time(),
            "created_at": time.time(),
            "gpus": machine.gpus,
            "device_memory_bytes": machine.device_memory_bytes,
            "host": machine.host,
            "request": request,
        }
        _write_json(folder / "vm.json", document)
        vm = self._read_vm(vm_id)
        assert vm is not None, f"{folder / 'vm.json'} was just written"
        return vm

    def _read_vm(self, vm_id: str) -> ProviderVm | None:
        document = _read_json(self._vms_dir / vm_id / "vm.json") if is_plain(vm_id) else None
        if document is None:
            return None
        return ProviderVm(
            id=vm_id,
            gpus=document["gpus"],
            device_memory_bytes=document["device_memory_bytes"],
            host=document["host"],
            created_at=document["created_at"],
            ref={"pid": document["pid"], "process_created_at": document["process_created_at"]},
            request=document.get("request"),
        )

    def _process(self, vm: ProviderVm) -> psutil.Process | None:
        """The VM's agent, if it lives; reaps a dead child."""
        child = self._children.get(vm.id)
        if child is not None and child.poll() is not None:
            del self._children[vm.id]
            return None
        return _living_process(vm)

    def _kill(self, vm: ProviderVm) -> None:
        """End the agent's process group and everything that it started, as a VM ends with all its processes."""
        process = self._process(vm)
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            children = process.children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs([process, *children], timeout=_KILL_TIMEOUT_S)
        if vm.id in self._children:
            self._children.pop(vm.id).wait(timeout=_KILL_TIMEOUT_S)

    def _clear(self, gone: Sequence[str], all_gone: Sequence[str]) -> None:
        """Remove all but the logs of VMs that are `gone`, and everything of VMs before the last ones."""
        for vm_id in gone:
            _remove(self._vms_dir / vm_id, keep=_LOGS)
        for vm_id in all_gone[:-_KEPT_LOGS]:
            folder = self._vms_dir / vm_id
            _remove(folder, keep=frozenset())
            if not folder.exists():
                self._gone.pop(vm_id, None)

    def _watch_notices(self, vms: Sequence[ProviderVm]) -> None:
        """Take each VM with a notice at its deadline, even if an earlier manager process gave the notice."""
        for vm in vms:
            document = _read_json(self._vms_dir / vm.id / "notice.json")
            if document is not None and vm.id not in self._deadlines:
                self._deadlines[vm.id] = asyncio.create_task(self._take_at(vm, document["deadline_unix_s"]))

    async def _take_at(self, vm: ProviderVm, deadline_unix_s: float) -> None:
        while (left_s := deadline_unix_s - time.time()) > 0:
            await asyncio.sleep(min(left_s, 1.0))
            if self._process(vm) is None:
                return  # it ended by itself
        await asyncio.to_thread(self._kill, vm)

    def _write_market(self) -> None:
        _write_json(self._market_file, {"capacity": self._capacity, "next": self._next})


def _living_process(vm: ProviderVm) -> psutil.Process | None:
    try:
        process = psutil.Process(vm.ref["pid"])
        # The start time went through JSON and the kernel's clock ticks, so that it is not exact.
        same = abs(process.create_time() - vm.ref["process_created_at"]) < 0.1
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _lives(vm: ProviderVm) -> bool:
    return _living_process(vm) is not None


def _remove(folder: Path, keep: frozenset[str]) -> None:
    """Empty the folder except for `keep`; without `keep`, remove it. Does nothing if an agent still runs there."""
    with _agent_lock(folder) as is_ours, contextlib.suppress(FileNotFoundError):
        if not is_ours:
            return
        for path in folder.iterdir():
            if path.name in keep:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _agent_lock(folder: Path) -> Iterator[bool]:
    """Whether no agent runs in the folder; none can start during the block. A lock is more reliable than the process
    table, because setting the clock moves the start times that identify processes."""
    try:
        descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield True  # no agent ever ran there
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return document


def _write_secret(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the whole file at once, so that readers never see half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document))
    part.replace(path)
