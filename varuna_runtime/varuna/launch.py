"""How this process meets its peers: its environment, the rendezvous store, and the process groups of its generation.

The groups are made directly over gloo and keyed by job and generation, apart from `torch.distributed`'s default group,
so that the script may or may not call `init_process_group`, and two generations can never meet in one group. Only
processes that know the generation's secret take part: they alone reach the store, and each proves itself to the others
in every group before anything else goes over it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Protocol

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    HashStore,
    PrefixStore,
    Store,
)

from varuna._gloo import NEVER, GlooGroup, Work, connect_group
from varuna.departure import Departure, PeerLost
from varuna.error_text import first_line
from varuna.handshake import MeetingKey
from varuna.launched import environment_of_process, find_launched_rank, new_generation
from varuna.peer_proof import prove_peers
from varuna.reach import (
    ReachablePort,
    UnreachedError,
    address_towards,
    is_loopback,
    is_out_of_reach,
    try_connect,
)
from varuna.rendezvous_store import RendezvousServer, RendezvousStore
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.stage_map import StageMap

__all__ = [
    "Group",
    "KeyValueStore",
    "Rendezvous",
    "get_this_rank_config_varuna",
    "get_varuna_config",
    "worker_environment",
]

_log = structlog.get_logger("varuna")

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
"""How long the ranks of a generation wait for each other to come up."""
STORE_REACH_S = 60.0
"""How long rank 0's machine may be silent. It is shorter, so that this is told before the others have given up."""
_RETRY_S = 0.5


