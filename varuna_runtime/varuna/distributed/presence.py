"""Whether all ranks are still there: how a worker learns at once that another rank's process has ended.

Links and collectives notice a dead peer only while they wait for it. But a rank that meets the others, or loads or
saves a checkpoint, waits in the store or for files, where a dead rank looks like a late one. So every rank keeps a
connection to rank 0, which announces to all others that one closed without a goodbye; when rank 0 dies, all close.

The same connections carry what ranks announce of their calls (`calls.py`): to rank 0, which passes on what is new. And
a rank that waits for others asks over them who is there (`roll_call.py`).
At its end a rank waits until all others know of it, because the next thing that they see is that its links close.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress

from torch._C._distributed_c10d import Store

from varuna.diagnostics.error_text import first_line
from varuna.distributed.calls import CallChecker, CallKind, RankCall
from varuna.distributed.departure import Departure, GenerationEnded, PeerLost
from varuna.distributed.forked_children import close_in_forked_children
from varuna.distributed.presence_messages import (
    ARE_YOU_THERE,
    CALL_KNOWN,
    GOODBYE,
    HELLO_BYTES,
    HERE,
    RANK_LEFT,
    RANK_LOST,
    PresenceMessage,
    pack_hello,
    pack_message,
    receive_message,
    unpack_hello_rank,
)
from varuna.distributed.reach import is_out_of_reach
from varuna.distributed.roll_call import RollCall
from varuna.distributed.unproven_connections import UnprovenConnections
from varuna_proto.environment import EXIT_GENERATION_ENDED

__all__ = ["RankPresence"]

_END_KNOWN_S = 5.0
"""The longest that a rank waits at its script's end until the others know of it."""
_KEY = "presence"
_CONNECT_S = 60.0
_LEFT_WAIT_S = 2.0
_LEFT_CHECK_S = 0.5
"""How often rank 0's thread checks whether this rank has left."""
_MOST_STRANGERS = 256
"""Connections, beyond the ranks' own, that have not shown the token yet."""
_SILENCE_LIMITS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 45_000}
"""Seconds, seconds, a number of probes, and milliseconds.

A machine that vanishes, or whose network is cut, closes nothing. Its peers notice by themselves in 45 s; the manager is
faster where the machine's agent is silent, too. The kernel probes only a connection without unacknowledged data, and
the question of a roll call soon is some. So the last limit (Linux has it) bounds that data; probes then follow it, too.

It is above twice the 20 s that a machine may stand still: what that misses is sent again after times that double. A
process that is stopped is not given up, because its kernel acknowledges. It would be if it left that much unread that
the kernel takes in no more, but messages here are few and small. Links between stages may not have this limit.
"""


