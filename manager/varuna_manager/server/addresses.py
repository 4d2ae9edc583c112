"""The manager's ports, which it keeps over restarts, because agents and users dial them.

The process holds them as long as it lives, even while it exchanges its servers (a manager that starts or stops leading
answers with other servers on the same ports).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from varuna_manager.errors import StartError


@dataclass(frozen=True, kw_only=True)
class ListenPorts:
    """The two bound sockets; close them at the end."""

    http_socket: socket.socket
    """Listens."""
    grpc_socket: socket.socket
    """Bound, so that no other process gets the port; the gRPC server listens with a socket of its own."""

    @property
    def http_address(self) -> str:
        return _render_address(self.http_socket)

    @property
    def grpc_address(self) -> str:
        return _render_address(self.grpc_socket)

    def close(self) -> None:
        self.http_socket.close()
        self.grpc_socket.close()


def bind_ports(host: str, http_port: int, grpc_port: int, data_dir: Path) -> ListenPorts:
    """Bind the ports; 0 stands for the port of the last start, or a free one. Raises StartError."""
    last = _read_last_addresses(data_dir)
    http_socket = _bind_http(host, http_port, last.get("http"))
    try:
        ports = ListenPorts(http_socket=http_socket, grpc_socket=_bind_grpc(host, grpc_port, last.get("grpc")))
    except StartError:
        http_socket.close()
        raise
    return ports


def bind_grpc(server: grpc.aio.Server, ports: ListenPorts, credentials: grpc.ServerCredentials | None) -> None:
    """Let the server listen on the gRPC port. `credentials` None: without TLS."""
    if credentials is None:
        server.add_insecure_port(ports.grpc_address)
    else:
        server.add_secure_port(ports.grpc_address, credentials)


def write_addresses(ports: ListenPorts, data_dir: Path, scheme: str = "http") -> None:
    """Write `<data_dir>/manager.json`, for the next start and for programs that look for this manager."""
    part = data_dir / "manager.json.part"
    url = f"{scheme}://{ports.http_address}"
    document = {"http": ports.http_address, "url": url, "grpc": ports.grpc_address, "pid": os.getpid()}
    part.write_text(json.dumps(document))
    part.replace(data_dir / "manager.json")


def _bind_http(host: str, port: int, last: str | None) -> socket.socket:
    """A listening socket on `port`; 0: on the last port, or on a free one. Raises StartError."""
    kept = _parse_port(last) if port == 0 else 0
    if kept:
        with contextlib.suppress(OSError):
            return _listen(host, kept)
    try:
        return _listen(host, port)
    except OSError as error:
        raise StartError(
            f"HTTP port {port} of {host} cannot be used ({error.strerror}): "
            "stop the process that uses it, or give another --http-port"
        ) from error


def _bind_grpc(host: str, port: int, last: str | None) -> socket.socket:
    """A bound socket. It never replaces the last port by another, because agents dial it. Raises StartError."""
    wanted = port or _parse_port(last)
    try:
        return _bind(host, wanted)
    except OSError as error:
        kept = "" if port else " (kept from the last start, since agents dial it)"
        raise StartError(
            f"gRPC port {wanted}{kept} of {host} cannot be used ({error.strerror}): "
            "stop the process that uses it, or give another --grpc-port"
        ) from error


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket on a port where no other process listens. Raises OSError."""
    # asyncio sets TCP_NODELAY only if the protocol is named; without it, short answers wait 40 ms for a delayed ACK.
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    listener = _bind(host, port)
    try:
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _render_address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_port(address: str | None) -> int:
    return int(address.rpartition(":")[2]) if address else 0


def _read_last_addresses(data_dir: Path) -> dict[str, str]:
    try:
        document: dict[str, Any] = json.loads((data_dir / "manager.json").read_text())
    except FileNotFoundError:
        return {}
    return {name: document[name] for name in ("http", "grpc") if name in document}
