"""What a holder has, without a copy; and what several holders have together."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import nn

from tied_ranks import OPTIMIZERS, SECTIONS, Rank, ranks_of, trained
from varuna.checkpoint import CheckpointError, SampleCursor, StateScope, TrainingState
from varuna.checkpoint.format.manifest import FileKind
from varuna.holdings.inventory import HeldFile, HeldFiles, Inventory, decode_inventory, encode_inventory, make_inventory
from varuna.holdings.merging import find_newest_step, merge_inventories


def make_ranks(p: int, d: int) -> list[Rank]:
    make = OPTIMIZERS["adamw"]
    return ranks_of(*trained(make), make, p, d)


def hold(rank: Rank, step: int = 3) -> HeldFiles:
    return make_inventory(rank.state, step, generation=7, rank=rank.position.rank)


def inventories(ranks: list[Rank], step: int = 3) -> list[Inventory]:
    return [hold(rank, step).inventory for rank in ranks]


def contents(file: HeldFile, chunk_bytes: int = 1 << 20, offset: int = 0) -> bytes:
    return b"".join(bytes(part) for chunk in file.iterate_chunks(offset, chunk_bytes) for part in chunk)


def test_a_holder_gives_its_whole_stage_and_copies_no_tensor() -> None:
    rank = make_ranks(2, 2)[3]
    held = hold(rank)
    files = {entry.name: entry for entry in held.inventory.receipt.files}
    assert {name for entry in files.values() for name in entry.holds} == {
        name for name, value in rank.state.section_of.items() if value in rank.sections
    }
    with torch.no_grad():
        rank.parameters["norm.weight"].fill_(42.0)  # the file shows what is in memory now
    name = next(name for name, entry in files.items() if "norm.weight" in entry.holds and entry.kind == "parameters")
    assert torch.equal(load_safetensors(contents(held.files[name]))["norm.weight"], torch.full((5,), 42.0))
    outline = held.inventory.read_outline(files[name])
    assert outline.tensors["norm.weight"].shape == (5,)
    assert held.bytes == sum(len(contents(file)) for file in held.files.values())


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_chunks_are_the_file_from_any_offset(chunk_bytes: int) -> None:
    file = HeldFile(10, (memoryview(b"abc"), memoryview(b"defghi"), memoryview(b"j")))
    for offset in range(11):
        assert contents(file, chunk_bytes, offset) == b"abcdefghij"[offset:]
    sizes = [sum(map(len, chunk)) for chunk in file.iterate_chunks(0, chunk_bytes)]
    assert set(sizes[:-1]) <= {chunk_bytes}


def test_tensors_that_are_not_contiguous_are_given_as_if_they_were() -> None:
    value = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    state = TrainingState(sections=range(1), section_count=1, parameters={"w": value}, section_of={"w": 0})
    held = make_inventory(state, 1, generation=1, rank=0)
    [file] = held.files.values()
    assert torch.equal(load_safetensors(contents(file))["w"], value)


def test_an_inventory_survives_the_store_and_harm_is_found() -> None:
    inventory = hold(make_ranks(1, 1)[0]).inventory
    data = encode_inventory(inventory)
    assert decode_inventory(data, "here") == inventory
    for harmed in (b"", data[:-20], b"x" + data, encode_inventory(inventory)[:40] + b"?" + data[41:]):
        with pytest.raises(CheckpointError, match="here"):
            decode_inventory(harmed, "here")


def test_a_file_whose_header_names_more_than_it_has_is_refused() -> None:
    inventory = hold(make_ranks(1, 1)[0]).inventory
    for entry in inventory.receipt.files:
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            inventory.read_outline(entry.model_copy(update={"bytes": entry.bytes - 1}))
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            inventory.model_copy(update={"headers": {entry.name: "{"}}).read_outline(entry)


def test_the_newest_step_is_that_of_which_every_section_is_held() -> None:
    ranks = make_ranks(2, 2)
    assert find_newest_step(inventories(ranks), SECTIONS) == 3
    assert find_newest_step(inventories([ranks[1], ranks[2]]), SECTIONS) == 3
    assert find_newest_step(inventories([ranks[0], ranks[2]]), SECTIONS) is None
    assert find_newest_step([], SECTIONS) is None
    newer = inventories(ranks[:1], step=4)
    assert find_newest_step([*newer, *inventories(ranks)], SECTIONS) == 3
    assert find_newest_step([*newer, *inventories(ranks[1:2], step=4), *inventories(ranks)]) == 4
    # One parameter file is gone: its section is not whole.
    [inventory] = inventories(make_ranks(1, 1))
    files = inventory.receipt.files
    lost = next(entry for entry in files if entry.kind is FileKind.PARAMETERS)
    receipt = inventory.receipt.model_copy(update={"files": tuple(entry for entry in files if entry is not lost)})
    assert find_newest_step([inventory.model_copy(update={"receipt": receipt})]) is None


def test_replicas_hold_the_same_files_and_each_is_named_once() -> None:
    held = inventories(make_ranks(2, 3))
    merged = merge_inventories(reversed(held))
    manifest = merged.manifest
    assert (manifest.generation, manifest.step, manifest.p, manifest.d, manifest.seed) == (7, 3, 2, 3, 5)
    assert manifest.optimizer == "torch.optim.adamw.AdamW"
    names = [name for entry in manifest.files if entry.kind is FileKind.PARAMETERS for name in entry.holds]
    assert sorted(names) == sorted(make_ranks(1, 1)[0].state.tensors)
    for entry in manifest.files:
        assert [inventory.rank % 2 for inventory in merged.holders[entry.name]] == [int(entry.section > 1)] * 3


def test_rank_0_may_be_gone() -> None:
    ranks = make_ranks(2, 2)
    for rank in ranks:
        number = rank.position.rank
        rank.user = {"job": {"x": number}, "each": {"y": 1}, "scheduler": {"z": torch.ones(2)}}
        rank.scopes = {"job": StateScope.JOB, "scheduler": StateScope.JOB}
    manifest = merge_inventories(inventories(ranks[1:])).manifest
    assert manifest.state["user"]["job"] == {"x": 1}
    assert manifest.state["user"]["each"] == {"y": 1}
    assert [entry.name for entry in manifest.files if entry.kind is FileKind.STATE] == ["state-g7-r1.safetensors"]
    assert not manifest.rank_states


def test_a_state_that_differs_between_ranks_needs_all_of_them() -> None:
    ranks = make_ranks(1, 3)
    for rank in ranks:
        rank.user = {"own": {"x": rank.position.rank}}
    assert [copy.ranks for copy in merge_inventories(inventories(ranks)).manifest.rank_states["own"]] == [
        (0,),
        (1,),
        (2,),
    ]
    with pytest.raises(CheckpointError, match=r"'own' differs between ranks, and no process holds rank 1's"):
        merge_inventories(inventories([ranks[0], ranks[2]]))


def test_a_holder_whose_file_differs_gives_only_its_others() -> None:
    one, other = inventories(make_ranks(1, 2))
    files = list(other.receipt.files)
    files[0] = files[0].model_copy(update={"bytes": files[0].bytes + 1})
    receipt = other.receipt.model_copy(update={"files": tuple(files)})
    merged = merge_inventories([one, other.model_copy(update={"receipt": receipt})])
    assert [len(able) for name, able in merged.holders.items() if name == files[0].name] == [1]
    assert all(len(able) == 2 for name, able in merged.holders.items() if name != files[0].name)


def test_holders_that_contradict_each_other_are_refused() -> None:
    one, other = inventories(make_ranks(1, 2))
    for change in ({"seed": 6}, {"p": 2}, {"cursor": SampleCursor(samples=1, global_batch=1)}):
        with pytest.raises(CheckpointError, match="hold states of another"):
            merge_inventories([one, other.model_copy(update=change)])
    with pytest.raises(CheckpointError, match="were rank 0"):
        merge_inventories([one, one])
    with pytest.raises(CheckpointError, match="no process holds"):
        merge_inventories([])
