"""An agent process that runs jobs as another user."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil

from agent_world import FakeManager, launch, start_agent
from varuna_proto.v1 import agent_pb2 as pb
from waiting import until

__all__ = ["LOOKS_AROUND", "SECRETS", "IsolatedAgent"]


SECRETS = ("VARUNA_JOIN_TOKEN_X", "VARUNA_API_TOKEN", "AZURE_CLIENT_SECRET", "PGPASSWORD", "DATABASE_URL")


LOOKS_AROUND = """
import json, os, socket, time

def error_of(look):
    try:
        look()
    except OSError as error:
        return type(error).__name__
    return ""

vm_dir, agent = os.environ["VM_DIR"], os.environ["AGENT"]
found = {
    "user": [os.getuid(), os.getgid(), os.getgroups(), os.environ.get("USER"), os.environ.get("HOME")],
    "environ": dict(os.environ),
    "open": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 1024) if os.path.islink(f"/proc/self/fd/{fd}")],
    "denied": {
        path: error_of(lambda: open(path, "rb").read(1) if "." in path or "proc" in path else os.listdir(path))
        for path in (vm_dir, f"{vm_dir}/jobs", f"{vm_dir}/identity", f"{vm_dir}/seen.json", f"/proc/{agent}/environ",
                     f"/proc/{agent}/mem")
    },
    "socket": error_of(lambda: socket.socket(socket.AF_UNIX).connect(os.environ["VARUNA_AGENT_SOCKET"])),
    "copies": error_of(lambda: os.makedirs(os.environ["VARUNA_LOCAL_CHECKPOINT_DIR"] + "/varuna_ckpt_1")),
    "log": error_of(lambda: open("/proc/self/fd/2", "a")),
}
print(json.dumps(found), flush=True)
time.sleep(600)
"""


class IsolatedAgent:
    """An agent process with its manager and its folder, which other users may traverse as on a real VM."""

    def __init__(self, manager: FakeManager, processes: list[asyncio.subprocess.Process], folder: Path) -> None:
        self.manager = manager
        self.folder = folder
        self.vm_dir = folder / "vm"
        self._processes = processes

    async def start(self, *more: str) -> psutil.Process:
        known = len(self.manager.hellos)
        environ = {**os.environ, **dict.fromkeys(SECRETS, "a-secret")}
        address = f"127.0.0.1:{self.manager.port}"
        agent = await start_agent(self._processes, address, self.vm_dir, *more, environ=environ)
        await self.manager.until(lambda: len(self.manager.hellos) > known)
        return psutil.Process(agent.pid)

    def launch(self, command: str, generation: int, agent: psutil.Process, *, local_rank: int = 0, **more: Any) -> None:
        (self.folder / "train.py").write_text(LOOKS_AROUND)
        (self.folder / "varuna" / "worker").mkdir(
            parents=True, exist_ok=True
        )  # nothing that takes long is imported ahead
        (self.folder / "varuna" / "__init__.py").touch()
        (self.folder / "varuna" / "worker" / "__init__.py").touch()
        (self.folder / "varuna" / "worker" / "preload.py").touch()
        environment = {"VM_DIR": str(self.vm_dir), "AGENT": str(agent.pid), **more.pop("environment", {})}
        workers = [pb.WorkerAssignment(rank=1, local_rank=local_rank)]
        fields = {"command": command, "environment": environment, "workers": workers, **more}
        message = launch(self.folder, "", generation=generation, **fields)
        self.manager.send_message(launch=message)

    async def found(self, generation: int) -> dict[str, Any]:
        log = self.vm_dir / "jobs" / "job" / f"g{generation}" / "rank1.log"
        await until(lambda: log.exists() and log.read_text().endswith("}\n"))
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return found
