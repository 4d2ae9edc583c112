"""What makes a manager secure, made once at the start of its process: authority, certificates; and the first token."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import psutil

from varuna_manager.api.grpc.credentials import server_credentials
from varuna_manager.api.grpc.peers import CertifiedPeers, IdentityServicer, OpenPeers, Peers
from varuna_manager.api.http.access import AccessServices, Limits
from varuna_manager.db.engine import Database
from varuna_manager.domain.access import Role
from varuna_manager.errors import StartError
from varuna_manager.services.audit import AuditLog
from varuna_manager.services.authority import Authority, AuthorityError, open_authority, write_private
from varuna_manager.services.buckets import Buckets
from varuna_manager.services.enrolments import EnrolmentService
from varuna_manager.services.events import EventLog
from varuna_manager.services.server_tls import OperatorFiles, ServerTls
from varuna_manager.services.sessions import AgentSessions
from varuna_manager.services.tokens import TokenService
from varuna_manager.settings import ManagerSettings, is_wildcard
from varuna_proto.v1 import identity_pb2_grpc

_PROVIDER_TOKEN_S = 3600.0
"""From a VM's making to its agent's joining."""
ADMIN_TOKEN_FILE = "admin-token"


@dataclass(frozen=True)
class Security:
    authority: Authority
    tls: ServerTls

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return server_credentials(self.authority.ca_pem, self.tls.pair)


def open_security(settings: ManagerSettings, data_dir: Path) -> Security | None:
    """None: an open manager, on a loopback address. Raises StartError."""
    if not settings.is_secure:
        return None
    pki_dir = settings.pki_dir or data_dir / "pki"
    operator = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        operator = OperatorFiles(certificate=settings.tls_cert, key=settings.tls_key)
    try:
        authority = open_authority(pki_dir)
        return Security(authority, ServerTls(authority, server_names(settings), data_dir, operator))
    except AuthorityError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"pki_dir {pki_dir} cannot be used ({error}): give another --pki-dir") from error


def server_names(settings: ManagerSettings) -> list[str]:
    """The names and addresses that the manager's certificate is for."""
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *settings.names]
    names += _own_addresses() if is_wildcard(settings.host) else [settings.host]
    return list(dict.fromkeys(names))


async def make_first_token(tokens: TokenService, data_dir: Path) -> None:
    """Write a token of an admin to a file of the data directory, unless somebody has such a token already."""
    if await tokens.has_admin():
        return

    def keep(text: str) -> None:
        write_private(data_dir / ADMIN_TOKEN_FILE, f"{text}\n".encode())

    await tokens.create_access("bootstrap-admin", Role.ADMIN, None, by="the manager", keep=keep)


def _own_addresses() -> Iterable[str]:
    """Of this machine's interfaces; link-local ones need a scope, which no certificate has."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address:
                yield address.address


class Access:
    """What asks who calls, over one store. `security` None: nobody is asked."""

    def __init__(
        self,
        security: Security | None,
        settings: ManagerSettings,
        database: Database,
        events: EventLog,
        sessions: AgentSessions,
    ) -> None:
        self._tokens: TokenService | None = None
        self._enrolments: EnrolmentService | None = None
        self.peers: Peers = OpenPeers()
        if security is not None:
            self._tokens = TokenService(database, security.authority.pin)
            life = timedelta(seconds=settings.agent_certificate_ttl_s)
            self._enrolments = EnrolmentService(database, security.authority, self._tokens, events, sessions, life)
            self.peers = CertifiedPeers(self._enrolments)
        limits = Limits(
            max_body_bytes=settings.max_body_bytes,
            changes=Buckets(settings.changes_per_s, burst=max(1, round(5 * settings.changes_per_s))),
        )
        self.services = AccessServices(
            audit=AuditLog(database), tokens=self._tokens, enrolments=self._enrolments, limits=limits
        )

    async def begin(self, data_dir: Path) -> None:
        """What a leader does first."""
        if self._tokens is not None:
            await make_first_token(self._tokens, data_dir)

    async def join_token(self, vm_id: str) -> str | None:
        """With which the agent of a VM that is being made can join, once; None: it needs none."""
        if self._tokens is None:
            return None
        document = await self._tokens.create_join(
            f"provider-{vm_id}", _PROVIDER_TOKEN_S, single_use=True, vm_id=vm_id, by="the manager"
        )
        return str(document["token"])

    def serve_agents(self, server: grpc.aio.Server) -> None:
        if self._enrolments is not None:
            identity_pb2_grpc.add_IdentityServiceServicer_to_server(IdentityServicer(self._enrolments), server)
