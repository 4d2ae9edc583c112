"""The settings of an agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from varuna_agent.state import Timings
from varuna_proto.hosts import is_loopback
from varuna_proto.names import plain

_LEAST_LOG_BYTES = 64 * 1024
NOTICE_SOURCES = ("file", "azure", "aws", "aws-rebalance", "gcp", "slurm")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Created once in `main`. Raises ValueError naming the setting and what to do."""

    manager: str
    """host:port of the manager's gRPC service; several managers are separated by commas."""
    vm_id: str
    vm_dir: Path
    """Holds the logs, the workers' socket and the notice file; only one agent at a time may use it."""
    checkpoint_dir: Path | None = None
    """The folder for the workers' copies of their checkpoints; None: `checkpoints` in `vm_dir`."""
    gpus: int = 1
    """Devices that can each run one worker."""
    device_memory_bytes: int = 0
    """Per device; 0: unknown."""
    host: str = "127.0.0.1"
    """Address of this VM for the workers of other VMs."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    gpu_type: str = ""
    """The name of the devices' model; empty: unknown."""
    reconnect_first_s: float = 0.1
    reconnect_most_s: float = 5.0
    """Bounds of the backoff between two attempts to reach the manager."""
    notice_poll_s: float = 0.2
    keep_warm_s: float = 120.0
    """How long a warmed process is kept after the last worker of its job, a survivor without a rank, and a holder whose
    next generation has no workers here; 0: none is."""
    memory_part: float = 0.4
    """The part of the VM's memory for states of ended workers, which wait for the next generation; 0: none."""
    join_token: str = field(default="", repr=False)
    """The token with which this VM joins; empty: it has joined already, or the manager requires none."""
    join_url: str = ""
    """The URLs of the managers' REST APIs, separated by commas; empty: https, port 8750 of the hosts of `manager`."""
    join_ca: Path | None = None
    """The authority that signed the certificate of `join_url`; None: the manager's own, which the token names."""
    run_as: str = ""
    """The user that workers run as; empty: the agent's."""
    metrics_port: int = 0
    """The port for Prometheus, at `metrics_host`; 0: none."""
    metrics_host: str = "127.0.0.1"
    log_bytes: int = 256 * 1024**2
    """The newest bytes kept of each log, including the agent's own if that is a file."""
    old_logs_bytes: int = 4 * 1024**3
    """Bytes kept of the logs of all ended generations together."""
    notices: str = "file"
    """The source of preemption notices: one of NOTICE_SOURCES."""
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        for address in self.manager.split(","):
            host, separator, port = address.strip().rpartition(":")
            if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"--manager {address!r}: expected host:port, such as 127.0.0.1:7443")
            if not is_loopback(host.strip("[]")) and not self.is_certified:
                raise ValueError(
                    f"--manager {address!r}: a manager that is not on a loopback address asks for a certificate: "
                    "make a token with varuna token create --join, and give it with --join-token-file"
                )
        if not self.vm_id:
            raise ValueError("--vm-id is empty: give this VM the id that the manager knows it by")
        plain(self.vm_id, "--vm-id")
        if self.gpus < 1:
            raise ValueError(f"--gpus {self.gpus}: a VM needs at least one device to run a worker")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device {self.device!r}: expected cpu or cuda")
        if not 0 <= self.metrics_port < 65536:
            raise ValueError(f"--metrics-port {self.metrics_port}: expected a port, 1 to 65535, or 0 for none")
        if self.keep_warm_s < 0:
            raise ValueError(f"--keep-warm-s {self.keep_warm_s}: expected 0 (no warmed process) or more")
        if not 0 <= self.memory_part <= 0.9:
            raise ValueError(f"--memory-part {self.memory_part}: expected a part of the VM's memory, from 0 to 0.9")
        if self.log_bytes < _LEAST_LOG_BYTES or self.old_logs_bytes < 0:
            raise ValueError(
                f"--log-bytes {self.log_bytes} and --old-logs-bytes {self.old_logs_bytes}: "
                f"expected {_LEAST_LOG_BYTES} or more of each log, and 0 or more of old ones"
            )
        if not 0 < self.reconnect_first_s <= self.reconnect_most_s:
            raise ValueError(
                f"--reconnect-first-s {self.reconnect_first_s} and --reconnect-most-s {self.reconnect_most_s}: "
                "expected 0 < first <= most"
            )

    @property
    def identity_dir(self) -> Path:
        return self.vm_dir / "identity"

    @property
    def is_certified(self) -> bool:
        """Whether this VM has a certificate, or a token to get one; if not, it connects without TLS."""
        return bool(self.join_token) or (self.identity_dir / "identity.json").exists()

    @property
    def join_urls(self) -> tuple[str, ...]:
        if self.join_url:
            return tuple(url.strip().rstrip("/") for url in self.join_url.split(","))
        hosts = dict.fromkeys(address.strip().rpartition(":")[0] for address in self.manager.split(","))
        return tuple(f"https://{host}:8750" for host in hosts)
