"""Which events are sent to a webhook, and how they are signed."""

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
"""The names that receivers see, with the event kinds that they stand for."""


@dataclass(frozen=True, kw_only=True)
class WebhookTarget:
    """A receiver of events."""

    url: str
    secret: bytes
    names: frozenset[str]
    """The events that it receives, of WEBHOOK_EVENTS."""
    give_up_s: float = 3600.0
    """An older event that the receiver has not taken is dropped, so that an outage does not delay newer events."""


def sign(secret: bytes, at: int, body: bytes) -> str:
    """The Varuna-Signature header: HMAC-SHA256 of the time, a dot and the body. The time prevents replays."""
    digest = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"
