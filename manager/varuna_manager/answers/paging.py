"""Pages of long lists, and the opaque cursors at which the next pages start."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from varuna_manager.answers.errors import InvalidError

_MOST_CURSOR = 1000
_MOST_INT = 2**63 - 1
Key = tuple[Any, ...]
Item = TypeVar("Item")
Row = TypeVar("Row")
Query = TypeVar("Query", bound=Select[*tuple[Any, ...]])


@dataclass(frozen=True)
class Page(Generic[Item]):
    """A part of a list; `next_cursor` is None at its end."""

    items: list[Item]
    next_cursor: str | None = None


@dataclass(frozen=True)
class Order(Generic[Row]):
    """An order of rows by columns. The last column is different in any two rows that are otherwise equal."""

    columns: Sequence[InstrumentedAttribute[Any]]
    key: Callable[[Row], Key]
    """A row's values of the columns."""
    kinds: Sequence[type]
    """Types of these values."""
    descending: bool = False

    def make_page_query(self, query: Query, cursor: str | None, limit: int) -> Query:
        """The query for the page that starts at the cursor, and one row more. Raises InvalidError."""
        if cursor is not None:
            query = query.where(self._beyond(decode_cursor(cursor, self.kinds)))
        columns = [column.desc() if self.descending else column.asc() for column in self.columns]
        return query.order_by(*columns).limit(limit + 1)

    async def read_page(
        self, session: AsyncSession, query: Select[Row], cursor: str | None, limit: int
    ) -> tuple[Sequence[Row], str | None]:
        """The rows of the page that starts at the cursor, and the cursor of the next one. Raises InvalidError."""
        return self.cut_page((await session.scalars(self.make_page_query(query, cursor, limit))).all(), limit)

    def cut_page(self, rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
        """The rows of the page, and the cursor of the next one."""
        if len(rows) <= limit:
            return rows, None
        return rows[:limit], encode_cursor(self.key(rows[limit - 1]))

    def _beyond(self, key: Key) -> ColumnElement[bool]:
        """The comparison with the key, written out so that PostgreSQL and SQLite both use an index."""
        ways = []
        for place, (column, value) in enumerate(zip(self.columns, key, strict=True)):
            same = [earlier == before for earlier, before in zip(self.columns[:place], key[:place], strict=True)]
            ways.append(and_(*same, column < value if self.descending else column > value))
        return or_(*ways)


def encode_cursor(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, kinds: Sequence[type]) -> Key:
    """Raises InvalidError for a cursor that this API never gave."""
    try:
        if len(cursor) > _MOST_CURSOR:
            raise ValueError
        key = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
        good = isinstance(key, list) and len(key) == len(kinds)
        if not good or not all(_has_kind(value, kind) for value, kind in zip(key, kinds, strict=True)):
            raise ValueError
    except (ValueError, binascii.Error, RecursionError):
        raise InvalidError(
            f"cursor {cursor[:40]!r} does not belong to this list: use the Link header of the page before, or no cursor"
        ) from None
    return tuple(key)


def _has_kind(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    if kind is int:
        return type(value) is int and abs(value) <= _MOST_INT
    return isinstance(value, str) and "\0" not in value
