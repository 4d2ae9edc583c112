"""How long messages between two ranks take over 1, 2 and 4 connections.

    python benchmarks/links.py [--flow-mbit 1000 --link-mbit 8000] [--rounds 15] [--json]

Two processes pass messages by the transport of training: a message goes one way, and an empty one comes back. All
numbers of connections take turns in the same processes. `loopback`: on the machine's loopback. `limited`: over a cable
between two network namespaces on which each connection is limited, as clouds do it (needs root). A figure is the median
of the rounds, a ratio the median of the rounds' ratios to one connection: below 1, several are faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch
from _links_network import FlowLimitedNetwork, list_ports
from _pipeline_network import Loopback, find_free_port
from _pipeline_world import NamespaceNetwork, make_environment
from _text_tables import render_table

from varuna.distributed.departure import Departure
from varuna.distributed.link_connections import make_connection
from varuna.distributed.rendezvous import Rendezvous
from varuna.pipeline.transport import LinkReceiver, LinkSender, MessageTensor

COUNTS = (1, 2, 4)
SIZES = (512 << 10, 1 << 20, 4 << 20, 16 << 20)
RANKS = (0, 1)

Times = dict[tuple[int, int], float]
"""Seconds of a message and its answer, by bytes and connections."""


class RankLinks:
    """One rank's end: for each number of connections one link each way."""

    def __init__(self, rank: int, host: str, port: int, secret: str) -> None:
        self._departure = Departure()
        rendezvous = Rendezvous(make_environment(rank, len(RANKS), port, host, secret), self._departure)
        self._receivers: dict[int, LinkReceiver] = {}
        self._senders: dict[int, LinkSender] = {}
        peer = 1 - rank
        for count in COUNTS:
            for sender in RANKS:
                names = [f"{sender}/{count}/{number}" for number in range(count)]
                connection = make_connection([rendezvous.connect_gloo(name, RANKS) for name in names], peer)
                if rank == sender:
                    self._senders[count] = LinkSender(connection, peer=peer, departure=self._departure)
                else:
                    receiver = LinkReceiver(connection, peer=peer, pinned=False, departure=self._departure)
                    self._receivers[count] = receiver

    def send_and_wait(self, message: torch.Tensor, count: int) -> float:
        """Seconds until the answer is there."""
        number = self._post_receive(count, 0)
        began_s = time.perf_counter()
        self._senders[count].send_message([message])
        self._take_message(count, number)
        return time.perf_counter() - began_s

    def answer_message(self, size: int, count: int) -> None:
        self._take_message(count, self._post_receive(count, size))
        self._senders[count].send_message([torch.empty(0, dtype=torch.uint8)])

    def _post_receive(self, count: int, size: int) -> int:
        receiver = self._receivers[count]
        receiver.post_receive([MessageTensor((size,), torch.uint8)])
        return receiver.arrived

    def _take_message(self, count: int, number: int) -> None:
        receiver = self._receivers[count]
        self._departure.wait_until(lambda: receiver.arrived > number)
        receiver.take_message(number, torch.device("cpu"))


def list_turns(rounds: int) -> list[list[tuple[int, int]]]:
    """By round: sizes and numbers of connections, each number first as often as the others."""
    shifted = [COUNTS[shift:] + COUNTS[:shift] for shift in range(len(COUNTS))]
    return [[(size, count) for size in SIZES for count in shifted[number % len(COUNTS)]] for number in range(rounds)]


def run_rank(pipe: Pipe, network: NamespaceNetwork, rank: int, port: int, secret: str, rounds: int) -> None:
    """In a process of its own: tells its ports, waits until they are limited, and sends or answers."""
    network.enter(rank)
    torch.set_num_threads(1)
    links = RankLinks(rank, network.rendezvous_host, port, secret)
    pipe.send(list_ports())
    pipe.recv()
    messages = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES}
    measured: list[Times] = []
    for turns in list_turns(rounds + 1):
        times: Times = {}
        for size, count in turns:
            if rank == 0:
                times[size, count] = links.send_and_wait(messages[size], count)
            else:
                links.answer_message(size, count)
        measured.append(times)
    pipe.send(measured[1:])  # the first round warms up
    pipe.recv()


def measure(network: NamespaceNetwork, rounds: int) -> list[Times]:
    """By round."""
    context = multiprocessing.get_context("spawn")
    port, secret = find_free_port(), secrets.token_hex()
    pipes, processes = [], []
    for rank in RANKS:
        here, there = context.Pipe()
        process = context.Process(target=run_rank, args=(there, network, rank, port, secret, rounds), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    flows = [pipe.recv() for pipe in pipes]
    if isinstance(network, FlowLimitedNetwork):
        for rank in RANKS:
            network.limit_flows(rank, flows[rank])
    for pipe in pipes:
        pipe.send(None)
    measured: list[Times] = pipes[0].recv()
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return measured


def summarise(measured: Sequence[Times]) -> list[dict[str, Any]]:
    rows = []
    for size in SIZES:
        for count in COUNTS:
            ratios = [times[size, count] / times[size, 1] for times in measured]
            seconds = statistics.median(times[size, count] for times in measured)
            rows.append(
                {
                    "bytes": size,
                    "connections": count,
                    "ms": 1e3 * seconds,
                    "gb_per_s": size / seconds / 1e9,
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                }
            )
    return rows


def render_report(report: Mapping[str, Any]) -> str:
    parts = []
    for name, rows in report["networks"].items():
        cells = [["KiB", "connections", "ms", "GB/s", "ratio", "quartiles"]]
        for row in rows:
            low, high = row["ratio_quartiles"]
            figures = [f"{row['ms']:.2f}", f"{row['gb_per_s']:.3f}", f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
            cells.append([str(row["bytes"] >> 10), str(row["connections"]), *figures])
        parts.append(f"{name}\n{render_table(cells, words=5)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow-mbit", type=float, default=1000.0, help="what one connection carries")
    parser.add_argument("--link-mbit", type=float, default=8000.0, help="what the cable carries")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    networks = {"loopback": summarise(measure(Loopback(), given.rounds))}
    if os.geteuid() == 0:
        with FlowLimitedNetwork(given.flow_mbit, given.link_mbit) as network:
            limited = f"limited to {given.flow_mbit:g} of {given.link_mbit:g} Mbit/s"
            networks[limited] = summarise(measure(network, given.rounds))
    report = {"networks": networks, "rounds": given.rounds, "torch": torch.__version__, "cores": os.cpu_count()}
    print(json.dumps(report, indent=2) if given.json else render_report(report))


if __name__ == "__main__":
    main()
