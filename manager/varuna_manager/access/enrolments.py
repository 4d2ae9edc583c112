"""Agents that have joined: a certificate for a token, a new certificate for one that is about to expire.

A VM's certificates all carry the enrolment that they go back to. Joining again replaces the enrolment, and with it
every certificate of before; a VM that is gone or revoked has none that counts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.access.authority import (
    AgentSubject,
    Authority,
    AuthorityError,
    key_sha256,
    read_expiry,
    read_requested_key,
)
from varuna_manager.access.tokens import TokenService
from varuna_manager.agents.request_batcher import RequestBatcher
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.answers.errors import ForbiddenError, InvalidError, MissingError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import EnrolmentRow, TokenRow, VmRow
from varuna_manager.domain.states import VmState
from varuna_manager.world.events import EventLog
from varuna_proto.names import plain
from varuna_proto.rest_fleet import RevokedVmDocument


class EnrolmentService:
    """`certificate_life`: of an agent's certificate; the agent renews it before a third of that is left."""

    def __init__(
        self,
        database: Database,
        authority: Authority,
        tokens: TokenService,
        events: EventLog,
        sessions: AgentSessions,
        certificate_life: timedelta,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._authority = authority
        self._tokens = tokens
        self._events = events
        self._sessions = sessions
        self._life = certificate_life
        self._now = now
        self._checks = RequestBatcher(self._find_refusals)

    @property
    def ca_pem(self) -> bytes:
        return self._authority.ca_pem

    async def join_agent(self, token: str, vm_id: str, request_pem: str) -> str:
        """A certificate (PEM) for the agent of a VM; a single-use token is used up.

        Raises UnauthenticatedError, ForbiddenError, InvalidError.
        """
        try:
            plain(vm_id, "vm_id")
        except ValueError as error:
            raise InvalidError(str(error)) from error
        key = _key_of(request_pem)
        async with self._database.write() as session:
            row = await self._tokens.find_join_token(session, token)
            if row.vm_id not in (None, vm_id):
                raise ForbiddenError(f"the join token is for VM {row.vm_id!r}, not for {vm_id!r}: use the VM's own")
            await _refuse_gone(session, vm_id)
            before = await session.get(EnrolmentRow, vm_id)
            if before is not None and _is_repeated(before, row, key):
                return self._sign(key, AgentSubject(vm_id, before.enrolment))  # our answer did not arrive
            if before is not None and row.vm_id is None:
                # Otherwise any token could replace the agent of a VM that is at work.
                raise ForbiddenError(
                    f"VM {vm_id!r} has joined before: to let it join again, make a token of its own with "
                    f"varuna token create --join --vm {vm_id}"
                )
            self._tokens.use_join_token(row)
            subject = AgentSubject(vm_id, secrets.token_hex(16))
            await session.merge(
                EnrolmentRow(
                    vm_id=vm_id,
                    enrolment=subject.enrolment,
                    token_id=row.id,
                    key_sha256=key_sha256(key),
                    joined_at=self._now(),
                    revoked_at=None,
                )
            )
            text = f"the agent of VM {vm_id} joined with token {row.name!r}"
            self._events.emit_event(session, "vm_joined", text, vm_id=vm_id, data={"token": row.id})
        return self._sign(key, subject)

    async def renew_certificate(self, subject: AgentSubject, request_pem: str) -> str:
        """A new certificate for an agent whose present one is still valid. Raises ForbiddenError, InvalidError."""
        refusal = await self.find_refusal(subject)
        if refusal is not None:
            raise ForbiddenError(refusal)
        certificate = self._sign(_key_of(request_pem), subject)
        stream = self._sessions.get(subject.vm_id)
        if stream is not None:
            stream.certificate_ends_at = read_expiry(certificate.encode())
        return certificate

    async def find_refusal(self, subject: AgentSubject) -> str | None:
        """Why a certificate that the authority signed is no longer valid; None: it is.

        When a whole fleet reconnects at once, all waiting certificates are looked up together.
        """
        return await self._checks.add_request(subject)

    async def _find_refusals(self, subjects: Sequence[AgentSubject]) -> list[str | None]:
        vm_ids = {subject.vm_id for subject in subjects}
        async with self._database.read() as session:
            rows = await session.scalars(select(EnrolmentRow).where(EnrolmentRow.vm_id.in_(vm_ids)))
            enrolments = {row.vm_id: row for row in rows}
            is_gone = select(VmRow.id).where(VmRow.id.in_(vm_ids), VmRow.state == VmState.GONE.value)
            gone = frozenset(await session.scalars(is_gone))
        return [_refusal(subject, enrolments.get(subject.vm_id), gone) for subject in subjects]

    async def revoke_vm(self, vm_id: str) -> RevokedVmDocument:
        """Revoke the VM's certificates, and end its stream. Raises MissingError."""
        async with self._database.write() as session:
            row = await session.get(EnrolmentRow, vm_id)
            if row is None:
                raise MissingError(f"VM {vm_id!r} has not joined: there is no certificate to revoke")
            row.revoked_at = row.revoked_at or self._now()
            self._events.emit_event(session, "vm_revoked", f"the certificates of VM {vm_id} were revoked", vm_id=vm_id)
        stream = self._sessions.get(vm_id)
        if stream is not None:
            stream.close()
        return {"id": vm_id, "revoked": True}

    def _sign(self, key: EllipticCurvePublicKey, subject: AgentSubject) -> str:
        return self._authority.sign_agent_certificate(key, subject, self._life).decode()


def _key_of(request_pem: str) -> EllipticCurvePublicKey:
    try:
        return read_requested_key(request_pem.encode())
    except AuthorityError as error:
        raise InvalidError(str(error)) from error


def _is_repeated(before: EnrolmentRow, token: TokenRow, key: EllipticCurvePublicKey) -> bool:
    """Whether the same agent joins again with the same token."""
    return before.token_id == token.id and before.key_sha256 == key_sha256(key) and before.revoked_at is None


def _refusal(subject: AgentSubject, row: EnrolmentRow | None, gone: Collection[str]) -> str | None:
    if row is None or row.enrolment != subject.enrolment:
        return f"the certificate of VM {subject.vm_id!r} was replaced by a later joining: join again with a new token"
    if row.revoked_at is not None:
        return f"the certificates of VM {subject.vm_id!r} were revoked: join again with a new token"
    if subject.vm_id in gone:
        return f"VM {subject.vm_id!r} is gone: its provider gave it up"
    return None


async def _refuse_gone(session: AsyncSession, vm_id: str) -> None:
    vm = await session.get(VmRow, vm_id)
    if vm is not None and vm.state == VmState.GONE:
        raise ForbiddenError(f"VM {vm_id!r} is gone: its provider gave it up")
