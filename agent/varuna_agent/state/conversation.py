"""The conversation with the manager: heartbeats, the lease that their acknowledgements renew, and silence."""

from __future__ import annotations

import math
from collections.abc import Iterator

from varuna_proto.v1 import agent_pb2

_MOST_PATIENCE_S = 20.0
"""With the first message of a stream. The manager may also be out of reach, and then be there again on another one."""


class Conversation:
    """Knows when to send a heartbeat, whether the lease holds, and whether the manager still answers.

    The lease runs from the moment when the acknowledged heartbeat was *sent*. The manager counts from the moment when
    it received that heartbeat, which is later. So the workers have ended when the manager considers the lease over.

    Where a whole fleet dials again, a manager may not come to a stream for long, and each one that is given up costs it
    another TLS handshake. So an agent waits twice as long for the first message after each stream that got none.

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
        self._has_message = False
        """Whether one has come on this stream."""
        self._given_up = 0
        """Streams, one after the other, on which none had come."""
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
        self._is_open, self._has_message = True, False
        self._opened_at = self._last_message_at = now

    def close_stream(self) -> None:
        self._is_open = False
        self._heartbeat_due = None
        self._sent_at.clear()

    def give_up_stream(self) -> None:
        """The stream is silent, and closed because of that."""
        self._given_up += not self._has_message
        self.close_stream()

    def record_message(self, now: float) -> None:
        self._has_message, self._given_up = True, 0
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
        return self._is_open and now >= self.silent_at

    @property
    def silence_s(self) -> float:
        """How long the agent waits for the next message on this stream."""
        silence_s = max(self._silence_s, 5 * self._interval_s)
        if self._has_message:
            return silence_s
        # A lease counts from when the stream was opened: not much of it may be over when the Welcome comes.
        most_s = min(_MOST_PATIENCE_S, self._lease_s / 2 or math.inf)
        return max(silence_s, min(silence_s * 2.0 ** min(self._given_up, 32), most_s))

    @property
    def silent_at(self) -> float:
        """When an open stream is silent, if no message comes."""
        return self._last_message_at + self.silence_s

    def list_deadlines(self) -> Iterator[float]:
        """When to send the next heartbeat and when to give up the stream; without the lease, which concerns workers."""
        if self._heartbeat_due is not None:
            yield self._heartbeat_due
        if self._is_open:
            yield self.silent_at