class RankPresence(ABC):
    """This rank's part in it; begins with `join_generation`, from one thread per process."""

    def __init__(self, departure: Departure, rank: int, calls: CallChecker) -> None:
        self._departure = departure
        self._rank = rank
        self._calls = calls
        self._end_known = threading.Event()
        """Set when all other ranks know of this rank's end."""
        self._sockets: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()
        self._is_script_over = False
        self._over = False
        self._has_left = False
        self._roll_call: RollCall | None = None
        self._rank_0_code: int | None = None
        """The exit code with which rank 0 has said goodbye."""
        self._unreached: dict[int, str] = {}
        """By rank whose machine answered nothing, not even the kernel's packets: the error."""
        calls.announce = self._announce_call
        departure.add_breaker(self._leave)

    @staticmethod
    def join_generation(
        rank: int,
        world_size: int,
        store: Store,
        *,
        address: str,
        departure: Departure,
        calls: CallChecker | None = None,
    ) -> RankPresence:
        """Connects to rank 0, or, on rank 0, lets the others connect at this machine's `address`.

        Raises PeerLost when rank 0 is not there.
        """
        calls = calls or CallChecker(rank, departure)
        if rank == 0:
            return _ServingPresence(departure, calls, world_size=world_size, store=store, address=address)
        return _ConnectedPresence(departure, rank, calls, store)

    def make_roll_call(self, report: Callable[[tuple[int, ...]], None]) -> RollCall:
        """`report` is called with the ranks that do not answer while this one waits, when they change."""
        self._roll_call = RollCall(self._list_askable, self._ask_rank, report)
        return self._roll_call

    def announce_leaving(self) -> None:
        """Announces that the script is over, or that this rank leaves a generation that is over: no loss to the others.

        Does nothing when this rank leaves for another reason.
        """
        if self._departure.exit_code is None:
            self._is_script_over = True
            self._calls.announce_end()
            self._end_known.wait(_END_KNOWN_S)
        if self._departure.exit_code in (None, EXIT_GENERATION_ENDED):
            self._over = True
            self._send_to_all(PresenceMessage(GOODBYE, 0, self._departure.exit_code or 0))

    def wait_for_training(self) -> int:
        """Waits, on a rank that takes no part in the training, until rank 0 has ended; returns rank 0's exit code.

        Returns EXIT_GENERATION_ENDED as soon as this rank itself is asked to leave, which the others need not notice.
        Raises PeerLost when a rank is lost.
        """
        self._departure.wait_until(lambda: self._rank_0_code is not None or self._departure.save_first)
        self._over = True
        self._send_to_all(PresenceMessage(GOODBYE, 0))
        return EXIT_GENERATION_ENDED if self._rank_0_code is None else self._rank_0_code

    def _leave(self, exit_: GenerationEnded | PeerLost) -> None:
        """Ends this rank's part for a process that goes on."""
        self._over = True
        kind = GOODBYE if isinstance(exit_, GenerationEnded) else RANK_LEFT
        self._send_to_all(PresenceMessage(kind, self._rank))
        self._has_left = True  # not before: the thread that serves may end then, and the sockets are closed
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    def close(self) -> None:
        """Waits until the thread of a rank that has left has ended, and closes what it used."""
        if self._thread is not None:
            self._thread.join(_LEFT_WAIT_S)
        self._close_sockets()

    @abstractmethod
    def _announce_call(self, call: RankCall) -> None: ...

    @abstractmethod
    def _list_askable(self) -> Collection[int]:
        """The ranks to which this one has a connection."""

    @abstractmethod
    def _ask_rank(self, rank: int) -> None: ...

    def _take_part_in_roll_call(self, message: PresenceMessage, rank: int, connection: socket.socket) -> bool:
        """Answers the question of a rank, or records its answer; False: the message is neither."""
        if message.kind == ARE_YOU_THERE:
            self._send_message(connection, PresenceMessage(HERE, self._rank))
        elif message.kind == HERE and self._roll_call is not None:
            self._roll_call.record_answer(rank)
        return message.kind in (ARE_YOU_THERE, HERE)

    def _leave_after_loss(self, rank: int, *, has_left: bool = False) -> None:
        """Does nothing where the script is over: this rank needs no other any more, and ends with the script's code.

        `has_left`: the rank announced that it leaves. Those that depend on it notice that by its connections.
        """
        if self._is_script_over:
            return
        if has_left:
            lost = PeerLost(f"rank {rank} has left", suspects=())
        elif (error := self._unreached.get(rank)) is not None:
            lost = PeerLost(f"rank {rank} cannot be reached from here: {error}", unreached=rank, suspects=(rank,))
        else:
            lost = PeerLost(f"rank {rank} is gone: its process has ended", suspects=(rank,))
        self._departure.leave_generation(lost)

    def _receive_message(self, rank: int, connection: socket.socket) -> PresenceMessage | None:
        """The next message of a rank; None when its connection has ended, for whatever reason."""
        try:
            return receive_message(connection)
        except OSError as error:
            if is_out_of_reach(error):
                self._unreached[rank] = first_line(error)
            return None

    def _send_to_all(self, message: PresenceMessage) -> None:
        for connection in list(self._sockets):
            self._send_message(connection, message)

    def _send_message(self, connection: socket.socket, message: PresenceMessage) -> None:
        with self._sending, suppress(OSError):  # the peer is gone, or this is the listener, which has none
            connection.sendall(pack_message(message))

    def _start_thread(self, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except BaseException as error:  # without this thread, no further loss would be noticed
                self._departure.fail_waits(error)

        self._thread = threading.Thread(target=run, name="varuna-presence", daemon=True)
        self._thread.start()

    def _add_socket(self, connection: socket.socket) -> None:
        close_in_forked_children(connection)
        self._sockets.append(connection)

    def _close_sockets(self) -> None:
        for connection in self._sockets:
            connection.close()


class _ConnectedPresence(RankPresence):
    """That of every rank but 0: one connection to rank 0."""

    def __init__(self, departure: Departure, rank: int, calls: CallChecker, store: Store) -> None:
        super().__init__(departure, rank, calls)
        self._hears_rank_0 = True
        try:
            token, port, host = store.get(_KEY).decode().split()
            connection = socket.create_connection((host, int(port)), _CONNECT_S)
            connection.settimeout(None)
            _keep_alive(connection)
            self._add_socket(connection)
            connection.sendall(token.encode() + pack_hello(rank))
        except (OSError, RuntimeError) as error:  # the store's errors are RuntimeErrors
            if isinstance(error, OSError) and is_out_of_reach(error):
                reason = f"rank 0 cannot be reached from here: {first_line(error)}"
                departure.leave_generation(PeerLost(reason, unreached=0))
            departure.leave_generation(PeerLost(f"rank 0 is gone: {first_line(error)}"))
            departure.raise_if_leaving()
            raise
        self._start_thread(lambda: self._receive_messages(connection))

    def _announce_call(self, call: RankCall) -> None:
        self._send_to_all(PresenceMessage(call.operation.value, self._rank, call.number, call.steps))

    def _list_askable(self) -> Collection[int]:
        return (0,) if self._hears_rank_0 else ()

    def _ask_rank(self, rank: int) -> None:
        self._send_to_all(PresenceMessage(ARE_YOU_THERE, self._rank))

    def _receive_messages(self, connection: socket.socket) -> None:
        while (message := self._receive_message(0, connection)) is not None and message.kind != GOODBYE:
            if message.kind in (RANK_LEFT, RANK_LOST):
                self._end_known.set()  # not all ranks can get to know of it
                if self._over:
                    return
                self._leave_after_loss(message.rank, has_left=message.kind == RANK_LEFT)
                if message.kind == RANK_LEFT and message.rank == 0:
                    return
            elif message.kind == CALL_KNOWN:
                self._end_known.set()
            elif not self._take_part_in_roll_call(message, 0, connection):
                self._calls.receive_call(message.rank, _call_in(message))
                self._send_message(connection, PresenceMessage(CALL_KNOWN, self._rank, message.number))
        self._hears_rank_0 = False
        self._end_known.set()  # rank 0 can no longer announce it
        if message is not None:
            with self._departure.condition:
                self._rank_0_code = message.number
                self._departure.condition.notify_all()
        elif not self._over:
            self._leave_after_loss(0)


class _ServingPresence(RankPresence):
    """That of rank 0: a connection to each other rank, and a listener for them."""

    def __init__(
        self, departure: Departure, calls: CallChecker, *, world_size: int, store: Store, address: str
    ) -> None:
        super().__init__(departure, 0, calls)
        self._passed_on: dict[int, CallKind] = {}
        """By a call's number: the kind that was passed on last."""
        self._unaware: dict[int, set[int]] = {}
        """By a call's number: the ranks that do not know of it yet."""
        self._askers: dict[int, set[int]] = {}
        """By a call's number: the ranks that wait until all know of it."""
        self._connections: dict[int, socket.socket] = {}
        """By rank: of those that have not ended."""
        self._token = secrets.token_hex(16).encode()
        self._hellos: dict[socket.socket, bytes] = {}
        """What has arrived on connections that have not shown the token."""
        try:
            self._listener = socket.create_server((address, 0), backlog=min(world_size, 4096))
        except OSError as error:  # this process has no more file descriptors, say
            departure.leave_generation(PeerLost(f"rank 0 gets no port for the others: {first_line(error)}"))
            departure.raise_if_leaving()
            raise
        self._unproven = UnprovenConnections(self._listener, world_size + _MOST_STRANGERS, self._end_stranger)
        self._selector = selectors.DefaultSelector()
        self._add_socket(self._listener)
        store.set(_KEY, f"{self._token.decode()} {self._listener.getsockname()[1]} {address}")
        self._start_thread(self._serve)

    def _announce_call(self, call: RankCall) -> None:
        self._pass_on(0, call)

    def _list_askable(self) -> Collection[int]:
        return list(self._connections)

    def _ask_rank(self, rank: int) -> None:
        self._send_to_rank(rank, PresenceMessage(ARE_YOU_THERE, self._rank))

    def _send_to_rank(self, rank: int, message: PresenceMessage) -> None:
        """Sends nothing to a rank that has ended meanwhile."""
        connection = self._connections.get(rank)
        if connection is not None:
            self._send_message(connection, message)

    def _pass_on(self, rank: int, call: RankCall) -> None:
        """Sends a call that is new to all others. They answer when they know of it."""
        with self._sending:
            is_new = self._passed_on.get(call.number) is not call.operation
            self._passed_on[call.number] = call.operation
            if is_new:
                self._unaware[call.number] = set(self._connections) - {rank}
            unaware = self._unaware.get(call.number, set())
            self._askers.setdefault(call.number, set()).add(rank)
        if is_new:
            message = PresenceMessage(call.operation.value, rank, call.number, call.steps)
            for other in sorted(unaware):
                self._send_to_rank(other, message)
        if rank != 0:
            self._calls.receive_call(rank, call)
        self._answer_askers(call.number)

    def _answer_askers(self, number: int) -> None:
        """Once all ranks know of a call, lets the ranks know that wait for that."""
        with self._sending:
            if self._unaware.get(number):
                return
            self._unaware.pop(number, None)
            askers = self._askers.pop(number, set())
        if 0 in askers:
            self._end_known.set()
        for rank in askers - {0}:
            self._send_to_rank(rank, PresenceMessage(CALL_KNOWN, rank, number))

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._has_left:
            for key, _ in self._selector.select(_LEFT_CHECK_S):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept_stranger()
                elif connection in self._unproven:
                    self._read_hello(connection)
                elif connection.fileno() >= 0:
                    self._receive_from_rank(int(key.data), connection)
        self._selector.close()
        for connection in self._hellos:
            connection.close()

    def _accept_stranger(self) -> None:
        accepted = self._unproven.accept_connection()
        if accepted is not None:
            connection, _ = accepted
            self._hellos[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _end_stranger(self, connection: socket.socket) -> None:
        self._forget_stranger(connection)
        connection.close()

    def _forget_stranger(self, connection: socket.socket) -> None:
        self._unproven.discard_connection(connection)
        del self._hellos[connection]
        self._selector.unregister(connection)

    def _read_hello(self, connection: socket.socket) -> None:
        """Reads what has arrived, without waiting; a process that knows the token is a rank."""
        wanted = len(self._token) + HELLO_BYTES
        try:
            part = connection.recv(wanted - len(self._hellos[connection]))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        received = self._hellos[connection] = self._hellos[connection] + part
        if part and len(received) < wanted:
            return
        if len(received) < wanted or not secrets.compare_digest(received[: len(self._token)], self._token):
            self._end_stranger(connection)
            return
        self._forget_stranger(connection)
        connection.setblocking(True)
        _keep_alive(connection)
        rank = unpack_hello_rank(received[len(self._token) :])
        with self._sending:
            self._add_socket(connection)
            self._connections[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _receive_from_rank(self, rank: int, connection: socket.socket) -> None:
        message = self._receive_message(rank, connection)
        if message is not None and message.kind == CALL_KNOWN:
            self._unaware.get(message.number, set()).discard(rank)
            self._answer_askers(message.number)
        elif message is not None and message.kind not in (GOODBYE, RANK_LEFT):
            if not self._take_part_in_roll_call(message, rank, connection):
                self._pass_on(rank, _call_in(message))
        else:
            self._selector.unregister(connection)
            self._forget_rank(rank)
            has_left = message is not None and message.kind == RANK_LEFT
            if (message is None or has_left) and not self._over:
                self._send_to_all(PresenceMessage(RANK_LEFT if has_left else RANK_LOST, rank))
                self._leave_after_loss(rank, has_left=has_left)

    def _forget_rank(self, rank: int) -> None:
        """Waits no longer for a rank that has ended."""
        self._connections.pop(rank, None)
        for number, unaware in list(self._unaware.items()):
            unaware.discard(rank)
            self._answer_askers(number)


def _call_in(message: PresenceMessage) -> RankCall:
    return RankCall(message.number, CallKind(message.kind), message.steps)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE_LIMITS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
