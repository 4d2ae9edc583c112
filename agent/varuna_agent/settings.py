"""What an agent is told at its start."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from varuna_agent.state import Timings


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Made once in `main`. Raises ValueError naming the setting and what to do."""

    manager: str
    """host:port of the manager's gRPC service."""
    vm_id: str
    vm_dir: Path
    """Logs, the socket of the workers and the notice file live here; one agent at a time."""
    checkpoint_dir: Path | None = None
    """For the workers' copies of their checkpoints; None: `checkpoints` in `vm_dir`."""
    gpus: int = 1
    """Devices that can each run one worker."""
    device_memory_bytes: int = 0
    """Per device; 0: not known."""
    host: str = "127.0.0.1"
    """Address of this VM for the workers of other VMs."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    reconnect_first_s: float = 0.1
    reconnect_most_s: float = 5.0
    """Bounds of the backoff between two attempts to reach the manager."""
    notice_poll_s: float = 0.2
    keep_warm_s: float = 120.0
    """How long a warmed process is kept after the last worker of its job; 0: there is none."""
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        host, separator, port = self.manager.rpartition(":")
        if not separator or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--manager {self.manager!r}: expected host:port, such as 127.0.0.1:7443")
        if not is_loopback(host.strip("[]")):
            raise ValueError(
                f"--manager {self.manager!r}: this version has no encryption between agent and manager, so it only "
                "talks to a manager on a loopback address (127.0.0.1, ::1, localhost)"
            )
        if not self.vm_id:
            raise ValueError("--vm-id is empty: give this VM the id that the manager knows it by")
        if self.gpus < 1:
            raise ValueError(f"--gpus {self.gpus}: a VM needs at least one device to run a worker")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device {self.device!r}: expected cpu or cuda")
        if self.keep_warm_s < 0:
            raise ValueError(f"--keep-warm-s {self.keep_warm_s}: expected 0 (no warmed process) or more")
        if not 0 < self.reconnect_first_s <= self.reconnect_most_s:
            raise ValueError(
                f"--reconnect-first-s {self.reconnect_first_s} and --reconnect-most-s {self.reconnect_most_s}: "
                "expected 0 < first <= most"
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
