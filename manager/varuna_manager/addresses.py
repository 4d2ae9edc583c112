"""Where the manager listens. It keeps its ports: agents and users dial what they know.

The ports are held for as long as the process lives, also while its servers are exchanged (a manager that comes to lead,
or leads no more, answers with other servers on the same ports).
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
class Place:
    """The two addresses; close it at the end."""

    http_socket: socket.socket
    """Listens."""
    grpc_socket: socket.socket
    """Bound, so that nobody else is given the port; the gRPC server listens on it by a socket of its own."""

    @property
    def http_address(self) -> str:
        return _address_of(self.http_socket)

    @property
    def grpc_address(self) -> str:
        return _address_of(self.grpc_socket)

    def close(self) -> None:
        self.http_socket.close()
        self.grpc_socket.close()


def take_place(host: str, http_port: int, grpc_port: int, data_dir: Path) -> Place:
    """Take the ports: those given, or for 0 those of the last start, else free ones. Raises StartError."""
    remembered = _remembered_addresses(data_dir)
    http_socket = _http_socket(host, http_port, remembered.get("http"))
    try:
        place = Place(http_socket=http_socket, grpc_socket=_grpc_socket(host, grpc_port, remembered.get("grpc")))
    except StartError:
        http_socket.close()
        raise
    return place


def bind_grpc(server: grpc.aio.Server, place: Place, credentials: grpc.ServerCredentials | None) -> None:
    """Let the server listen on the place's port. `credentials` None: without TLS."""
    if credentials is None:
        server.add_insecure_port(place.grpc_address)
    else:
        server.add_secure_port(place.grpc_address, credentials)


def remember_place(place: Place, data_dir: Path, scheme: str = "http") -> None:
    """For the next start, and for those who look for this manager."""
    part = data_dir / "manager.json.part"
    url = f"{scheme}://{place.http_address}"
    document = {"http": place.http_address, "url": url, "grpc": place.grpc_address, "pid": os.getpid()}
    part.write_text(json.dumps(document))
    part.replace(data_dir / "manager.json")


def _http_socket(host: str, port: int, remembered: str | None) -> socket.socket:
    """A listening socket: on `port`, or for 0 on the remembered one, else on a free one. Raises StartError."""
    kept = _port_of(remembered) if port == 0 else 0
    if kept:
        with contextlib.suppress(OSError):
            return _listening(host, kept)
    try:
        return _listening(host, port)
    except OSError as error:
        raise StartError(
            f"HTTP port {port} of {host} cannot be used ({error.strerror}): "
            "stop what has it, or give another --http-port"
        ) from error


def _grpc_socket(host: str, port: int, remembered: str | None) -> socket.socket:
    """A bound socket. A remembered port is not given up for another: agents dial it. Raises StartError."""
    wanted = port or _port_of(remembered)
    try:
        return _bound(host, wanted)
    except OSError as error:
        kept = "" if port else " (kept from the last start, since agents dial it)"
        raise StartError(
            f"gRPC port {wanted}{kept} of {host} cannot be used ({error.strerror}): "
            "stop what has it, or give another --grpc-port"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    """A bound socket; it shares its port with nobody who listens there. Raises OSError."""
    # With the protocol named, asyncio sets TCP_NODELAY; else short answers wait 40 ms for the client's delayed ACK.
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    listener = _bound(host, port)
    try:
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _port_of(address: str | None) -> int:
    return int(address.rpartition(":")[2]) if address else 0


def _remembered_addresses(data_dir: Path) -> dict[str, str]:
    try:
        document: dict[str, Any] = json.loads((data_dir / "manager.json").read_text())
    except FileNotFoundError:
        return {}
    return {name: document[name] for name in ("http", "grpc") if name in document}
