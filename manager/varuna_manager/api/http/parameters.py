"""Parameters that several routes share, and the links from one page of a list to the next."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Path, Query, Request, Response
from pydantic import AfterValidator

MOST_INT = 2**31 - 1
"""The largest integer that a column of the store holds."""
_MOST_STEP = 2**53
_PAGE = 1000
_MOST_PAGE = 10_000


class Direction(StrEnum):
    ASC = "asc"
    DESC = "desc"


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a NUL character: remove it")
    return text


def _unix_s(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


JobName = Annotated[str, Path(description="the job's id, or its name, which stands for the newest job of that name")]
VmId = Annotated[str, Path(description="the VM's id")]
Limit = Annotated[int, Query(ge=1, le=_MOST_PAGE, description="most entries of one page")]
JobLimit = Annotated[int, Query(ge=1, le=_PAGE, description="most entries of one page")]
Number = Annotated[int, Query(ge=0, le=MOST_INT)]
Step = Annotated[int, Query(ge=1, le=_MOST_STEP)]
GenerationNumber = Annotated[int | None, Query(ge=1, le=MOST_INT, description="null: the newest generation")]
Cursor = Annotated[str | None, Query(description="start of the page, from the Link header of the page before")]
Text = Annotated[
    str | None, Query(max_length=255), AfterValidator(lambda text: text if text is None else _no_nul(text))
]
Texts = Annotated[list[str], Query(max_length=100), AfterValidator(lambda texts: [_no_nul(text) for text in texts])]
Labels = Annotated[
    list[str],
    Query(max_length=32, description="KEY=VALUE, or KEY for any value; repeated: jobs that have all of them"),
    AfterValidator(lambda texts: [_no_nul(text) for text in texts]),
]
At = Annotated[datetime | None, Query(description="ISO 8601; UTC if it has no time zone")]
Order = Annotated[Direction, Query(description="asc: oldest first; desc: newest first")]
DEFAULT_LIMIT = _PAGE


def seconds(at: datetime | None) -> float | None:
    """Since the epoch. Nothing is older; in UTC, a moment of the calendar's first day may be before its first year."""
    return None if at is None else max(_unix_s(at).timestamp(), 0.0)


def link_next(request: Request, response: Response, cursor: str | None) -> None:
    """Add the link to the next page (RFC 8288), if there is one."""
    if cursor is not None:
        link_to(request, response, cursor=cursor)


def link_to(request: Request, response: Response, **changes: str | int) -> None:
    """Add the link to the next page: the same request with these parameters changed."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if name not in changes]
    query = urlencode([*kept, *((name, str(value)) for name, value in changes.items())])
    response.headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
