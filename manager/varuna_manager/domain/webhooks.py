"""What a webhook is told of, and how it knows that it is us."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

WEBHOOK_EVENTS = {
    "job_failed": "job_failed",
    "job_succeeded": "job_succeeded",
    "job_hung": "hang",
    "fleet_short": "provider_refused",
}
"""Names that receivers know, and the kinds of events that they stand for."""


@dataclass(frozen=True, kw_only=True)
class WebhookTarget:
    """Who is told, and of what."""

    url: str
    secret: bytes
    names: frozenset[str]
    """Of WEBHOOK_EVENTS."""
    give_up_s: float = 3600.0
    """An event that is older and still not taken is given up, so that one bad hour does not hold up the next."""


def signature(secret: bytes, at: int, body: bytes) -> str:
    """The Varuna-Signature header: HMAC-SHA256 of the time, a dot and the body. The time is in it against replays."""
    digest = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"
