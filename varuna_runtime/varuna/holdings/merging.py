"""What several holders have together: one manifest, and for each of its files the holders that can give it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import FileKind, Manifest, Receipt, StateScope
from varuna.checkpoint.saving.receipts import merge_receipts
from varuna.holdings.inventory import Inventory
from varuna.holdings.transfer_plan import FileSource

__all__ = ["MergedInventories", "find_newest_step", "merge_inventories"]


class MergedInventories(NamedTuple):
    """The state of one step, as several holders have it."""

    manifest: Manifest
    holders: dict[str, tuple[Inventory, ...]]
    """By file of the manifest: the holders that have it, in the order of their ranks."""

    @property
    def sources(self) -> dict[str, FileSource]:
        sizes = {entry.name: entry.bytes for entry in self.manifest.files}
        return {
            name: FileSource(sizes[name], {inventory.rank: inventory.host for inventory in able})
            for name, able in self.holders.items()
        }


def find_newest_step(inventories: Iterable[Inventory], section_count: int | None = None) -> int | None:
    """The newest step for which the holders have every section whole; None: there is none.

    `section_count`: of the model; None: the inventories' own.
    """
    by_step: dict[int, list[Inventory]] = {}
    for inventory in inventories:
        by_step.setdefault(inventory.step, []).append(inventory)
    for step, alike in sorted(by_step.items(), reverse=True):
        held = {section for inventory in alike for section in _whole_sections(inventory)}
        count = alike[0].section_count if section_count is None else section_count
        if held >= set(range(count)):
            return step
    return None


def _whole_sections(inventory: Inventory) -> set[int]:
    """The sections for which a holder has all parameters and buffers."""
    held: Counter[int] = Counter()
    for entry in inventory.receipt.files:
        if entry.kind is FileKind.PARAMETERS:
            held[entry.section] += len(set(entry.holds))
    return {section for section, tensors in inventory.receipt.tensors_of.items() if held[section] == tensors}


def merge_inventories(inventories: Iterable[Inventory]) -> MergedInventories:
    """Merges the inventories of one step: each section as its holder of the lowest rank has it.

    Raises CheckpointError when they do not make the state of a whole job, or contradict each other.
    """
    ordered = sorted(inventories, key=lambda inventory: inventory.rank)
    _check_alike(ordered)
    first = ordered[0]
    merged = merge_receipts(
        _choose_sections(ordered),
        p=first.p,
        d=first.d,
        section_count=first.section_count,
        seed=first.seed,
        cursor=first.cursor,
        state_dict=first.state_dict,
    )
    _check_rank_states(merged.manifest)
    holders: dict[str, tuple[Inventory, ...]] = {}
    by_file: dict[str, list[Inventory]] = {}
    for inventory in ordered:
        for entry in inventory.receipt.files:
            by_file.setdefault(entry.name, []).append(inventory)
    for entry in merged.manifest.files:
        alike = by_file[entry.name]
        holders[entry.name] = tuple(one for one in alike if one.has_same_file(entry, alike[0]))
    return MergedInventories(merged.manifest, holders)


def _check_alike(ordered: Sequence[Inventory]) -> None:
    if not ordered:
        raise CheckpointError("no process holds the state of the generation before")
    first = ordered[0]
    ranks: set[int] = set()
    for other in ordered:
        if other.rank in ranks:
            raise CheckpointError(f"two processes claim that they were rank {other.rank}")
        ranks.add(other.rank)
        for what, one, another in (
            ("step", first.step, other.step),
            ("generation", first.receipt.generation, other.receipt.generation),
            ("shape", (first.p, first.d), (other.p, other.d)),
            ("number of sections", first.section_count, other.section_count),
            ("seed", first.seed, other.seed),
            ("position in the samples", first.cursor, other.cursor),
            ("state_dict", first.state_dict, other.state_dict),
        ):
            if one != another:
                raise CheckpointError(
                    f"the processes that were ranks {first.rank} and {other.rank} hold states of another {what}"
                )


def _choose_sections(ordered: Sequence[Inventory]) -> list[Receipt]:
    """The holders' receipts, in which each section is in that of the lowest rank only that has it whole.

    The job's states are the first holder's. The other registered states stay in all receipts, which are compared.
    """
    placed: set[int] = set()
    of_job: set[str] = set()
    receipts: list[Receipt] = []
    for inventory in ordered:
        receipt = inventory.receipt
        own = _whole_sections(inventory) - placed
        placed |= own
        chosen = {section: tensors for section, tensors in receipt.tensors_of.items() if section in own}
        files = tuple(
            entry
            for entry in receipt.files
            if entry.section in own or entry.kind is FileKind.STATE or (entry.kind is FileKind.OPTIONS and own)
        )
        groups = receipt.groups if own else ()
        registered = {name: state for name, state in receipt.registered.items() if name not in of_job}
        of_job |= {name for name, state in registered.items() if state.per is StateScope.JOB}
        change = {"tensors_of": chosen, "files": files, "groups": groups, "registered": registered}
        receipts.append(receipt.model_copy(update=change))
    return receipts


def _check_rank_states(manifest: Manifest) -> None:
    """Raises CheckpointError when a state that differs between ranks is held for some of them only."""
    for name, copies in manifest.rank_states.items():
        held = {rank for copy in copies for rank in copy.ranks}
        missing = sorted(set(range(manifest.p * manifest.d)) - held)
        if missing:
            raise CheckpointError(
                f"the registered state {name!r} differs between ranks, and no process holds rank {missing[0]}'s"
            )
