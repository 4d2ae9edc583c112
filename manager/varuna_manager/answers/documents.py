"""What REST documents of every subject share: times, and the history of an object's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, overload

from varuna_proto.rest import StateChangeDocument, Timestamp


@overload
def format_time(at: float) -> Timestamp: ...
@overload
def format_time(at: float | None) -> Timestamp | None: ...
def format_time(at: float | None) -> Timestamp | None:
    """Seconds since the epoch as ISO 8601, UTC."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def make_state_changes(history: Sequence[Mapping[str, Any]]) -> list[StateChangeDocument]:
    """`history`: as the store keeps it with a job, a generation, a VM or a worker."""
    return [{"at": format_time(entry["at"]), "state": entry["state"], "reason": entry["reason"]} for entry in history]
