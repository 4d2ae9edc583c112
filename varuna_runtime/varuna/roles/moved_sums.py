"""The sums of gradients of the step under way, where survivors take other stages.

The sums of a rank move to the ranks of one replica of the new shape, each parameter's to a rank that holds it there.
Sums of several ranks for one parameter are added: they have different micro-batches. `plan_moved_sums` is pure, and all
ranks compute the same plan.

Letters: P stages, D replicas of the new shape; rank = replica * P + stage; K sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from varuna.checkpoint.format.tensor_file import iterate_pieces
from varuna.checkpoint.saving.snapshot import HostBuffers
from varuna.holdings.inventory import HeldFile
from varuna.partition import ModelMap

__all__ = ["SumsPlan", "add_sums", "pack_sums", "plan_moved_sums", "split_sums"]


@dataclass(frozen=True)
class SumsPlan:
    """Where the sums that count go."""

    replica_of: Mapping[int, int]
    """By rank whose sums count: the new replica that gets them."""
    shares: tuple[frozenset[int], ...]
    """By new replica: the micro-batches that its sums have then, at one section at least."""
    are_even: bool
    """Whether all sections of each new replica have the same ones."""

    def list_givers(self, replica: int) -> list[int]:
        """The ranks whose sums a new replica gets."""
        return sorted(rank for rank, to in self.replica_of.items() if to == replica)


def plan_moved_sums(
    shares: Sequence[frozenset[int]], complete: frozenset[int], held: Sequence[range], stages: Sequence[range]
) -> SumsPlan:
    """Which new replica gets the sums of each rank.

    The sums with the same micro-batches stay together, so that another loss costs one replica's: that which has most of
    them already, and of equals that with the fewest micro-batches.

    Args:
        shares: by rank, the micro-batches that its sums have.
        complete: those that count (`find_complete`).
        held: by rank, the sections with which it made its sums.
        stages: the sections of each new stage.
    """
    p, d = len(stages), len(held) // len(stages)
    counted = [rank for rank, share in enumerate(shares) if share and share <= complete]
    groups: dict[frozenset[int], list[int]] = {}
    for rank in counted:
        groups.setdefault(shares[rank], []).append(rank)
    replica_of: dict[int, int] = {}
    given = [0] * d
    for share in sorted(groups, key=lambda share: (-len(share), min(share))):
        stays = [0] * d
        for rank in groups[share]:
            stays[rank // p] += _count_common(held[rank], stages[rank % p])
        best = max(range(d), key=lambda replica: (stays[replica], -given[replica], -replica))
        given[best] += len(share)
        replica_of |= dict.fromkeys(groups[share], best)
    sections = range(max(stage.stop for stage in stages))
    by_section = [
        [
            frozenset[int]().union(
                *(shares[rank] for rank in counted if replica_of[rank] == replica and section in held[rank])
            )
            for section in sections
        ]
        for replica in range(d)
    ]
    return SumsPlan(
        replica_of=replica_of,
        shares=tuple(frozenset[int]().union(*have) for have in by_section),
        are_even=all(len(set(have)) == 1 for have in by_section),
    )


def _count_common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def split_sums(
    names: Iterable[str], *, rank: int, replica: int, model_map: ModelMap, stages: Sequence[range]
) -> dict[int, list[str]]:
    """By new rank: the parameters, of those with these first names, whose sums it gets from `rank`.

    `replica`: the new one that gets them. A tied parameter's go to one of the ranks that hold it there, this one first.
    """
    p = len(stages)
    holds = [model_map.parameters_held(stage) for stage in stages]
    own_stage = rank % p if rank // p == replica else None
    parts: dict[int, list[str]] = {}
    for name in names:
        holding = [stage for stage in range(p) if name in holds[stage]]
        stage = own_stage if own_stage in holding else holding[0]
        assert stage is not None
        parts.setdefault(replica * p + stage, []).append(name)
    return parts


def pack_sums(sums: Mapping[str, Tensor], parts: Mapping[int, Sequence[str]]) -> dict[int, HeldFile]:
    """By rank: a file with the sums that it gets. It lies over the tensors, which must not change while it is given;
    those of a GPU are copied."""
    buffers = HostBuffers()
    on_host = {
        name: sums[name].detach().contiguous()
        if sums[name].device.type == "cpu"
        else buffers.copy_tensor(name, sums[name])
        for names in parts.values()
        for name in names
    }
    buffers.wait_for_copies()
    files: dict[int, HeldFile] = {}
    for rank, names in parts.items():
        pieces = tuple(iterate_pieces({name: on_host[name] for name in names}, {}))
        files[rank] = HeldFile(sum(map(len, pieces)), pieces)
    return files


def add_sums(parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor]) -> None:
    """Adds sums to the parameters' gradients. They may become the gradients themselves."""
    for name, tensor in sums.items():
        parameter = parameters[name]
        tensor = tensor.to(parameter.device)
        parameter.grad = tensor if parameter.grad is None else parameter.grad.add_(tensor)
