"""A link whose every TCP connection is limited, as clouds do it: two network namespaces, and a shaper with classes."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from _pipeline_network import MTU, WIRE_TO_PAYLOAD, TemporaryNetwork, enter_namespace, require_root, run_command

from varuna.distributed.group_sockets import list_sockets

__all__ = ["FlowLimitedNetwork", "Ports", "list_ports"]

Ports = tuple[int, int]
"""Of a TCP connection: this end's and the other's."""

_LEAST_BURST_BYTES = 128 * 1024
"""More than the largest packet before it is cut into frames: the shaper would cut it by itself, which is slow."""
_BURST_S = 0.0005
_LEAST_MBIT = 1.0


class FlowLimitedNetwork(TemporaryNetwork):
    """Two ranks, each in a network namespace of its own, joined by one cable.

    In each direction the cable carries `link_mbit` of payload, and each connection `flow_mbit`, once `limit_flows` has
    been called with its ports.
    """

    def __init__(self, flow_mbit: float, link_mbit: float) -> None:
        """Raises PermissionError without root."""
        require_root()
        # Flows have no share of their own in the link, whose rate would not hold them back up to that share.
        self._flow, self._link = _make_shape(flow_mbit, _LEAST_MBIT), _make_shape(link_mbit, link_mbit)
        self._name = f"vl{os.getpid() % 100000}"
        self._subnet = f"10.{100 + os.getpid() % 50}.{time.monotonic_ns() % 250}"
        self.rendezvous_host = f"{self._subnet}.1"

    def _build(self) -> None:
        for rank in range(2):
            run_command(f"ip netns add {self._namespace(rank)}")
        run_command(
            f"ip link add eth0 mtu {MTU} netns {self._namespace(0)} type veth peer name eth0 mtu {MTU} "
            f"netns {self._namespace(1)}"
        )
        for rank in range(2):
            namespace = self._namespace(rank)
            run_command(f"ip -n {namespace} addr add {self._subnet}.{rank + 1}/24 dev eth0")
            run_command(f"ip -n {namespace} link set lo up")
            run_command(f"ip -n {namespace} link set eth0 up")
            run_command(f"tc -n {namespace} qdisc add dev eth0 root handle 1: htb")
            run_command(f"tc -n {namespace} class add dev eth0 parent 1: classid 1:1 htb {self._link}")

    def _remove(self) -> None:
        for rank in range(2):
            subprocess.run(["ip", "netns", "del", self._namespace(rank)], check=False, capture_output=True)

    def _namespace(self, rank: int) -> str:
        return f"{self._name}r{rank}"

    def enter(self, rank: int) -> None:
        """Moves this process into the namespace of the rank."""
        enter_namespace(Path(f"/var/run/netns/{self._namespace(rank)}"))

    def limit_flows(self, rank: int, flows: Collection[Ports]) -> None:
        """Limits what the rank sends over each of these connections. To be called once for each rank."""
        tc, match = f"tc -n {self._namespace(rank)}", "filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip"
        for number, (own, peer) in enumerate(flows, start=16):
            run_command(f"{tc} class add dev eth0 parent 1:1 classid 1:{number:x} htb {self._flow}")
            run_command(f"{tc} {match} sport {own} 0xffff match ip dport {peer} 0xffff flowid 1:{number:x}")


def list_ports() -> list[Ports]:
    """The ports of the TCP connections that this process has."""
    found = []
    for descriptor, _ in list_sockets():
        with socket.socket(fileno=os.dup(descriptor)) as connection, suppress(OSError):
            peer = connection.getpeername()  # a listener has none
            if connection.family == socket.AF_INET:
                found.append((connection.getsockname()[1], peer[1]))
    return found


def _make_shape(mbit: float, own_mbit: float) -> str:
    """The parameters of a class that may carry `mbit`, `own_mbit` of it whatever others carry."""
    burst = max(_LEAST_BURST_BYTES, int(mbit * 1e6 / 8 * _BURST_S))
    own, most = (f"{rate * WIRE_TO_PAYLOAD:.3f}mbit" for rate in (own_mbit, mbit))
    return f"rate {own} ceil {most} burst {burst} cburst {burst}"
