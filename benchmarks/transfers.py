"""How fast a new process takes over the state of others: from their memories, and through a local checkpoint store.

    python benchmarks/transfers.py [--megabytes 600] [--holders 1 2] [--rounds 5] [--folder /tmp] [--json]

All sides move the same state (values and AdamW's moments) over loopback, in turns. `holders_N`: N processes hold it, a
new one resumes from them: handshake, inventory, transfer with checksums, filling its tensors. `socket`: the same bytes
through one plain socket into fresh memory; no transfer over one connection is faster. `store`: a checkpoint is written
to `--folder` and loaded from there, which is what a restart does without holders. A figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import structlog
import torch
from checkpoint_load import make_state, save
from torch._C._distributed_c10d import PrefixStore

from varuna.checkpoint import load_checkpoint, resume_checkpoint
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous import RENDEZVOUS_TIMEOUT, store_prefix
from varuna.distributed.rendezvous_server import RendezvousServer
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna.holdings.giving import HolderSession, inventory_key
from varuna.holdings.held_state import HeldState
from varuna.holdings.inventory import make_inventory
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

HOST = "127.0.0.1"
FILE_BYTES = 32 << 20
LOOK_S = 0.01


def prepare_process() -> None:
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def make_environment(holders: int) -> WorkerEnvironment:
    """The environment of the one rank that takes the state."""
    return WorkerEnvironment(
        job_id="benchmark",
        generation=2,
        mode=Mode.TRAIN,
        rank=0,
        local_rank=0,
        world_size=2,  # so that the rendezvous store is the one made here
        rendezvous_host=HOST,
        rendezvous_port=9,
        plan=Plan(p=1, d=2, micro_batch=1, global_batch=2),
        secret=secrets.token_hex(),
        holders=tuple(range(holders)),
    )


def hold_state(parent: Connection, megabytes: int, rank: int) -> None:
    """In a process of its own: gives its state to each generation whose environment the parent sends."""
    prepare_process()
    state = make_state(megabytes)
    while (environment := parent.recv()) is not None:
        began_s = time.perf_counter()
        held = make_inventory(state, 1, generation=1, rank=rank)
        parent.send(time.perf_counter() - began_s)
        parent.send(HolderSession(held, environment).give_state().bytes)


def send_bytes(parent: Connection, megabytes: int) -> None:
    """In a process of its own: sends this many bytes to each port that the parent names."""
    data = memoryview(np.ones(megabytes << 20, dtype=np.uint8))  # type: ignore[arg-type]
    while (port := parent.recv()) is not None:
        with socket.create_connection((HOST, port)) as connection:
            connection.sendall(data)


class Process:
    """One of this program's processes, and the pipe to it."""

    def __init__(self, work: Any, *arguments: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=work, args=(there, *arguments), daemon=True)
        self._process.start()

    def end(self) -> None:
        self.pipe.send(None)
        self._process.join()


def measure_holders(holders: list[Process], megabytes: int) -> dict[str, float]:
    environment = make_environment(len(holders))
    key = MeetingKey.from_environment(environment)
    server = RendezvousServer(HOST, key)
    for holder in holders:
        holder.pipe.send(environment)
    inventory_s = [holder.pipe.recv() for holder in holders]
    store = PrefixStore(store_prefix(environment), RendezvousStore(HOST, key, RENDEZVOUS_TIMEOUT))
    state = make_state(megabytes)
    while not store.check([inventory_key(rank) for rank in range(len(holders))]):
        time.sleep(LOOK_S)
    began_s = time.perf_counter()
    memory = HeldState.from_environment(environment, store)
    loaded = resume_checkpoint("", state, store=store, memory=memory)
    seconds = time.perf_counter() - began_s
    assert loaded is not None
    assert loaded.peer_bytes == sum(holder.pipe.recv() for holder in holders)
    server.stop()
    return {"seconds": seconds, "gb_per_s": loaded.peer_bytes / seconds / 1e9, "inventory_s": max(inventory_s)}


def measure_socket(sender: Process, megabytes: int) -> dict[str, float]:
    with socket.create_server((HOST, 0)) as listener:
        sender.pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    began_s = time.perf_counter()
    left = megabytes << 20
    files: list[Any] = []
    with connection:
        while left:
            files.append(np.empty(min(FILE_BYTES, left), dtype=np.uint8))
            file = memoryview(files[-1])
            at = 0
            while at < len(file):
                received = connection.recv_into(file[at:])
                assert received, "the sender is gone"
                at += received
            left -= at
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "gb_per_s": (megabytes << 20) / seconds / 1e9}


def measure_store(megabytes: int, parent: str) -> dict[str, float]:
    folder = tempfile.mkdtemp(dir=parent)
    try:
        saved, state = make_state(megabytes), make_state(megabytes)
        began_s = time.perf_counter()
        save(folder, 1, saved)
        saved_s = time.perf_counter()
        loaded = load_checkpoint(folder, 1, state)
        done_s = time.perf_counter()
    finally:
        shutil.rmtree(folder)
    return {
        "seconds": done_s - began_s,
        "save_s": saved_s - began_s,
        "load_s": done_s - saved_s,
        "gb_per_s": loaded.bytes_read / (done_s - began_s) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=600, help="values and optimizer state together")
    parser.add_argument("--holders", type=int, nargs="+", default=[1, 2], help="numbers of processes that hold it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the local store is")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    prepare_process()
    holders = [Process(hold_state, given.megabytes, rank) for rank in range(max(given.holders))]
    sender = Process(send_bytes, given.megabytes)
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        rounds.setdefault("socket", []).append(measure_socket(sender, given.megabytes))
        for count in given.holders:
            rounds.setdefault(f"holders_{count}", []).append(measure_holders(holders[:count], given.megabytes))
        rounds.setdefault("store", []).append(measure_store(given.megabytes, given.folder))
    for process in (*holders, sender):
        process.end()
    report: dict[str, Any] = {
        side: {key: round(statistics.median(one[key] for one in measured), 3) for key in measured[0]}
        for side, measured in rounds.items()
    }
    for side in report:
        report[side]["times_faster_than_store"] = round(report["store"]["seconds"] / report[side]["seconds"], 2)
    report |= {"state_bytes": given.megabytes << 20, "rounds": given.rounds, "folder": given.folder}
    if given.json:
        print(json.dumps(report, indent=2))
        return
    for side in rounds:
        figures = ", ".join(f"{key} {value}" for key, value in report[side].items())
        print(f"{side:10} {figures}")


if __name__ == "__main__":
    main()
