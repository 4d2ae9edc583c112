"""The conversation with the manager: heartbeats, the lease that their acknowledgements renew, and silence."""

from __future__ import annotations

import math
from collections.abc import Iterator

from varuna_proto.v1 import agent_pb2


class Conversation:
    """Knows when to send a heartbeat, whether the lease holds, and whether the manager still answers.

    The lease runs from the moment when the acknowledged heartbeat was *sent*. The manager counts from the moment when
    it received that heartbeat, which is later. So the workers have ended when the manager considers the lease over.

    Args:
        silence_s: the agent gives up a stream after this long without a message, or after 5 heartbeat intervals if
            that is longer.
    """

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._interval_s = 1.0
        self._lease_s = 0.0
        self._lease_from: float | None = None
        self._is_open = False
        self._last_message_at = 0.0
        self._opened_at = 0.0
        self._sequence = 0
        self._sent_at: dict[int, float] = {}
        self._heartbeat_at = -math.inf
        self._heartbeat_due: float | None = None

    @property
    def is_welcome(self) -> bool:
        """Whether the manager has welcomed the agent on this stream: only then it sends heartbeats and reports."""
        return self._heartbeat_due is not None

    def open_stream(self, now: float) -> None:
        self._is_open = True
        self._opened_at = self._last_message_at = now

    def close_stream(self) -> None:
        self._is_open = False
        self._heartbeat_due = None
        self._sent_at.clear()

    def record_message(self, now: float) -> None:
        self._last_message_at = now

    def accept_welcome(self, welcome: agent_pb2.Welcome, now: float) -> None:
        self._interval_s = welcome.heartbeat_interval_s or self._interval_s
        self._lease_s = welcome.lease_s
        self._lease_from = self._opened_at
        self._heartbeat_due = now

    def renew_lease(self, sequence: int) -> None:
        """The manager acknowledged this heartbeat. Unknown sequences (0 before the first heartbeat) renew nothing."""
        sent_at = self._sent_at.get(sequence)
        if sent_at is None:
            return
        self._lease_from = sent_at
        self._sent_at = {number: sent for number, sent in self._sent_at.items() if number > sequence}

    def hasten_heartbeat(self, now: float, *, apart: float = 0.0) -> None:
        """Make the next heartbeat due now, if the manager has welcomed the agent.

        `apart`: the part of an interval that must have passed since the last one.
        """
        if self._heartbeat_due is not None:
            self._heartbeat_due = min(self._heartbeat_due, max(now, self._heartbeat_at + apart * self._interval_s))

    def is_heartbeat_due(self, now: float) -> bool:
        return self._heartbeat_due is not None and now >= self._heartbeat_due

    def next_sequence(self, now: float) -> int:
        """Number the heartbeat that is sent now."""
        self._sequence += 1
        self._sent_at[self._sequence] = self._heartbeat_at = now
        self._heartbeat_due = now + self._interval_s
        return self._sequence

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def lease_ends_at(self) -> float | None:
        """None before the first Welcome, or if the manager gives no lease (0)."""
        return None if self._lease_from is None or not self._lease_s else self._lease_from + self._lease_s

    def is_lease_over(self, now: float) -> bool:
        return self.lease_ends_at is not None and now >= self.lease_ends_at

    def is_silent(self, now: float) -> bool:
        """Whether the stream is open, but the manager does not answer."""
        return self._is_open and now >= self._silent_at

    @property
    def silence_s(self) -> float:
        return max(self._silence_s, 5 * self._interval_s)

    @property
    def _silent_at(self) -> float:
        return self._last_message_at + self.silence_s

    def list_deadlines(self) -> Iterator[float]:
        """When to send the next heartbeat and when to give up the stream; without the lease, which concerns workers."""
        if self._heartbeat_due is not None:
            yield self._heartbeat_due
        if self._is_open:
            yield self._silent_at
