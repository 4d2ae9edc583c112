"""Authority, certificates and tokens of a secure manager, and its first token."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import psutil

from varuna_manager.access.audit import AuditLog
from varuna_manager.access.authority import Authority, AuthorityError, open_authority, write_private_file
from varuna_manager.access.enrolments import EnrolmentService
from varuna_manager.access.rate_limiter import RateLimiter
from varuna_manager.access.server_tls import OperatorFiles, ServerTls
from varuna_manager.access.tokens import TokenService
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.api.grpc.credentials import make_server_credentials
from varuna_manager.api.grpc.peers import CertificatePeerCheck, IdentityServicer, OpenPeerCheck, PeerCheck
from varuna_manager.api.http.access import AccessServices, RequestLimits
from varuna_manager.db.engine import Database
from varuna_manager.domain.access import BY_MANAGER, Role
from varuna_manager.errors import StartError
from varuna_manager.settings import ManagerSettings, is_wildcard
from varuna_manager.world.events import EventLog
from varuna_proto.v1 import identity_pb2_grpc

_PROVIDER_TOKEN_S = 3600.0
"""Longest time from a VM's creation to its agent's joining."""
ADMIN_TOKEN_FILE = "admin-token"


@dataclass(frozen=True)
class Security:
    authority: Authority
    tls: ServerTls

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return make_server_credentials(self.authority.ca_pem, self.tls.find_pair)


def open_security(settings: ManagerSettings, data_dir: Path) -> Security | None:
    """The authority and certificates; None for an open manager, on a loopback address. Raises StartError."""
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
    """The names and addresses in the manager's certificate."""
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *settings.names]
    names += _own_addresses() if is_wildcard(settings.host) else [settings.host]
    return list(dict.fromkeys(names))


async def make_first_token(tokens: TokenService, data_dir: Path) -> None:
    """Write an admin's token to a file in the data directory, unless there is a valid one."""
    if await tokens.has_admin():
        return

    def save(text: str) -> None:
        write_private_file(data_dir / ADMIN_TOKEN_FILE, f"{text}\n".encode())

    await tokens.create_access_token("bootstrap-admin", Role.ADMIN, None, by=BY_MANAGER, save=save)


def _own_addresses() -> Iterable[str]:
    """Addresses of this machine's interfaces, without link-local ones: certificates cannot hold their scope."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address:
                yield address.address


class AccessControl:
    """Checks who calls REST and gRPC, by the tokens and enrolments of one store. `security` None: checks nothing."""

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
        self.peers: PeerCheck = OpenPeerCheck()
        if security is not None:
            self._tokens = TokenService(database, security.authority.pin)
            life = timedelta(seconds=settings.agent_certificate_ttl_s)
            self._enrolments = EnrolmentService(database, security.authority, self._tokens, events, sessions, life)
            self.peers = CertificatePeerCheck(self._enrolments)
        limits = RequestLimits(
            max_body_bytes=settings.max_body_bytes,
            changes=RateLimiter(settings.changes_per_s, burst=max(1, round(5 * settings.changes_per_s))),
        )
        self.services = AccessServices(
            audit=AuditLog(database), tokens=self._tokens, enrolments=self._enrolments, limits=limits
        )

    async def ensure_admin_token(self, data_dir: Path) -> None:
        """Prepare a leader's first start."""
        if self._tokens is not None:
            await make_first_token(self._tokens, data_dir)

    async def make_join_token(self, vm_id: str) -> str | None:
        """A token with which the agent of a new VM joins once; None: it needs none."""
        if self._tokens is None:
            return None
        document = await self._tokens.create_join_token(
            f"provider-{vm_id}", _PROVIDER_TOKEN_S, single_use=True, vm_id=vm_id, by=BY_MANAGER
        )
        return str(document["token"])

    def serve_agents(self, server: grpc.aio.Server) -> None:
        if self._enrolments is not None:
            identity_pb2_grpc.add_IdentityServiceServicer_to_server(IdentityServicer(self._enrolments), server)
