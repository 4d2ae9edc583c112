"""Who fetches which file from which holder. Pure: all ranks compute the same plan from the same inventories.

A file comes from a holder on the fetching rank's own host if there is one, which loads no link. All other files are
spread so that the busiest link carries as little as possible: which link brings a file to its rank is given, so what is
chosen are the links of the holders' hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from varuna.checkpoint.errors import CheckpointError

__all__ = ["FileSource", "RankNeeds", "plan_transfers"]

_EXACT_ITEMS = 40
"""Up to so many files over links, the best plan is searched; more files balance well without a search."""
_EXACT_NODES = 20_000
_MOST_EXCHANGES = 400
_CLOSE_ENOUGH = 1.01
"""Times a bound that no plan can beat."""


class FileSource(NamedTuple):
    """Where a file can come from."""

    bytes: int
    hosts: Mapping[int, str]
    """The host of each holder that has it, by the holder's rank."""


class RankNeeds(NamedTuple):
    """What one rank fetches."""

    host: str
    files: tuple[str, ...]


class _Transfer(NamedTuple):
    """A file that goes over links."""

    bytes: int
    rank: int
    file: str
    hosts: tuple[str, ...]
    """From which it can come."""


def plan_transfers(
    sources: Mapping[str, FileSource],
    needs: Mapping[int, RankNeeds],
    bandwidths: Mapping[str, float] | None = None,
) -> dict[tuple[int, str], int]:
    """The rank of the holder from which each rank fetches each of its files.

    `sources`: by file. `bandwidths`: of hosts' links, in any unit; those without one are like the fastest. The order of
    the arguments' items does not matter. Raises CheckpointError for a file that no process holds.
    """
    transfers: list[_Transfer] = []
    sender: dict[tuple[int, str], str] = {}
    """The host that gives."""
    received: dict[str, int] = {}
    for rank, need in sorted(needs.items()):
        for file in sorted(set(need.files)):
            hosts = tuple(sorted(set(sources[file].hosts.values()))) if file in sources else ()
            if not hosts:
                raise CheckpointError(f"no process holds {file}, which rank {rank} needs")
            if need.host in hosts:
                sender[rank, file] = need.host
                continue
            size = sources[file].bytes
            transfers.append(_Transfer(size, rank, file, hosts))
            received[need.host] = received.get(need.host, 0) + size
    links = _Links(bandwidths or {}, {host for transfer in transfers for host in transfer.hosts} | received.keys())
    floor_s = max((links.seconds(host, size) for host, size in received.items()), default=0.0)
    transfers.sort(key=lambda transfer: (-transfer.bytes, transfer.rank, transfer.file))
    for transfer, host in zip(transfers, _choose_hosts(transfers, links, floor_s), strict=True):
        sender[transfer.rank, transfer.file] = host
    return _choose_processes(sender, sources)


class _Links:
    """How long a host's link takes."""

    def __init__(self, bandwidths: Mapping[str, float], hosts: Iterable[str]) -> None:
        fastest = max((bandwidth for bandwidth in bandwidths.values() if bandwidth > 0), default=1.0)
        self._bandwidth = {host: bandwidths.get(host, 0.0) or fastest for host in hosts}

    def seconds(self, host: str, size: int) -> float:
        return size / self._bandwidth[host]

    def bandwidth_of(self, hosts: Iterable[str]) -> float:
        return sum(self._bandwidth[host] for host in hosts)


def _choose_hosts(transfers: Sequence[_Transfer], links: _Links, floor_s: float) -> list[str]:
    """The host that gives each file. `floor_s`: what the busiest link takes that brings files to ranks."""
    if not transfers:
        return []
    hosts = sorted({host for transfer in transfers for host in transfer.hosts})
    bound_s = max(
        floor_s,
        sum(transfer.bytes for transfer in transfers) / links.bandwidth_of(hosts),
        *(min(links.seconds(host, transfer.bytes) for host in transfer.hosts) for transfer in transfers),
    )
    chosen = _exchange_files(transfers, _choose_greedily(transfers, links), links, bound_s)
    if len(transfers) <= _EXACT_ITEMS and _busiest_s(transfers, chosen, links) > bound_s * _CLOSE_ENOUGH:
        return _Search(transfers, links, bound_s, chosen).find_best()
    return chosen


def _count_loads(transfers: Sequence[_Transfer], chosen: Sequence[str]) -> dict[str, int]:
    loads: dict[str, int] = {}
    for transfer, host in zip(transfers, chosen, strict=True):
        loads[host] = loads.get(host, 0) + transfer.bytes
    return loads


def _busiest_s(transfers: Sequence[_Transfer], chosen: Sequence[str], links: _Links) -> float:
    return max(links.seconds(host, load) for host, load in _count_loads(transfers, chosen).items())


