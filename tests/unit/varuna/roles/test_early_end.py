"""Whether a pass ends early, where one rank cannot vote: it goes on, on all ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from varuna.distributed.departure import Departure
from varuna.distributed.topology import Topology
from varuna.roles import early_end
from varuna.roles.early_end import EarlyEnd
from waiting import wait_until

SIZES = [2, 2, 2, 2]


def fail_to_resolve() -> NoReturn:
    raise socket.gaierror(-3, "Temporary failure in name resolution")


def fail_to_decide() -> NoReturn:
    raise KeyError("what a script has changed meanwhile")


def test_a_rank_that_cannot_vote_ends_no_pass_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_end, "_PATIENCE_S", 60.0)  # nobody waits for the vote of a rank that has refused
    for own_address, may_end in ((fail_to_resolve, lambda: True), (lambda: "127.0.0.1", fail_to_decide)):
        store = dist.HashStore()
        ranks = [_Rank(0, store), _Rank(1, store, own_address, may_end)]
        for rank in ranks:
            rank.departure.request_hold_first(in_place=True, within_step=True)
            assert rank.limit_forwards(1) == 1  # none begins while it votes
        for rank in ranks:
            wait_until(lambda each=rank: each.limit_forwards(1) == len(SIZES), "the pass to go on")
            assert rank.limit.agreed is None
            assert rank.departure.exit_code is None


class _Rank:
    """Of two replicas of one stage."""

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        own_address: Callable[[], str] = lambda: "127.0.0.1",
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        self.departure = Departure()
        worker: Any = SimpleNamespace(
            departure=self.departure,
            topology=Topology(1, 2, rank),
            rendezvous=SimpleNamespace(store=store, own_address=own_address),
        )
        self.limit = EarlyEnd(worker, 5, SIZES, may_end=may_end)

    def limit_forwards(self, begun: int) -> int:
        with self.departure.condition:
            return self.limit.limit_forwards(begun)
