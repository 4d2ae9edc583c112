"""The sums of gradients of the step under way, where survivors take other stages.

The sums of a stage move to the ranks of one replica of the new shape, each parameter's to a rank that holds it there.
Several sums of one parameter are added: they have different micro-batches, or are of different uses of it.
`plan_moved_sums` is pure, and all ranks compute the same plan.

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
    """By the number of the sums, of those that count: the new replica that gets them."""
    shares: tuple[frozenset[int], ...]
    """By new replica: the micro-batches that its sums have then, at one section at least."""
    are_even: bool
    """Whether all sections of each new replica have the same ones."""

    def list_givers(self, replica: int) -> list[int]:
        """The numbers of the sums that a new replica gets."""
        return sorted(number for number, to in self.replica_of.items() if to == replica)


def plan_moved_sums(
    shares: Sequence[frozenset[int]],
    complete: frozenset[int],
    held: Sequence[range],
    stages: Sequence[range],
    *,
    ranks: Sequence[int],
    d: int,
) -> SumsPlan:
    """Which new replica gets which sums. A rank has those of its own stage, and perhaps copies of others'.

    The sums with the same micro-batches stay together, so that another loss costs one replica's: that which has most of
    them already, and of equals that with the fewest micro-batches.

    Args:
        shares: the micro-batches that each of the sums have.
        complete: those that count (`find_complete`).
        held: the sections of each.
        stages: the sections of each new stage.
        ranks: the new rank that has each of the sums now.
        d: the new replicas.
    """
    p = len(stages)
    counted = [number for number, share in enumerate(shares) if share and share <= complete]
    groups: dict[frozenset[int], list[int]] = {}
    for number in counted:
        groups.setdefault(shares[number], []).append(number)
    replica_of: dict[int, int] = {}
    given = [0] * d
    for share in sorted(groups, key=lambda share: (-len(share), min(share))):
        stays = [0] * d
        for number in groups[share]:
            stays[ranks[number] // p] += _count_common(held[number], stages[ranks[number] % p])
        best = max(range(d), key=lambda replica: (stays[replica], -given[replica], -replica))
        given[best] += len(share)
        replica_of |= dict.fromkeys(groups[share], best)
    sections = range(max(stage.stop for stage in stages))
    by_section = [
        [
            frozenset[int]().union(
                *(shares[number] for number in counted if replica_of[number] == replica and section in held[number])
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


def pack_sums(parts: Mapping[int, Mapping[str, Tensor]]) -> dict[int, HeldFile]:
    """By rank: a file with the sums that it gets. It lies over the tensors, which must not change while it is given;
    those of a GPU are copied. `parts`: by rank, its sums by first name of the parameter."""
    buffers = HostBuffers()
    on_host = {
        rank: {
            name: tensor.detach().contiguous()
            if tensor.device.type == "cpu"
            else buffers.copy_tensor(f"{rank}/{name}", tensor)
            for name, tensor in sums.items()
        }
        for rank, sums in parts.items()
    }
    buffers.wait_for_copies()
    files: dict[int, HeldFile] = {}
    for rank, sums in on_host.items():
        pieces = tuple(iterate_pieces(sums, {}))
        files[rank] = HeldFile(sum(map(len, pieces)), pieces)
    return files


def add_sums(parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor]) -> None:
    """Adds sums to the parameters' gradients. They may become the gradients themselves."""
    for name, tensor in sums.items():
        parameter = parameters[name]
        tensor = tensor.to(parameter.device)
        parameter.grad = tensor if parameter.grad is None else parameter.grad.add_(tensor)