def _choose_greedily(transfers: Sequence[_Transfer], links: _Links) -> list[str]:
    """Each file, the largest first, from the host that is done with it first; files without a choice before all."""
    loads: dict[str, int] = {}
    chosen = [""] * len(transfers)
    for index in sorted(range(len(transfers)), key=lambda index: len(transfers[index].hosts) > 1):
        transfer = transfers[index]
        host = min(transfer.hosts, key=lambda host: (links.seconds(host, loads.get(host, 0) + transfer.bytes), host))
        loads[host] = loads.get(host, 0) + transfer.bytes
        chosen[index] = host
    return chosen


class _Exchange(NamedTuple):
    """A move of a file away from the busiest host, alone or in exchange for another."""

    seconds: float
    """What the busier of the two hosts takes afterwards."""
    moved: int
    host: str
    back: int
    """The file that comes in exchange; -1: none does."""


def _exchange_files(transfers: Sequence[_Transfer], chosen: list[str], links: _Links, bound_s: float) -> list[str]:
    """Moves files away from the busiest host as long as that helps."""
    for _ in range(_MOST_EXCHANGES):
        loads = _count_loads(transfers, chosen)
        busiest = max(sorted(loads), key=lambda host: links.seconds(host, loads[host]))
        worst_s = links.seconds(busiest, loads[busiest])
        if worst_s <= bound_s * _CLOSE_ENOUGH:
            break
        best = min(_list_exchanges(transfers, chosen, links, loads, busiest), default=None)
        if best is None or best.seconds >= worst_s:
            break
        chosen[best.moved] = best.host
        if best.back >= 0:
            chosen[best.back] = busiest
    return chosen


def _list_exchanges(
    transfers: Sequence[_Transfer], chosen: Sequence[str], links: _Links, loads: Mapping[str, int], busiest: str
) -> Iterator[_Exchange]:
    def exchange(index: int, host: str, back: int, moved: int) -> _Exchange:
        after_s = links.seconds(host, loads.get(host, 0) + moved)
        return _Exchange(max(after_s, links.seconds(busiest, loads[busiest] - moved)), index, host, back)

    for index, transfer in enumerate(transfers):
        for host in transfer.hosts if chosen[index] == busiest else ():
            if host == busiest:
                continue
            yield exchange(index, host, -1, transfer.bytes)
            for other, back in enumerate(transfers) if len(transfers) <= _EXACT_ITEMS else ():
                if chosen[other] == host and busiest in back.hosts:
                    yield exchange(index, host, other, transfer.bytes - back.bytes)


class _Search:
    """Searches the best plan, file by file, and leaves out what cannot beat the best one found so far."""

    def __init__(self, transfers: Sequence[_Transfer], links: _Links, bound_s: float, chosen: list[str]) -> None:
        self._transfers, self._links, self._bound_s = transfers, links, bound_s
        self._best = chosen
        self._best_s = _busiest_s(transfers, chosen, links)
        self._nodes = 0
        self._loads: dict[str, int] = dict.fromkeys((host for one in transfers for host in one.hosts), 0)
        self._chosen: list[str] = []

    def find_best(self) -> list[str]:
        self._try_next(0.0)
        return self._best

    def _try_next(self, worst_s: float) -> None:
        self._nodes += 1
        if len(self._chosen) == len(self._transfers):
            self._best, self._best_s = list(self._chosen), worst_s
            return
        transfer = self._transfers[len(self._chosen)]
        seconds = self._links.seconds
        for host in sorted(transfer.hosts, key=lambda host: (seconds(host, self._loads[host] + transfer.bytes), host)):
            after_s = max(worst_s, seconds(host, self._loads[host] + transfer.bytes))
            if after_s >= self._best_s or self._nodes > _EXACT_NODES or self._best_s <= self._bound_s * _CLOSE_ENOUGH:
                return
            self._loads[host] += transfer.bytes
            self._chosen.append(host)
            self._try_next(after_s)
            self._chosen.pop()
            self._loads[host] -= transfer.bytes


def _choose_processes(
    sender: Mapping[tuple[int, str], str], sources: Mapping[str, FileSource]
) -> dict[tuple[int, str], int]:
    """The holder among those of the host that gives: the one that gives least so far."""
    given: dict[int, int] = {}
    plan: dict[tuple[int, str], int] = {}
    for rank, file in sorted(sender, key=lambda one: (-sources[one[1]].bytes, one)):
        able = [holder for holder, host in sources[file].hosts.items() if host == sender[rank, file]]
        holder = min(able, key=lambda holder: (given.get(holder, 0), holder))
        given[holder] = given.get(holder, 0) + sources[file].bytes
        plan[rank, file] = holder
    return plan
