"""Tokens: `vt1.<id>.<secret>` for the REST API, `vj1.<id>.<secret>.<pin of the authority>` with which an agent joins.

The store has the SHA-256 of the secret only. A slow hash (bcrypt, argon2) makes guessing a person's password dear;
these secrets are 256 random bits, which nobody guesses however fast the hash, and each call would pay for it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError
from varuna_manager.db.models import TokenRow
from varuna_manager.domain.access import Principal, Role
from varuna_manager.services.documents import Document, iso
from varuna_manager.services.errors import ConflictError, NotFoundError, UnauthenticatedError

_ACCESS, _JOIN = "vt1", "vj1"
ACCESS_LIFE_S = 90 * 86_400.0
"""Of a token of the REST API for which no other is asked."""
_SECRET_BYTES = 32
_MOST_TEXT = 512
_USE_NOTED_S = 60.0
"""`last_used_at` is written at most so often for a token: reading should not write each time."""


class TokenService:
    """`pin`: of the authority whose join tokens these are; empty for a manager that takes none."""

    def __init__(self, database: Database, pin: str, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._pin = pin
        self._now = now
        self._use_noted: dict[str, float] = {}

    # ------------------------------------------------------------ for admins

    async def create_access(
        self, name: str, role: Role, ttl_s: float | None, *, by: str, keep: Callable[[str], None] | None = None
    ) -> Document:
        """A token of the REST API; its text is in this answer and nowhere else. `ttl_s` None: ACCESS_LIFE_S.

        Raises ConflictError.

        `keep` is given the text before the token counts: what it has kept is never missing.
        """
        secret = _new_secret()
        async with self._database.write() as session:
            live = select(TokenRow.id).where(TokenRow.name == name, TokenRow.role.is_not(None), self._is_live())
            if await session.scalar(live) is not None:
                raise ConflictError(f"there is a token {name!r} already: choose another name or revoke it first")
            life_s = ACCESS_LIFE_S if ttl_s is None else ttl_s
            row = self._add(session, name, secret, life_s, by, role=role.value)
            text = f"{_ACCESS}.{row.id}.{secret}"
            if keep is not None:
                keep(text)
        return {**token_document(row), "token": text}

    async def create_join(self, name: str, ttl_s: float, *, single_use: bool, vm_id: str | None, by: str) -> Document:
        """A token with which agents join: only that of the VM `vm_id`, when it is given."""
        secret = _new_secret()
        async with self._database.write() as session:
            row = self._add(session, name, secret, ttl_s, by, single_use=single_use, vm_id=vm_id)
        return {**token_document(row), "token": f"{_JOIN}.{row.id}.{secret}.{self._pin}"}

    async def all(self) -> list[Document]:
        """Without what opens anything."""
        async with self._database.read() as session:
            rows = await session.scalars(select(TokenRow).order_by(TokenRow.created_at, TokenRow.id))
            return [token_document(row) for row in rows]

    async def revoke(self, id_or_name: str) -> Document:
        """From now on the token opens nothing. Raises NotFoundError."""
        async with self._database.write() as session:
            named = or_(TokenRow.id == id_or_name, TokenRow.name == id_or_name)
            rows = (await session.scalars(select(TokenRow).where(named).order_by(TokenRow.created_at.desc()))).all()
            row = next((row for row in rows if row.revoked_at is None), rows[0] if rows else None)
            if row is None:
                raise NotFoundError(f"token {id_or_name!r} does not exist: varuna token list names those that do")
            row.revoked_at = row.revoked_at or self._now()
            return token_document(row)

    async def has_admin(self) -> bool:
        """Whether some token can still do everything."""
        async with self._database.read() as session:
            query = select(TokenRow.id).where(TokenRow.role == Role.ADMIN.value, self._is_live())
            return await session.scalar(query.limit(1)) is not None

    # ------------------------------------------------------------ for everybody

    async def authenticate(self, text: str) -> Principal:
        """Whose token of the REST API this is. Raises UnauthenticatedError."""
        async with self._database.read() as session:
            row = await self._find(session, text, _ACCESS)
        assert row.role is not None, "a token of the REST API has a role"
        await self._note_use(row.id)
        return Principal(row.name, Role(row.role), row.id)

    async def check_join(self, text: str) -> None:
        """Whether this is a join token that is good now: nothing is locked or changed. Raises UnauthenticatedError."""
        async with self._database.read() as session:
            await self._find(session, text, _JOIN)

    async def find_join(self, session: AsyncSession, text: str) -> TokenRow:
        """The row of a join token, for the transaction that joins with it. Raises UnauthenticatedError."""
        # Locked, so that of two who join at once with a single-use token one comes second (SQLite has one writer).
        return await self._find(session, text, _JOIN, lock=True)

    def use_join(self, row: TokenRow) -> None:
        """An agent joins with it, in the row's transaction. Raises UnauthenticatedError."""
        if row.single_use and row.last_used_at is not None:
            raise UnauthenticatedError("the join token was used before, and is for a single use: make a new one")
        row.last_used_at = self._now()

    async def _find(self, session: AsyncSession, text: str, kind: str, *, lock: bool = False) -> TokenRow:
        """The row of a token that is good now. The messages never repeat what was sent."""
        name = "join token" if kind == _JOIN else "token"
        is_text = len(text) <= _MOST_TEXT and text.isascii() and text.isprintable()  # PostgreSQL takes no NUL
        parts = text.split(".") if is_text else []
        if len(parts) != (4 if kind == _JOIN else 3) or parts[0] != kind:
            raise UnauthenticatedError(f"this is no {name}: it begins with '{kind}.'; copy it whole")
        row = await session.get(TokenRow, parts[1], with_for_update=lock)
        good = hmac.compare_digest(row.secret_sha256 if row is not None else "", _hash(parts[2]))
        if row is None or not good or (row.role is None) != (kind == _JOIN):
            raise UnauthenticatedError(f"the {name} is not one of this manager's: ask its admin for one")
        if row.revoked_at is not None:
            raise UnauthenticatedError(f"the {name} {row.name!r} was revoked: ask the manager's admin for a new one")
        if row.expires_at is not None and row.expires_at <= self._now():
            helps = "ask the manager's admin for a new one"
            if row.role == Role.ADMIN:
                helps = "another admin makes a new one; when there is none, the manager does at its next start"
            raise UnauthenticatedError(f"the {name} {row.name!r} expired at {iso(row.expires_at)}: {helps}")
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
            return  # a manager that stands by writes nothing

    def _is_live(self) -> ColumnElement[bool]:
        return TokenRow.revoked_at.is_(None) & or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > self._now())

    def _add(
        self,
        session: AsyncSession,
        name: str,
        secret: str,
        ttl_s: float,
        by: str,
        *,
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
            created_by=by,
            expires_at=now + ttl_s,
            last_used_at=None,
            revoked_at=None,
            single_use=single_use,
            vm_id=vm_id,
        )
        session.add(row)
        return row


def token_document(row: TokenRow) -> Document:
    return {
        "id": row.id,
        "name": row.name,
        "kind": "join" if row.role is None else "access",
        "role": row.role,
        "vm_id": row.vm_id,
        "single_use": row.single_use,
        "created_at": iso(row.created_at),
        "created_by": row.created_by,
        "expires_at": iso(row.expires_at),
        "last_used_at": iso(row.last_used_at),
        "revoked_at": iso(row.revoked_at),
    }


def _new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
