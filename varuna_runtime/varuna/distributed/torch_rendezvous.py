"""How ranks that another launcher started find their rendezvous store: through torch's own store.

`MASTER_ADDR:MASTER_PORT` belongs to torch's store, which rank 0 or torchrun's agent serves. Rank 0 announces there the
address of Varuna's own store, and a fresh secret for it; all that follows goes over the latter. torch's store may be
older than these processes: torchrun keeps it over its restarts. So an announcement counts only when the process at its
address knows its secret; until then it is read again.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from dataclasses import replace
from datetime import timedelta

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.gloo import keep_alive_forever
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.reach import address_towards, is_loopback
from varuna.distributed.rendezvous_store import is_served
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.stage_map import StageMap

__all__ = ["MEETING_LIMIT", "check_arguments_agree", "meet_through_torch"]

_log = structlog.get_logger("varuna")

MEETING_LIMIT = timedelta(minutes=5)
"""How long ranks may start after each other; torch's own limit for its store is the same."""
_POLL_S = 0.05
_ANSWER_S = 1.0
"""The limit for one check whether an announcement's store is served."""
_SECRET_BYTES = 32

_meetings = itertools.count()
"""Each model that a script wraps is a meeting of its own, and all ranks wrap them in the same order."""


def meet_through_torch(environment: WorkerEnvironment, departure: Departure) -> WorkerEnvironment:
    """`environment` with the address, the secret and the generation that all ranks share. Called by all ranks.

    Raises PeerLost when the others do not come.
    """
    place = f"{os.environ.get('MASTER_ADDR', 'the default group')}:{os.environ.get('MASTER_PORT', '')}"
    try:
        store = PrefixStore(f"varuna/meeting{next(_meetings)}", _torch_store(environment))
        store.set_timeout(MEETING_LIMIT)
        met = _announce(environment, store) if environment.rank == 0 else _follow(environment, store, departure)
    except (OSError, RuntimeError) as error:  # torch's errors of stores are RuntimeErrors
        departure.leave_generation(
            PeerLost(f"the ranks did not find each other through torch's store at {place}: {first_line(error)}")
        )
        departure.raise_if_leaving()
        raise
    if environment.launcher_rank != environment.rank:
        _log.info(
            "ranks in what follows are replica * stages + stage, other than the launcher's",
            rank=environment.rank,
            launchers_rank=environment.launcher_rank,
        )
    return met


def check_arguments_agree(environment: WorkerEnvironment, store: Store) -> None:
    """Compares the arguments of Varuna on this rank with those on rank 0, over Varuna's own store. Called by all ranks.

    Raises ValueError naming the argument that differs.
    """
    own = {
        "stages": "auto" if environment.shape_is_open else environment.plan.p,
        "stage_to_rank_map": environment.stage_to_rank_map,
        "batch_size": environment.plan.global_batch,
        "chunk_size": environment.plan.micro_batch,
    }
    if environment.rank == 0:
        store.set("arguments", json.dumps(own))
        return
    for name, value in json.loads(store.get("arguments")).items():
        if own[name] != value:
            raise ValueError(f"{name}={own[name]!r} here, but {value!r} on rank 0: give all ranks the same")


def _torch_store(environment: WorkerEnvironment) -> Store:
    """The default group's store, or the one that the script's later `init_process_group` will use."""
    if dist.is_initialized():
        return distributed_c10d._get_default_store()
    meeting = rendezvous(
        "env://", rank=environment.launcher_rank, world_size=environment.world_size, timeout=MEETING_LIMIT
    )
    store: Store = next(iter(meeting))[0]
    keep_alive_forever(store)  # on rank 0 it is the server, which the script's own group will use, too
    return store


def _announce(environment: WorkerEnvironment, store: Store) -> WorkerEnvironment:
    met = replace(
        environment, rendezvous_host=_own_address(environment, store), secret=secrets.token_hex(_SECRET_BYTES)
    )
    announced = {"host": met.rendezvous_host, "secret": met.secret, "generation": met.generation}
    store.set("announced", json.dumps(announced))
    return met


def _follow(environment: WorkerEnvironment, store: Store, departure: Departure) -> WorkerEnvironment:
    store.set(f"address/{environment.rank}", address_towards(_master()))
    deadline_s = time.monotonic() + MEETING_LIMIT.total_seconds()
    first = StageMap.parse(environment.stage_to_rank_map).stages[0][0]
    fault = f"rank {first} of the launcher, the first in the map, has not announced itself"
    while True:
        departure.raise_if_leaving()
        if store.check(["announced"]):
            announced = json.loads(store.get("announced"))
            met = replace(
                environment,
                rendezvous_host=announced["host"],
                secret=announced["secret"],
                generation=announced["generation"],
            )
            if is_served(met.rendezvous_host, MeetingKey.from_environment(met), _ANSWER_S):
                return met
            fault = f"rank {first} of the launcher announced {met.rendezvous_host}, where it cannot be reached"
        if time.monotonic() > deadline_s:
            raise dist.DistStoreError(f"timed out after {MEETING_LIMIT.total_seconds():g} s: {fault}")
        time.sleep(_POLL_S)


def _own_address(environment: WorkerEnvironment, store: Store) -> str:
    """This machine's address as the other ranks reach it; a host's own name may resolve to loopback there."""
    own = address_towards(_master())
    if os.environ.get("LOCAL_WORLD_SIZE") == str(environment.world_size):
        return own
    for rank in range(1, environment.world_size):
        if not is_loopback(own):
            break
        own = address_towards(store.get(f"address/{rank}").decode())
    return own


def _master() -> str:
    return os.environ.get("MASTER_ADDR") or "localhost"
