"""Who is at the other end of a call: the VM that the client's certificate names."""

from __future__ import annotations

from typing import Any, Protocol

import grpc
import structlog

from varuna_manager.services.authority import AgentSubject, agent_subject, end_of
from varuna_manager.services.enrolments import EnrolmentService
from varuna_manager.services.errors import ServiceError
from varuna_proto.v1 import identity_pb2, identity_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Peers(Protocol):
    async def refusal(self, context: Context, vm_id: str) -> str | None:
        """Why the caller is not taken for the agent of this VM; None: it is."""

    def certificate_end(self, context: Context) -> float | None:
        """When the caller's certificate ends, in seconds since the epoch; None: it shows none."""


class OpenPeers:
    """An open manager: everybody who reaches its loopback address is who they say they are."""

    async def refusal(self, context: Context, vm_id: str) -> str | None:
        return None

    def certificate_end(self, context: Context) -> float | None:
        return None


class CertifiedPeers:
    """The handshake has verified that the authority signed the certificate and that it has not expired."""

    def __init__(self, enrolments: EnrolmentService) -> None:
        self._enrolments = enrolments

    async def refusal(self, context: Context, vm_id: str) -> str | None:
        subject = subject_of(context)
        if subject is None:
            return "the certificate is no agent's: join with a token"
        if subject.vm_id != vm_id:
            return (
                f"the certificate is of VM {subject.vm_id!r}, not of {vm_id!r}: each agent joins with its own VM's id"
            )
        return await self._enrolments.refusal(subject)

    def certificate_end(self, context: Context) -> float | None:
        certificate = _certificate_of(context)
        return None if certificate is None else end_of(certificate)


class IdentityServicer(identity_pb2_grpc.IdentityServiceServicer):
    """Renews certificates."""

    def __init__(self, enrolments: EnrolmentService) -> None:
        self._enrolments = enrolments
        self._log = structlog.get_logger("varuna.access")

    async def Renew(  # noqa: N802 - the protocol's name
        self, request: identity_pb2.RenewRequest, context: Context
    ) -> identity_pb2.RenewAnswer:
        subject = subject_of(context)
        if subject is None:
            return await _abort(context, grpc.StatusCode.PERMISSION_DENIED, "the certificate is no agent's")
        try:
            certificate = await self._enrolments.renew(subject, request.request_pem)
        except ServiceError as error:
            self._log.warning("a certificate was not renewed", vm=subject.vm_id, reason=str(error))
            return await _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(error))
        self._log.info("a certificate was renewed", vm=subject.vm_id)
        return identity_pb2.RenewAnswer(certificate_pem=certificate)


def subject_of(context: Context) -> AgentSubject | None:
    """Whom the verified certificate of the caller names; None: it is no agent's, or there is none."""
    certificate = _certificate_of(context)
    return None if certificate is None else agent_subject(certificate)


def _certificate_of(context: Context) -> bytes | None:
    certificates = context.auth_context().get("x509_pem_cert")
    return next(iter(certificates), None) if certificates else None


async def _abort(context: Context, code: grpc.StatusCode, text: str) -> identity_pb2.RenewAnswer:
    await context.abort(code, text)
    raise AssertionError("abort raises")
