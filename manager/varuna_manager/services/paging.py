"""Pages of long lists, and the opaque cursors at which the next one begins."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_
from sqlalchemy.orm import InstrumentedAttribute

from varuna_manager.services.documents import Document
from varuna_manager.services.errors import InvalidError

_MOST_CURSOR = 1000
_MOST_INT = 2**63 - 1
Key = tuple[Any, ...]
Row = TypeVar("Row")
Query = TypeVar("Query", bound=Select[*tuple[Any, ...]])


@dataclass(frozen=True)
class Page:
    """A part of a list; `next_cursor` None: its end."""

    items: list[Document]
    next_cursor: str | None = None


@dataclass(frozen=True)
class Order(Generic[Row]):
    """An order of rows by columns, the last of which tells any two apart."""

    columns: Sequence[InstrumentedAttribute[Any]]
    key: Callable[[Row], Key]
    """Of a row: its values of the columns."""
    kinds: Sequence[type]
    """Of the values."""
    descending: bool = False

    def of(self, query: Query, cursor: str | None, limit: int) -> Query:
        """The query for the page that begins at the cursor, and one row more. Raises InvalidError."""
        if cursor is not None:
            query = query.where(self._beyond(decode(cursor, self.kinds)))
        columns = [column.desc() if self.descending else column.asc() for column in self.columns]
        return query.order_by(*columns).limit(limit + 1)

    def cut(self, rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
        """The rows of the page, and the cursor of the next one."""
        if len(rows) <= limit:
            return rows, None
        return rows[:limit], encode(self.key(rows[limit - 1]))

    def _beyond(self, key: Key) -> ColumnElement[bool]:
        """Written out: PostgreSQL and SQLite both find it by an index."""
        ways = []
        for place, (column, value) in enumerate(zip(self.columns, key, strict=True)):
            same = [earlier == before for earlier, before in zip(self.columns[:place], key[:place], strict=True)]
            ways.append(and_(*same, column < value if self.descending else column > value))
        return or_(*ways)


def encode(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def decode(cursor: str, kinds: Sequence[type]) -> Key:
    """Raises InvalidError for what this API never gave."""
    try:
        if len(cursor) > _MOST_CURSOR:
            raise ValueError
        key = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
        good = isinstance(key, list) and len(key) == len(kinds)
        if not good or not all(_is(value, kind) for value, kind in zip(key, kinds, strict=True)):
            raise ValueError
    except (ValueError, binascii.Error, RecursionError):
        raise InvalidError(
            f"cursor {cursor[:40]!r} is none of this list's: follow the Link header of the page before, or leave it out"
        ) from None
    return tuple(key)


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    if kind is int:
        return type(value) is int and abs(value) <= _MOST_INT
    return isinstance(value, str) and "\0" not in value