class KeyValueStore(Protocol):
    """What parts of the runtime use of `torch.distributed.Store`: `get` waits until the key is there."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...


def get_varuna_config(stage_to_rank_map: str | None = None) -> tuple[int, int]:
    """(P, D): pipeline stages and data-parallel replicas of a stage-to-rank map.

    None: those of this process, which are (1, 1) where no launcher started it. Raises ValueError when malformed.
    """
    if stage_to_rank_map is None:
        environment = environment_of_process()
        return (1, 1) if environment is None else (environment.p, environment.d)
    stage_map = StageMap.parse(stage_to_rank_map)
    return stage_map.p, stage_map.d


def get_this_rank_config_varuna(stage_to_rank_map: str | None = None, rank: int = -1) -> tuple[int, int]:
    """(stage, replica) of `rank`; of this process where either is left out (rank -1 is what scripts begin with).

    Raises ValueError when the map is malformed or the rank is not in it.
    """
    if stage_to_rank_map is None:
        environment = environment_of_process()
        stage_map = StageMap.of_shape(1, 1) if environment is None else StageMap.parse(environment.stage_to_rank_map)
    else:
        stage_map = StageMap.parse(stage_to_rank_map)
    return stage_map.place_of(_own_rank() if rank < 0 else rank)


def _own_rank() -> int:
    """As whoever started this process numbers it."""
    environment = WorkerEnvironment.from_environ(os.environ)
    if environment is not None:
        return environment.rank
    launched = find_launched_rank()
    return 0 if launched is None else launched.rank


def worker_environment(
    environ: Mapping[str, str] | None = None,
    *,
    stage_to_rank_map: str | None = None,
    stages: int | None = None,
    batch_size: int | None = None,
    chunk_size: int | None = None,
    profiles: bool = False,
) -> WorkerEnvironment:
    """What the launcher says about this process, or, without a launcher, a single process: P = D = 1.

    The arguments are the script's own; one that is None is left to the launcher. torchrun and its like know neither
    shape nor sizes: there they are the arguments'. Sizes that nobody gives are 0. `profiles`: no shape is needed, for
    the process measures and does not train.
    Raises ValueError when an argument contradicts the launcher, or one that it does not know is missing.
    """
    launched = None
    environment = WorkerEnvironment.from_environ(os.environ if environ is None else environ)
    if environment is None:
        launched = find_launched_rank(environ)
    if launched is not None and profiles:
        return launched.environment_to_profile()
    if launched is not None:
        url = (os.environ if environ is None else environ).get("VARUNA_CHECKPOINT_URL", "")
        if launched.world_size > 1:
            return launched.environment(
                stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size, checkpoint_url=url
            )
        alone = worker_environment(
            {}, stage_to_rank_map=stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size
        )
        return replace(alone, generation=new_generation(), checkpoint_url=url, launcher_map="0")
    if environment is None:
        for name, value, p, d in (
            ("stage_to_rank_map", stage_to_rank_map, *get_varuna_config(stage_to_rank_map or "0")),
            ("stages", stages, 1 if stages is None else stages, 1),
        ):
            if (p, d) != (1, 1):
                raise ValueError(
                    f"{name}={value!r} needs {p * d} processes, but this one was not started by the varuna launcher, "
                    "torchrun or the like: submit the script as a job, start it with one of these, or leave the "
                    "argument out to run as a single process"
                )
        return WorkerEnvironment.alone(
            "local",
            micro_batch=chunk_size or batch_size or 0,
            global_batch=batch_size or 0,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
    if environment.mode is not Mode.TRAIN:
        return environment  # sizes and shape of the coming plan are what is being found out
    for name, value, known in (
        ("stage_to_rank_map", _without_semicolon(stage_to_rank_map), environment.stage_to_rank_map),
        ("stages", stages, environment.p),
        ("batch_size", batch_size, environment.global_batch),
        ("chunk_size", chunk_size, environment.micro_batch),
    ):
        if value is not None and value != known:
            raise ValueError(
                f"{name}={value!r} contradicts the launcher, which says {known!r}: leave the argument out"
                + (" or submit the job with this global batch" if name == "batch_size" else "")
            )
    return environment


def _without_semicolon(stage_to_rank_map: str | None) -> str | None:
    """The map as it is written today."""
    return None if stage_to_rank_map is None else str(StageMap.parse(stage_to_rank_map))


class Group:
    """Collectives among some ranks, which are left when the worker must leave.

    They run asynchronously inside gloo; its completion callbacks wake the caller, who waits on the departure.
    """

    def __init__(self, group: GlooGroup | None, ranks: Sequence[int], departure: Departure) -> None:
        self.ranks = tuple(ranks)
        self._group = group
        self._departure = departure

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over the ranks, in place. Every rank passes the same shapes in the same order."""
        self.start_all_reduce(tensors)()

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begins `all_reduce` and returns what waits for its end. All ranks begin collectives in the same order."""
        if self._group is None:
            return lambda: None
        options = AllreduceOptions()
        options.timeout = NEVER
        return self._start([partial(self._group.allreduce, [t], options) for t in tensors])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copies each tensor from the group's first rank to the others, in place."""
        if self._group is None:
            return
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = NEVER
        self._start([partial(self._group.broadcast, [t], options) for t in tensors])()

    def _start(self, operations: Sequence[Callable[[], Work]]) -> Callable[[], None]:
        self._departure.check()
        try:
            works = [operation() for operation in operations]
        except RuntimeError as error:
            self._lost(error)
            raise
        unfinished = len(works)

        def finished(_: object) -> None:
            nonlocal unfinished
            with self._departure.condition:
                unfinished -= 1
                self._departure.condition.notify_all()

        # Counted here, and not read from `is_completed`, which turns true only after the callbacks have run.
        for work in works:
            work.get_future().then(finished)

        def wait() -> None:
            self._departure.wait_until(lambda: unfinished == 0)
            try:
                for work in works:
                    work.wait(NEVER)  # returns or raises at once, for it is finished
            except RuntimeError as error:
                self._lost(error)
                raise

        return wait

    def _lost(self, error: RuntimeError) -> None:
        self._departure.leave(PeerLost(f"a collective among ranks {self.ranks} failed: {first_line(error)}"))
        self._departure.check()


