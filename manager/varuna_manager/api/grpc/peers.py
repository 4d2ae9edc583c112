"""The identity of a caller: the VM that the client's certificate names."""

from __future__ import annotations

from typing import Any, Protocol

import grpc
import structlog

from varuna_manager.access.authority import AgentSubject, read_agent_subject, read_expiry
from varuna_manager.access.enrolments import EnrolmentService
from varuna_manager.answers.errors import ServiceError
from varuna_proto.v1 import identity_pb2, identity_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PeerCheck(Protocol):
    async def find_refusal(self, context: Context, vm_id: str) -> str | None:
        """Why the caller is not accepted as the agent of this VM; None: it is."""

    def get_certificate_end(self, context: Context) -> float | None:
        """When the caller's certificate expires, in seconds since the epoch; None: it has none."""


class OpenPeerCheck:
    """Accepts every caller: an open manager listens on a loopback address only."""

    async def find_refusal(self, context: Context, vm_id: str) -> str | None:
        return None

    def get_certificate_end(self, context: Context) -> float | None:
        return None


class CertificatePeerCheck:
    """Checks the certificate, which the TLS handshake has verified against the authority and for expiry."""

    def __init__(self, enrolments: EnrolmentService) -> None:
        self._enrolments = enrolments

    async def find_refusal(self, context: Context, vm_id: str) -> str | None:
        subject = get_agent_subject(context)
        if subject is None:
            return "the certificate is no agent's: join with a token"
        if subject.vm_id != vm_id:
            return (
                f"the certificate is of VM {subject.vm_id!r}, not of {vm_id!r}: each agent joins with its own VM's id"
            )
        return await self._enrolments.find_refusal(subject)

    def get_certificate_end(self, context: Context) -> float | None:
        certificate = _get_certificate(context)
        return None if certificate is None else read_expiry(certificate)


class IdentityServicer(identity_pb2_grpc.IdentityServiceServicer):
    """Renews certificates."""

    def __init__(self, enrolments: EnrolmentService) -> None:
        self._enrolments = enrolments
        self._log = structlog.get_logger("varuna.access")

    async def Renew(  # noqa: N802 - the protocol's name
        self, request: identity_pb2.RenewRequest, context: Context
    ) -> identity_pb2.RenewAnswer:
        subject = get_agent_subject(context)
        if subject is None:
            return await _abort(context, grpc.StatusCode.PERMISSION_DENIED, "the certificate is no agent's")
        try:
            certificate = await self._enrolments.renew_certificate(subject, request.request_pem)
        except ServiceError as error:
            self._log.warning("a certificate was not renewed", vm=subject.vm_id, reason=str(error))
            return await _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(error))
        self._log.info("a certificate was renewed", vm=subject.vm_id)
        return identity_pb2.RenewAnswer(certificate_pem=certificate)


def get_agent_subject(context: Context) -> AgentSubject | None:
    """The subject of the caller's verified certificate; None: it is not an agent's, or there is none."""
    certificate = _get_certificate(context)
    return None if certificate is None else read_agent_subject(certificate)


def _get_certificate(context: Context) -> bytes | None:
    certificates = context.auth_context().get("x509_pem_cert")
    return next(iter(certificates), None) if certificates else None


async def _abort(context: Context, code: grpc.StatusCode, text: str) -> identity_pb2.RenewAnswer:
    await context.abort(code, text)
    raise AssertionError("abort raises")
