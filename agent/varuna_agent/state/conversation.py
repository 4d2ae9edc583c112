"""The talk with the manager: heartbeats, the lease that their acknowledgements renew, and its silence."""

from __future__ import annotations

from collections.abc import Iterator

from varuna_proto.v1 import agent_pb2


class Conversation:
    """When to send a heartbeat, whether the lease still stands, whether the manager still answers.

    The lease runs from the moment when the acknowledged heartbeat was *sent*, not from the acknowledgement: the manager
    counts from when it heard us, which is later, so our workers have ended when it takes the lease to be over.

    Args:
        silence_s: a stream on which nothing comes for this long (or 5 heartbeats, if that is more) is given up.
    """

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._interval_s = 1.0
        self._lease_s = 0.0
        self._lease_from: float | None = None
        self._open = False
        self._heard_at = 0.0
        self._opened_at = 0.0
        self._sequence = 0
        self._sent_at: dict[int, float] = {}
        self._heartbeat_due: float | None = None

    @property
    def is_welcome(self) -> bool:
        """Whether the manager has taken us on this stream: only then are heartbeats and reports sent."""
        return self._heartbeat_due is not None

    def opened(self, now: float) -> None:
        self._open = True
        self._opened_at = self._heard_at = now

    def closed(self) -> None:
        self._open = False
        self._heartbeat_due = None
        self._sent_at.clear()

    def heard(self, now: float) -> None:
        self._heard_at = now

    def welcomed(self, welcome: agent_pb2.Welcome, now: float) -> None:
        self._interval_s = welcome.heartbeat_interval_s or self._interval_s
        self._lease_s = welcome.lease_s
        self._lease_from = self._opened_at
        self._heartbeat_due = now

    def acknowledged(self, sequence: int) -> None:
        """Renew the lease; unknown sequences (0 before the first heartbeat) renew nothing."""
        sent_at = self._sent_at.get(sequence)
        if sent_at is None:
            return
        self._lease_from = sent_at
        self._sent_at = {number: at for number, at in self._sent_at.items() if number > sequence}

    def heartbeat_now(self, now: float) -> None:
        """Bring the next heartbeat forward, where there is someone to send it to."""
        if self.is_welcome:
            self._heartbeat_due = now

    def is_heartbeat_due(self, now: float) -> bool:
        return self._heartbeat_due is not None and now >= self._heartbeat_due

    def next_sequence(self, now: float) -> int:
        """The number of the heartbeat that goes out now."""
        self._sequence += 1
        self._sent_at[self._sequence] = now
        self._heartbeat_due = now + self._interval_s
        return self._sequence

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def lease_ends_at(self) -> float | None:
        """None before the first Welcome, and for a manager that gives no lease (0)."""
        return None if self._lease_from is None or not self._lease_s else self._lease_from + self._lease_s

    def is_lease_over(self, now: float) -> bool:
        return self.lease_ends_at is not None and now >= self.lease_ends_at

    def is_silent(self, now: float) -> bool:
        """Whether the stream is open, but nobody answers."""
        return self._open and now >= self._silent_at

    @property
    def silence_s(self) -> float:
        return max(self._silence_s, 5 * self._interval_s)

    @property
    def _silent_at(self) -> float:
        return self._heard_at + self.silence_s

    def deadlines(self) -> Iterator[float]:
        """When to look again. The lease is not among them: it matters only while workers run."""
        if self._heartbeat_due is not None:
            yield self._heartbeat_due
        if self._open:
            yield self._silent_at
