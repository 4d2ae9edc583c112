"""Tokens: `vt1.<id>.<secret>` for the REST API, `vj1.<id>.<secret>.<pin of the authority>` with which an agent joins.

The store has only the SHA-256 of the secret. A slow hash (bcrypt, argon2) protects passwords, which can be guessed;
these secrets are 256 random bits, which cannot, and every request would pay for the hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.answers.documents import format_time
from varuna_manager.answers.errors import ConflictError, MissingError, UnauthenticatedError
from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError
from varuna_manager.db.models import TokenRow
from varuna_manager.domain.access import Principal, Role
from varuna_proto.rest_fleet import NewTokenDocument, TokenDocument

_ACCESS, _JOIN = "vt1", "vj1"
ACCESS_LIFE_S = 90 * 86_400.0
"""Default lifetime of a token of REST."""
_SECRET_BYTES = 32
_MOST_TEXT = 512
_USE_NOTED_S = 60.0
"""Shortest time between two writes of a token's `last_used_at`, so that not every request writes."""


class TokenService:
    """`pin`: of the authority, for join tokens; empty for a manager without any."""

    def __init__(self, database: Database, pin: str, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._pin = pin
        self._now = now
        self._use_noted: dict[str, float] = {}

    # ------------------------------------------------------------ for admins

    async def create_access_token(
        self, name: str, role: Role, ttl_s: float | None, *, by: str, save: Callable[[str], None] | None = None
    ) -> NewTokenDocument:
        """A token of REST. Only the returned document has its text. `ttl_s` None: ACCESS_LIFE_S.

        `save` gets the text before the token is valid, so that a valid token is always saved. Raises ConflictError.
        """
        secret = _new_secret()
        async with self._database.write() as session:
            live = select(TokenRow.id).where(TokenRow.name == name, TokenRow.role.is_not(None), self._is_live())
            if await session.scalar(live) is not None:
                raise ConflictError(f"token {name!r} exists: choose another name or revoke it first")
            life_s = ACCESS_LIFE_S if ttl_s is None else ttl_s
            row = self._add_row(session, name, secret, ttl_s=life_s, created_by=by, role=role.value)
            text = f"{_ACCESS}.{row.id}.{secret}"
            if save is not None:
                save(text)
        return {**make_token_document(row), "token": text}

    async def create_join_token(
        self, name: str, ttl_s: float, *, single_use: bool, vm_id: str | None, by: str
    ) -> NewTokenDocument:
        """A token with which agents join; with `vm_id`, only the agent of that VM."""
        secret = _new_secret()
        async with self._database.write() as session:
            row = self._add_row(session, name, secret, ttl_s=ttl_s, created_by=by, single_use=single_use, vm_id=vm_id)
        return {**make_token_document(row), "token": f"{_JOIN}.{row.id}.{secret}.{self._pin}"}

    async def list_tokens(self) -> list[TokenDocument]:
        """All tokens, without their secrets."""
        async with self._database.read() as session:
            rows = await session.scalars(select(TokenRow).order_by(TokenRow.created_at, TokenRow.id))
            return [make_token_document(row) for row in rows]

    async def revoke_token(self, id_or_name: str) -> TokenDocument:
        """Refuse the token from now on. Raises MissingError."""
        async with self._database.write() as session:
            named = or_(TokenRow.id == id_or_name, TokenRow.name == id_or_name)
            rows = (await session.scalars(select(TokenRow).where(named).order_by(TokenRow.created_at.desc()))).all()
            row = next((row for row in rows if row.revoked_at is None), rows[0] if rows else None)
            if row is None:
                raise MissingError(f"token {id_or_name!r} does not exist: varuna token list names those that do")
            row.revoked_at = row.revoked_at or self._now()
            return make_token_document(row)

    async def has_admin(self) -> bool:
        """Whether a valid token with the role admin exists."""
        async with self._database.read() as session:
            query = select(TokenRow.id).where(TokenRow.role == Role.ADMIN.value, self._is_live())
            return await session.scalar(query.limit(1)) is not None

    # ------------------------------------------------------------ for everybody

    async def find_principal(self, text: str) -> Principal:
        """The owner of a token of REST. Raises UnauthenticatedError."""
        async with self._database.read() as session:
            row = await self._find(session, text, _ACCESS)
        assert row.role is not None, "a token of REST has a role"
        await self._note_use(row.id)
        return Principal(row.name, Role(row.role), row.id)

    async def check_join_token(self, text: str) -> None:
        """Raises UnauthenticatedError unless this is a valid join token. Locks and changes nothing."""
        async with self._database.read() as session:
            await self._find(session, text, _JOIN)

    async def find_join_token(self, session: AsyncSession, text: str) -> TokenRow:
        """The row of a join token, for the transaction that joins with it. Raises UnauthenticatedError."""
        # Locked, so that only one of two agents joins with a single-use token (SQLite has one writer anyway).
        return await self._find(session, text, _JOIN, lock=True)

    def use_join_token(self, row: TokenRow) -> None:
        """Note that an agent joins with the token, in the row's transaction. Raises UnauthenticatedError."""
        if row.single_use and row.last_used_at is not None:
            raise UnauthenticatedError("the join token is for a single use and was used before: make a new one")
        row.last_used_at = self._now()

    async def _find(self, session: AsyncSession, text: str, kind: str, *, lock: bool = False) -> TokenRow:
        """The row of a valid token. Errors never repeat the text."""
        name = "join token" if kind == _JOIN else "token"
        is_text = len(text) <= _MOST_TEXT and text.isascii() and text.isprintable()  # PostgreSQL takes no NUL
        parts = text.split(".") if is_text else []
        if len(parts) != (4 if kind == _JOIN else 3) or parts[0] != kind:
            raise UnauthenticatedError(f"this is not a {name}: a {name} starts with '{kind}.'; copy it whole")
        row = await session.get(TokenRow, parts[1], with_for_update=lock)
        good = hmac.compare_digest(row.secret_sha256 if row is not None else "", _hash(parts[2]))
        if row is None or not good or (row.role is None) != (kind == _JOIN):
            raise UnauthenticatedError(f"this manager does not know the {name}: ask its admin for one")
        if row.revoked_at is not None:
            raise UnauthenticatedError(f"the {name} {row.name!r} was revoked: ask the manager's admin for a new one")
        if row.expires_at is not None and row.expires_at <= self._now():
            helps = "ask the manager's admin for a new one"
            if row.role == Role.ADMIN:
                helps = "ask another admin for a new one; if there is none, the manager makes one at its next start"
            raise UnauthenticatedError(f"the {name} {row.name!r} expired at {format_time(row.expires_at)}: {helps}")
        return row

    async def _note_use(self, token_id: str) -> None:
        now = self._now()
        if now - self._use_noted.get(token_id, 0.0) < _USE_NOTED_S:
            return
        self._use_noted[token_id] = now
        try:
            async with self._database.write() as session:
                row = await session.get(TokenRow, token_id)
                if row is not None:
                    row.last_used_at = now
        except (NotLeaderError, StoreAwayError):
            return  # a standby writes nothing

    def _is_live(self) -> ColumnElement[bool]:
        return TokenRow.revoked_at.is_(None) & or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > self._now())

    def _add_row(
        self,
        session: AsyncSession,
        name: str,
        secret: str,
        *,
        ttl_s: float,
        created_by: str,
        role: str | None = None,
        single_use: bool = False,
        vm_id: str | None = None,
    ) -> TokenRow:
        now = self._now()
        row = TokenRow(
            id=secrets.token_hex(8),
            name=name,
            role=role,
            secret_sha256=_hash(secret),
            created_at=now,
            created_by=created_by,
            expires_at=now + ttl_s,
            last_used_at=None,
            revoked_at=None,
            single_use=single_use,
            vm_id=vm_id,
        )
        session.add(row)
        return row


def make_token_document(row: TokenRow) -> TokenDocument:
    return {
        "id": row.id,
        "name": row.name,
        "kind": "join" if row.role is None else "access",
        "role": row.role,
        "vm_id": row.vm_id,
        "single_use": row.single_use,
        "created_at": format_time(row.created_at),
        "created_by": row.created_by,
        "expires_at": format_time(row.expires_at),
        "last_used_at": format_time(row.last_used_at),
        "revoked_at": format_time(row.revoked_at),
    }


def _new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
