"""Local VMs with links of a set rate: each VM's agent, and so all its workers, in a network namespace of its own.

The manager listens on the machine's loopback, which no namespace reaches, so a relay listens at the same port of each
namespace's loopback. What workers send each other goes over the links.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from _pipeline_network import (
    MTU,
    WIRE_TO_PAYLOAD,
    TemporaryNetwork,
    enter_namespace,
    find_free_port,
    require_root,
    run_command,
)

__all__ = ["VmNetwork"]

_HOST = "127.0.0.1"
_LEAST_BURST_BYTES = 128 * 1024
"""More than the largest packet before it is cut into frames: the shaper would cut it by itself, which is slow."""
_BURST_S = 0.001
_CHUNK_BYTES = 1 << 16
_PROBE_BYTES = 256 << 20
_PROBE_CHUNK_BYTES = 1 << 20
_OWN_NAMESPACE = Path("/proc/self/ns/net")
_NAMESPACES = Path("/var/run/netns")


class VmNetwork(TemporaryNetwork):
    """Namespaces for the first `vms` VMs of a manager's local provider, on one bridge; each link carries `mbit` of
    payload in each direction.
    """

    def __init__(self, vms: int, mbit: float) -> None:
        """Raises PermissionError without root."""
        require_root()
        self._vms = vms
        self._mbit = mbit
        self.name = f"vr{os.getpid() % 100000}"
        self._subnet = f"10.{150 + os.getpid() % 50}.{time.monotonic_ns() % 250}"
        self._port = find_free_port()
        self._listeners: list[socket.socket] = []

    def make_manager_flags(self) -> list[str]:
        """Of `varuna manager`: where it listens, and the command with which its VMs start in their namespaces."""
        command = [sys.executable, str(Path(__file__).resolve()), self.name, self._subnet]
        return ["--grpc-port", str(self._port), "--agent-command", json.dumps(command)]

    def _build(self) -> None:
        run_command(f"ip link add {self.name} mtu {MTU} type bridge")
        run_command(f"ip link set {self.name} up")
        for vm in range(1, self._vms + 1):
            self._add_vm(vm)

    def _add_vm(self, vm: int) -> None:
        namespace, outside = _namespace(self.name, vm), f"{self.name}v{vm}"
        run_command(f"ip netns add {namespace}")
        run_command(f"ip link add {outside} mtu {MTU} type veth peer name eth0 netns {namespace}")
        run_command(f"ip link set {outside} master {self.name} up")
        run_command(f"ip -n {namespace} addr add {_address(self._subnet, vm)}/24 dev eth0")
        run_command(f"ip -n {namespace} link set lo up")
        run_command(f"ip -n {namespace} link set eth0 mtu {MTU} up")
        burst = max(_LEAST_BURST_BYTES, int(self._mbit * 1e6 / 8 * _BURST_S))
        shape = f"root tbf rate {self._mbit * WIRE_TO_PAYLOAD:.3f}mbit burst {burst} latency 100ms"
        run_command(f"tc -n {namespace} qdisc add dev eth0 {shape}")
        run_command(f"tc qdisc add dev {outside} {shape}")
        self._listeners.append(_listen_in(namespace, self._port))
        threading.Thread(target=self._relay, args=(self._listeners[-1],), daemon=True).start()

    def _relay(self, listener: socket.socket) -> None:
        """Carries connections from one namespace to the manager, until the listener is closed."""
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection((_HOST, self._port))
                except OSError:  # the manager is not there yet, or no longer
                    near.close()
                    continue
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_carry, args=ends, daemon=True).start()

    def measure_mbit(self, probe_bytes: int = _PROBE_BYTES) -> float:
        """What one plain connection between two VMs carries."""
        address = _address(self._subnet, 2)
        with _listen_in(_namespace(self.name, 2), 0, address) as listener:
            sender = [sys.executable, "-c", _SEND, address, str(listener.getsockname()[1]), str(probe_bytes)]
            with subprocess.Popen(["ip", "netns", "exec", _namespace(self.name, 1), *sender]):
                connection, _ = listener.accept()
                with connection:
                    buffer = bytearray(_PROBE_CHUNK_BYTES)
                    connection.recv(1)
                    began_s, total = time.perf_counter(), 0
                    while count := connection.recv_into(buffer):
                        total += count
                    return total * 8 / (time.perf_counter() - began_s) / 1e6

    def _remove(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends accept()
            listener.close()
        for vm in range(1, self._vms + 1):
            subprocess.run(["ip", "link", "del", f"{self.name}v{vm}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", _namespace(self.name, vm)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], check=False, capture_output=True)


_SEND = """
import socket, sys
data = bytearray(int(sys.argv[3]))
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(data)
"""


def _namespace(name: str, vm: int) -> str:
    return f"{name}n{vm}"


def _address(subnet: str, vm: int) -> str:
    return f"{subnet}.{vm}"


def _listen_in(namespace: str, port: int, host: str = _HOST) -> socket.socket:
    """A socket belongs to the namespace in which its thread was when it was made."""
    with _OWN_NAMESPACE.open() as own:
        enter_namespace(_NAMESPACES / namespace)
        try:
            return socket.create_server((host, port))
        finally:
            enter_namespace(Path(f"/proc/self/fd/{own.fileno()}"))


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def run_agent(name: str, subnet: str, arguments: list[str]) -> None:
    """Becomes the agent of the VM that the arguments name, in its namespace."""
    vm = int(arguments[arguments.index("--vm-id") + 1].removeprefix("local-"))
    enter_namespace(_NAMESPACES / _namespace(name, vm))
    command = [sys.executable, "-m", "varuna_agent.main", *arguments, "--host", _address(subnet, vm)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    run_agent(sys.argv[1], sys.argv[2], sys.argv[3:])