class Rendezvous:
    """The store through which the ranks of a generation find each other, and the maker of their groups."""

    def __init__(self, environment: WorkerEnvironment, departure: Departure) -> None:
        """Connects to the store, which rank 0 serves. Raises PeerLost when it cannot be reached in time."""
        self._environment = environment
        self._departure = departure
        self._key = MeetingKey.of(environment)
        self.store: Store = HashStore()
        self._port: ReachablePort | None = None
        if environment.world_size > 1:
            self._reach_store()
            self.store = PrefixStore(f"varuna/{environment.job_id}/{environment.generation}", self._connect())
            self._port = ReachablePort(self.store, environment.rank, environment.world_size, self.own_address())

    def _reach_store(self) -> None:
        """Leaves when nothing at all answers from rank 0's machine. That refuses connections until rank 0 is up."""
        environment = self._environment
        if environment.rank == 0:
            return
        deadline_s = time.monotonic() + STORE_REACH_S
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                try_connect(environment.rendezvous_host, environment.rendezvous_port, max(left_s, 0.1))
            except OSError as error:
                if not is_out_of_reach(error):
                    return  # it may come up later: the store waits for that
                if left_s <= 0:
                    self._leave_unreached(UnreachedError(0, f"{environment.rendezvous_host}: {first_line(error)}"))
                    raise
                time.sleep(_RETRY_S)  # some errors come at once
            else:
                return

    def _connect(self) -> Store:
        host = self._environment.rendezvous_host
        try:
            if self._environment.rank == 0:
                warn_without_secret(self._environment)
                RendezvousServer(host, self._key)
            return RendezvousStore(host, self._key, RENDEZVOUS_TIMEOUT)
        except (OSError, RuntimeError) as error:
            self._unreachable(error)
            raise

    def group(self, name: str, ranks: Sequence[int]) -> Group:
        """The group of `ranks`, which must include this one. All of them call this in the same order of names."""
        return Group(self.gloo(name, ranks) if len(ranks) > 1 else None, ranks, self._departure)

    def gloo(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        """As `group`, but gloo's own object, whose operations the caller must be able to leave."""
        own = list(ranks).index(self._environment.rank)
        self._departure.check()
        try:
            if self._port is not None:
                self._port.reach(rank for rank in ranks if rank != self._environment.rank)
            store = PrefixStore(name, self.store)
            group = connect_group(store, own, len(ranks), address=self.own_address(), timeout=RENDEZVOUS_TIMEOUT)
            prove_peers(group, self._key, name, ranks, own)
            return group
        except UnreachedError as error:
            self._leave_unreached(error)
            raise
        except RuntimeError as error:
            self._unreachable(error)
            raise

    def exchange(self, name: str, ranks: Sequence[int], own: str) -> list[str]:
        """What each of `ranks` says under `name`, in their order. All of them call this."""
        self._departure.check()
        try:
            self.store.set(f"{name}/{self._environment.rank}", own)
            return [self.store.get(f"{name}/{rank}").decode() for rank in ranks]
        except RuntimeError as error:
            self._unreachable(error)
            raise

    def own_address(self) -> str:
        """The address of this machine on the network that leads to rank 0."""
        return address_towards(self._environment.rendezvous_host, self._environment.rendezvous_port)

    def _leave_unreached(self, error: UnreachedError) -> None:
        self._departure.leave(PeerLost(str(error), unreached=error.rank))
        self._departure.check()

    def _unreachable(self, error: OSError | RuntimeError) -> None:
        where = f"{self._environment.rendezvous_host}:{self._environment.rendezvous_port}"
        self._departure.leave(PeerLost(f"the ranks did not find each other through {where}: {first_line(error)}"))
        self._departure.check()


def warn_without_secret(environment: WorkerEnvironment) -> None:
    """Logs it where processes of other machines could take part in the run."""
    if not environment.secret and not is_loopback(environment.rendezvous_host):
        _log.warning(
            "this run has no secret: whoever reaches its ports can take part in it; start all launchers with the same "
            "VARUNA_SECRET in their environments, or through run_varuna"
        )
