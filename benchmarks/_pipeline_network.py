"""The networks of the emulated pipeline: loopback, or network namespaces with links of a set rate."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = [
    "MTU",
    "WIRE_TO_PAYLOAD",
    "Loopback",
    "ShapedNetwork",
    "TemporaryNetwork",
    "enter_namespace",
    "find_free_port",
    "require_root",
    "run_command",
]

_CLONE_NEWNET = 0x40000000
_BURST_BYTES = 16 * 1024
"""Bytes that a link takes at once: few compared with a message, and enough for a frame."""

MTU = 9000
"""Large frames: cutting messages into small ones takes processor time, which the ranks then lack."""

WIRE_TO_PAYLOAD = (MTU + 14) / (MTU - 52)
"""Bytes of a full Ethernet frame to those of its TCP payload (with timestamps)."""


class Loopback:
    """All ranks on the machine's loopback."""

    rendezvous_host = "127.0.0.1"

    def enter(self, rank: int, /) -> None:
        return None


class TemporaryNetwork(ABC):
    """Namespaces and links, which are there in a `with` block."""

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @abstractmethod
    def _build(self) -> None: ...

    @abstractmethod
    def _remove(self) -> None:
        """Removes what is there of it."""


class ShapedNetwork(TemporaryNetwork):
    """Each rank in a network namespace of its own: one cable that carries `mbit` of payload in each direction
    to each neighbour, and a bridge, not shaped, to all others (for the rendezvous).
    """

    def __init__(self, p: int, mbit: float) -> None:
        """Raises PermissionError without root."""
        require_root()
        self._p = p
        self._mbit = mbit
        self._name = f"vb{os.getpid() % 100000}"
        self._subnet = f"10.{200 + os.getpid() % 50}.{time.monotonic_ns() % 250}"
        self.rendezvous_host = self._address(0)

    def _address(self, rank: int) -> str:
        return f"{self._subnet}.{rank + 1}"

    def _namespace(self, rank: int) -> str:
        return f"{self._name}r{rank}"

    def _build(self) -> None:
        run_command(f"ip link add {self._name} type bridge")
        run_command(f"ip link set {self._name} up")
        for rank in range(self._p):
            self._add_rank(rank)
        for rank in range(self._p - 1):
            self._add_cable(rank)

    def _add_rank(self, rank: int) -> None:
        namespace, outside = self._namespace(rank), f"{self._name}v{rank}"
        run_command(f"ip netns add {namespace}")
        run_command(f"ip link add {outside} type veth peer name eth0 netns {namespace}")
        run_command(f"ip link set {outside} master {self._name} up")
        run_command(f"ip -n {namespace} addr add {self._address(rank)}/24 dev eth0")
        run_command(f"ip -n {namespace} link set lo up")
        run_command(f"ip -n {namespace} link set eth0 up")

    def _add_cable(self, rank: int) -> None:
        """Between `rank` and the next: the addresses are those of the bridge, the way is the cable."""
        ends = ((rank, "next", rank + 1), (rank + 1, "before", rank))
        (_, near, _), (_, far, _) = ends
        run_command(
            f"ip link add {near} netns {self._namespace(rank)} type veth peer name {far} "
            f"netns {self._namespace(rank + 1)}"
        )
        for own, device, peer in ends:
            namespace = self._namespace(own)
            run_command(f"ip -n {namespace} link set {device} mtu {MTU} up")
            run_command(
                f"tc -n {namespace} qdisc add dev {device} root "
                f"tbf rate {self._mbit * WIRE_TO_PAYLOAD:.3f}mbit burst {_BURST_BYTES} latency 500ms"
            )
            run_command(f"ip -n {namespace} route add {self._address(peer)}/32 dev {device} src {self._address(own)}")

    def _remove(self) -> None:
        for rank in range(self._p):
            # By itself first: what goes with its namespace goes some time later, and the next network may be the same.
            subprocess.run(["ip", "link", "del", f"{self._name}v{rank}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self._namespace(rank)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], check=False, capture_output=True)

    def enter(self, rank: int, /) -> None:
        """Moves this process into its namespace."""
        enter_namespace(Path(f"/var/run/netns/{self._namespace(rank)}"))
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def require_root() -> None:
    """Raises PermissionError without root."""
    if os.geteuid() != 0:
        raise PermissionError("shaped links need network namespaces, which need root: run as root, or without them")


def enter_namespace(path: Path) -> None:
    """Moves this thread, and what it starts, into a network namespace."""
    with path.open() as namespace:
        setns: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).setns
        if setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {path}")


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_command(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
