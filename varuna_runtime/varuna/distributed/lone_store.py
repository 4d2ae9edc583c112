"""The rendezvous store of a generation of one rank, for processes that are none of its ranks.

Such a rank meets nobody, so it serves no store otherwise.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, Store

from varuna.distributed.gloo import let_go
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous import RENDEZVOUS_TIMEOUT, store_prefix
from varuna.distributed.rendezvous_server import RendezvousServer
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna_proto.environment import WorkerEnvironment

__all__ = ["LoneStore"]


class LoneStore:
    """Serves the store from its making until `close`."""

    def __init__(self, environment: WorkerEnvironment, key: MeetingKey) -> None:
        """Raises OSError, RuntimeError when it cannot be served."""
        self._server = RendezvousServer(environment.rendezvous_host, key)
        try:
            self._served = RendezvousStore(environment.rendezvous_host, key, RENDEZVOUS_TIMEOUT)
        except BaseException:
            self._server.stop()
            raise
        self.store: Store = PrefixStore(store_prefix(environment), self._served)

    def close(self) -> None:
        self._server.stop()
        self._served.close()
        let_go(self._served)
