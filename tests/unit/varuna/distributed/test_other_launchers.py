"""The place that a process gets from another launcher's variables and the script's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from varuna.devices.worker_device import choose_device
from varuna.distributed.other_launchers import detect_launched_rank
from varuna.distributed.reach import address_towards, is_loopback
from varuna.distributed.topology import Topology
from varuna.distributed.torch_rendezvous import _own_address, check_arguments_agree
from varuna.distributed.worker_environment import (
    get_this_rank_config_varuna,
    get_varuna_config,
    read_worker_environment,
)
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.stage_map import StageMap

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCH = {**MASTER, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
SRUN = {**MASTER, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {
    **MASTER,
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
}


def without(environ: Mapping[str, str], name: str) -> dict[str, str]:
    return {other: value for other, value in environ.items() if other != name}


# ---------------------------------------------------------------- the map


def test_a_map_may_end_with_a_semicolon_as_the_launcher_of_2021_wrote_it() -> None:
    assert get_varuna_config("0,2;1,3;") == get_varuna_config("0,2;1,3") == (2, 2)
    assert get_this_rank_config_varuna("0,2;1,3;", 2) == (0, 1)


@pytest.mark.parametrize("text", ["", ";", "0;;", "0;1;;", "0,a", "0,1;2", "0;0", "1;2"])
def test_maps_that_are_none_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"stage_to_rank_map '{text}': "):
        get_varuna_config(text)


@given(data=st.data(), p=st.integers(1, 4), d=st.integers(1, 4))
def test_ranks_in_any_order_find_their_place(data: st.DataObject, p: int, d: int) -> None:
    ranks = data.draw(st.permutations(range(p * d)))
    stage_map = StageMap(tuple(tuple(ranks[stage * d : stage * d + d]) for stage in range(p)))
    assert StageMap.parse(str(stage_map)) == stage_map
    own = {
        rank: read_worker_environment(
            {**TORCH, "RANK": str(rank), "WORLD_SIZE": str(p * d)},
            stage_to_rank_map=str(stage_map),
            batch_size=32,
            chunk_size=2,
        )
        for rank in ranks
        if p * d > 1
    }
    assert {environment.rank for environment in own.values()} == set(ranks if own else ())
    for rank, environment in own.items():
        topology = Topology(p, d, environment.rank)
        assert stage_map.stages[topology.stage][topology.replica] == rank == environment.launcher_rank
        assert environment.stage_to_rank_map == str(stage_map)


# ---------------------------------------------------------------- the launchers


@pytest.mark.parametrize("environ", [TORCH, SRUN, MPIRUN], ids=["torchrun", "srun", "mpirun"])
def test_shape_and_sizes_come_from_the_arguments(environ: dict[str, str]) -> None:
    environment = read_worker_environment(environ, stages=2, batch_size=16, chunk_size=4)
    assert (environment.plan.p, environment.plan.d, environment.rank, environment.world_size) == (2, 2, 1, 4)
    assert (environment.plan.global_batch, environment.plan.micro_batch, environment.stage_to_rank_map) == (
        16,
        4,
        "0,2;1,3",
    )
    data_parallel = read_worker_environment(environ, stage_to_rank_map="0,1,2,3;", batch_size=16)
    assert (data_parallel.plan.p, data_parallel.plan.d, data_parallel.plan.micro_batch) == (1, 4, 4)


@pytest.mark.parametrize("world_size", ["1", "4"])
def test_an_open_shape_has_all_ranks_until_it_is_planned(world_size: str) -> None:
    environ = {**TORCH, "RANK": "0", "WORLD_SIZE": world_size, "VARUNA_CHECKPOINT_URL": "/ckpt"}
    environment = read_worker_environment(environ, stages="auto", batch_size=16)
    assert environment.shape_is_open
    assert environment.world_size == environment.plan.d == int(world_size)
    assert (environment.plan.p, environment.plan.micro_batch, environment.checkpoint_url) == (1, 0, "/ckpt")
    assert read_worker_environment(environ, stages="auto", batch_size=16, chunk_size=4).plan.micro_batch == 4
    assert not read_worker_environment(environ, stages=1, batch_size=16).shape_is_open


def test_where_the_launcher_knows_the_shape_an_open_one_is_that() -> None:
    own = WorkerEnvironment.alone("job", micro_batch=2, global_batch=4)
    assert read_worker_environment(own.to_environ(), stages="auto") == own
    assert not read_worker_environment({}, stages="auto", batch_size=4).shape_is_open


def test_torchs_own_variables_come_first() -> None:
    assert read_worker_environment({**SRUN, **TORCH, "RANK": "3"}, stages=4, batch_size=4, chunk_size=1).rank == 3


def test_a_batch_script_is_one_process_though_slurm_counts_its_tasks() -> None:
    assert detect_launched_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}) is None


def test_varunas_own_launcher_comes_before_all() -> None:
    own = WorkerEnvironment.alone("job", micro_batch=2, global_batch=4)
    assert read_worker_environment({**SRUN, **own.to_environ()}) == own


def test_one_process_of_torchrun_is_alone_and_keeps_its_checkpoints() -> None:
    environment = read_worker_environment(
        {**TORCH, "RANK": "0", "WORLD_SIZE": "1", "VARUNA_CHECKPOINT_URL": "/ckpt"}, stages=1
    )
    assert (environment.plan.p, environment.plan.d, environment.world_size, environment.checkpoint_url) == (
        1,
        1,
        1,
        "/ckpt",
    )


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        (TORCH, {"batch_size": 8}, r"torchrun started 4 processes, but nothing says .*: give Varuna\(..., stages=P\)"),
        (SRUN, {"stages": 3, "batch_size": 8}, "stages=3 does not divide the 4 processes that srun started"),
        (TORCH, {"stages": 0, "batch_size": 8}, "stages=0 does not divide the 4 processes"),
        (TORCH, {"stage_to_rank_map": "0;1;", "batch_size": 8}, "has 2 ranks, but torchrun started 4 processes"),
        (TORCH, {"stage_to_rank_map": "0,1;2,3", "stages": 4, "batch_size": 8}, "stages=4 contradicts stage_to_rank_"),
        (TORCH, {"stages": 1}, r"batch_size is not given, .*: give Varuna\(..., batch_size=B\)"),
        (TORCH, {"stages": 2, "batch_size": 8}, r"chunk_size is not given, .*: give Varuna\(..., chunk_size=m\)"),
        (without(TORCH, "RANK"), {"stages": 2}, "WORLD_SIZE=4, but RANK is not set: give each process its own"),
        (without(TORCH, "MASTER_PORT"), {"stages": 2}, "MASTER_PORT is not set: export MASTER_ADDR, .* WORLD_SIZE=1"),
        (without(SRUN, "MASTER_ADDR"), {}, "SLURM_STEP_NUM_TASKS=4 processes .* MASTER_ADDR is not set"),
        ({**TORCH, "RANK": "4"}, {}, "RANK=4, but WORLD_SIZE=4: ranks are 0 to 3"),
        ({**TORCH, "WORLD_SIZE": "four"}, {}, "WORLD_SIZE='four' is not a whole number"),
        (TORCH, {"stages": 2, "batch_size": 0}, "batch_size=0: it must be at least 1 example"),
        ({}, {"stages": 2}, "stages=2 needs 2 processes, but this one was not started by"),
        (TORCH, {"stages": "auto"}, r"batch_size is not given, .*: give Varuna\(..., batch_size=B\)"),
        (TORCH, {"stages": "auto", "stage_to_rank_map": "0;1", "batch_size": 8}, "stages='auto' contradicts stage_to_"),
        (TORCH, {"stages": "automatic", "batch_size": 8}, "stages='automatic': give the number of pipeline stages, or"),
        ({}, {"stages": "automatic"}, "stages='automatic': give the number of pipeline stages, or 'auto'"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_told_in_one_line(
    environ: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        read_worker_environment(environ, **arguments)
    assert "\n" not in str(refused.value)


def test_the_scripts_kind_of_device_counts_where_the_launcher_gives_none() -> None:
    environment = read_worker_environment(TORCH, stages=4, batch_size=8, chunk_size=1)
    assert choose_device(environment, "cpu", -1) == torch.device("cpu")


# ---------------------------------------------------------------- how they meet


def test_ranks_of_which_one_leaves_the_shape_open_are_told() -> None:
    store = HashStore()
    check_arguments_agree(read_worker_environment({**TORCH, "RANK": "0"}, stages="auto", batch_size=8), store)
    with pytest.raises(ValueError, match="stages=1 here, but 'auto' on rank 0"):
        check_arguments_agree(read_worker_environment(TORCH, stages=1, batch_size=8), store)


def test_ranks_with_other_arguments_are_told_which() -> None:
    store = HashStore()
    first = read_worker_environment({**TORCH, "RANK": "0"}, stages=2, batch_size=8, chunk_size=2)
    other = read_worker_environment(TORCH, stages=2, batch_size=16, chunk_size=2)
    check_arguments_agree(first, store)
    with pytest.raises(ValueError, match="batch_size=16 here, but 8 on rank 0"):
        check_arguments_agree(other, store)


def test_rank_0_gives_an_address_that_other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own name resolves to loopback there, as Debian's /etc/hosts has it.
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    own = read_worker_environment({**TORCH, "RANK": "0", "WORLD_SIZE": "2"}, stages=2, batch_size=8, chunk_size=2)
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_own_address, own, store)
        store.set("address/1", "192.0.2.7")
        address = found.result()
    assert address == address_towards("192.0.2.7")
    assert not is_loopback(address)
