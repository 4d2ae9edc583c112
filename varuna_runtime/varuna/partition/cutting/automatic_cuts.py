"""Where to cut a model that has no CutPoints (paper, section 5.1): pure decisions over a dry run.

Blocks are the members of repeated lists (`nn.ModuleList`, `nn.Sequential`), which models of layers use. Their ends are
the candidates; heavy blocks are split into the blocks inside them. As many candidates are chosen as requested, so that
the sections are equal amounts of work, including what they send.

Letters: K sections between all candidates, n cut-points to choose.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import nn

from varuna.partition.cutting.graph import Graph, ModuleCall, TensorLeaf
from varuna.partition.cutting.placed_cut_points import CutPlace

__all__ = ["choose_cuts", "drop_light_sections", "find_candidates"]

_HEAVY = 2.0
"""A block of more than this many times the median block's work is split."""

_LIGHT = 0.25
"""A section with less than this fraction of the mean section's work is joined to a neighbour."""

_FLOPS_PER_BYTE_SENT = 1000.0
"""The cost of sending a byte. Links between GPUs are slower than this, but sending overlaps with computing."""


@dataclass(frozen=True, slots=True)
class _Block:
    members: tuple[str, ...]
    """Modules that run one after another."""
    end: str
    """The module behind which a cut may be: the last member, or the module that contains them and ends with it."""


def find_candidates(model: nn.Module, graph: Graph, wanted: int | None) -> tuple[CutPlace, ...]:
    """Ends of blocks, in the order of the forward.

    Args:
        graph: of a dry run of `model` without cut-points.
        wanted: the least number to find, if the model has as many; None: the ends of the outermost blocks.
    """
    work = _ModuleWork(graph)
    modules = dict(model.named_modules())
    blocks = list(_outermost_blocks("", model))
    while True:
        typical = statistics.median(map(work.block_cost, blocks)) if blocks else 0.0
        too_few = wanted is not None and sum(work.block_end(block) is not None for block in blocks) < wanted
        inside = {block: _inner_blocks(block, modules) for block in blocks}
        split = {x for x in blocks if inside[x] and (too_few or work.block_cost(x) > _HEAVY * typical)}
        if not split:
            break
        blocks = [part for block in blocks for part in (inside[block] if block in split else [block])]
    found = [place for block in blocks if (place := work.block_end(block)) is not None]
    return tuple(sorted(found, key=lambda place: work.return_order(place.path)))


class _ModuleWork:
    """The calls of the dry run by module, and their cost."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._calls: dict[str, list[ModuleCall]] = {}
        for call in graph.calls:
            self._calls.setdefault(call.path, []).append(call)
        own = np.zeros(len(graph.calls) + 1)
        for (innermost, _), cost in graph.costs.items():
            own[innermost + 1] += cost  # call -1, outside the model, has no part in any sum
        self._until = np.cumsum(own)

    def block_cost(self, block: _Block) -> float:
        calls = [call for path in block.members for call in self._calls.get(path, ()) if call.end >= 0]
        return float(sum(self._until[call.end] - self._until[call.index] for call in calls))

    def block_end(self, block: _Block) -> CutPlace | None:
        """The end of the block; None where a cut-point cannot stand."""
        path = block.end
        calls = self._calls.get(path, ())
        if len(calls) != 1 or calls[0].structure is None or calls[0].varies:
            return None  # called several times, or its output has unknown parts or varies
        for position, leaf in enumerate(calls[0].leaves):
            if isinstance(leaf, TensorLeaf) and leaf.made_inside:
                value = self._graph.values[leaf.value]
                if value.dependent and value.dtype.is_floating_point and value.shape:
                    return CutPlace(path, position)
        return None

    def return_order(self, path: str) -> tuple[int, int]:
        """A sort key: modules in the order in which they returned, inner ones before outer ones."""
        (call,) = self._calls[path]
        return call.end, -call.index


def _outermost_blocks(path: str, module: nn.Module) -> Iterator[_Block]:
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    if not _is_repeated(module):
        for child_path, child in children:
            yield from _outermost_blocks(child_path, child)
        return
    members: list[str] = []
    for position, (child_path, _) in enumerate(children):
        members.append(child_path)
        if position + 1 == len(children) or _has_parameters(children[position + 1][1]):
            yield _Block(tuple(members), child_path)
            members = []


def _is_repeated(module: nn.Module) -> bool:
    """Whether `module` is a list in which each type of module occurs twice on average."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    types = [type(child) for child in module.children() if _has_parameters(child)]
    return len(types) >= 2 and 2 * len(set(types)) <= len(types)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _inner_blocks(block: _Block, modules: dict[str, nn.Module]) -> list[_Block]:
    """The blocks inside a block, which together are all of it; empty if there are none."""
    inner = [part for path in block.members for part in _outermost_blocks(path, modules[path])]
    if len(inner) < 2:
        return []
    return [*inner[:-1], _Block(inner[-1].members, block.end)]


def drop_light_sections(costs: Sequence[float]) -> list[int]:
    """The cuts (1 … K-1) to keep, so that no section has very little work."""
    bounds = list(range(len(costs) + 1))
    sums = list(costs)
    while len(sums) > 1:
        lightest = min(range(len(sums)), key=sums.__getitem__)
        if sums[lightest] >= _LIGHT * statistics.fmean(sums):
            break
        before = sums[lightest - 1] if lightest > 0 else float("inf")
        after = sums[lightest + 1] if lightest + 1 < len(sums) else float("inf")
        joined = lightest - 1 if before <= after else lightest  # the first of the two sections that become one
        sums[joined : joined + 2] = [sums[joined] + sums[joined + 1]]
        del bounds[joined + 1]
    return bounds[1:-1]


def choose_cuts(costs: Sequence[float], crossing_bytes: Sequence[int], n: int) -> list[int]:
    """Choose the `n` of the cuts 1 … K-1 that make the sections most equal.

    Minimises the sum of squares of the sections' work, which is least where they are equal. Sending counts like the
    same amount of additional work in a section of mean size: it decides among cuts, and does not move work to the ends.

    Args:
        costs: the work of each of the K sections.
        crossing_bytes: [c - 1] are the bytes that cross cut c.
    """
    K = len(costs)
    assert 0 <= n < K
    until = np.concatenate(([0.0], np.cumsum(costs)))
    sent = np.concatenate(([0.0], np.asarray(crossing_bytes, dtype=float), [0.0])) * _FLOPS_PER_BYTE_SENT
    work = until[None, :] - until[:, None]  # [i, j]: of a section from cut i to cut j
    price = work**2 + 2 * until[-1] / (n + 1) * sent[None, :]
    price = np.where(np.tri(K + 1, dtype=bool), np.inf, price)
    best: npt.NDArray[np.float64] = price[0]
    came_from: list[npt.NDArray[np.intp]] = []
    for _ in range(n):
        through = best[:, None] + price
        came_from.append(through.argmin(axis=0))
        best = through.min(axis=0)
    cuts: list[int] = []
    at = K
    for source in reversed(came_from):
        at = int(source[at])
        cuts.append(at)
    return cuts[::-1]
