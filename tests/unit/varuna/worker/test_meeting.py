"""A worker that is told to leave its generation while it still meets the other ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.distributed import rendezvous
from varuna.distributed.departure import Departure, GenerationEnded
from varuna.distributed.presence import RankPresence
from varuna.distributed.worker_environment import read_worker_environment
from varuna.worker import worker

HOST = "127.0.0.1"


@pytest.fixture
def departure() -> Departure:
    departure = Departure(lambda code: None, grace_s=0.0)
    departure.offer_to_stay(lambda exit_: True, lambda: "")
    return departure


@pytest.mark.parametrize(
    ("owner", "name"),
    [(rendezvous, "ReachablePort"), (RankPresence, "join_generation")],
    ids=["before its port is known", "before its presence is known"],
)
def test_it_leaves_for_that_reason(
    owner: Any, name: str, departure: Departure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections are broken, so that no wait lasts. That they fail then is no fault: the process goes on."""
    alone = read_worker_environment({})
    environment = replace(alone, world_size=2, plan=replace(alone.plan, d=2), rendezvous_host=HOST, secret="secret")
    meet = getattr(owner, name)

    def leave_and_meet(*arguments: Any, **more: Any) -> Any:
        departure.leave_generation(GenerationEnded("the agent asked this worker to leave now"))
        return meet(*arguments, **more)

    monkeypatch.setattr(owner, name, leave_and_meet)
    link: Any = SimpleNamespace(send_waiting=lambda *_: None)
    with pytest.raises(GenerationEnded, match=str(GenerationEnded("").code)) as left:
        worker._meet_ranks(environment, departure, link)
    assert left.value.reason == "the agent asked this worker to leave now"
