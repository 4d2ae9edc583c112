"""How close Varuna's pipeline comes to its simulation and to the lower bound, and how it compares with its peers.

    python benchmarks/pipeline.py --json pipeline.json
    python benchmarks/pipeline.py --stages 4 --micro-batches 32 --jitter-ms 10
    python benchmarks/pipeline.py --stages 4 --micro-batches 32 --link-mbit 400   # needs root

Stages sleep instead of computing; the engine, the transport and the processes are real. All systems take turns in the
same processes, so that whatever else the machine does meets them all. Peers have no recompute, so their backwards are
longer by it. With --jitter-ms every message is late by an exponential delay, the same numbers for all systems; the
simulated time is then a mean over seeds. The columns after the times are ratios of means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _pipeline_network import Loopback, ShapedNetwork
from _pipeline_systems import PEERS, delay_peers, make_ours, make_peer
from _pipeline_world import DelayedRendezvous, Delays, Network, StageTimes, run_ranks
from torch._C._distributed_c10d import PrefixStore

from varuna.departure import Departure
from varuna.launch import Group
from varuna.topology import Topology, connect_links
from varuna_planner.schedule import Policy, most_in_flight
from varuna_planner.simulator import Jitter, Pipeline, lower_bound, simulate, uniform

_START_AFTER_S = 0.005
"""Every rank knows the start of a mini-batch this long before it comes."""

_SIMULATED_SEEDS = 30


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all shapes of a run."""

    times: StageTimes
    rounds: int
    jitter_ms: float
    link_mbit: float
    run_ahead: int | None
    seed: int

    def run_ahead_for(self, p: int) -> int:
        return p if self.run_ahead is None else self.run_ahead


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system in one shape."""

    p: int
    n: int
    system: str
    stash: int
    """The most micro-batches in flight on any stage."""
    mean_ms: float
    best_ms: float
    rounds_ms: tuple[float, ...]
    simulated_ms: float | None
    lower_bound_ms: float
    to_simulated: float | None
    to_lower_bound: float
    to_torch_1f1b: float | None
    to_torch_gpipe: float | None


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    setting = Setting(
        times=StageTimes(
            forward_ms=arguments.forward_ms,
            recompute_ms=arguments.recompute_ms,
            backward_ms=arguments.backward_ms,
            activation_bytes=arguments.activation_kib * 1024,
        ),
        rounds=arguments.rounds,
        jitter_ms=arguments.jitter_ms,
        link_mbit=arguments.link_mbit,
        run_ahead=arguments.run_ahead,
        seed=arguments.seed,
    )
    rows: list[Row] = []
    for p in arguments.stages:
        shapes = [n for n in arguments.micro_batches if n >= p]  # torch's 1F1B wants no fewer micro-batches than stages
        measured = _measure(p, shapes, arguments.systems, setting)
        for n in shapes:
            rows += _rows(p, n, measured[n], setting)
    _print_table(rows, setting)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"environment": _environment(), "setting": asdict(setting), "rows": [asdict(row) for row in rows]},
                indent=1,
            )
        )


def _environment() -> dict[str, str | float | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_1_minute": os.getloadavg()[0],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    systems = [*(policy.value for policy in Policy), *PEERS]
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], metavar="P")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32], metavar="N")
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--rounds", type=int, default=3, help="measured mini-batches of each system")
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--recompute-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument("--activation-kib", type=int, default=256)
    parser.add_argument("--run-ahead", type=int, help="k of varuna and work-conserving; default P")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="mean of an exponential delay of every message")
    parser.add_argument("--link-mbit", type=float, default=0.0, help="rate of every link (tbf); needs root")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same figures there")
    return parser


def _measure(
    p: int, shapes: Sequence[int], systems: Sequence[str], setting: Setting
) -> dict[int, dict[str, list[float]]]:
    """[N][system] -> milliseconds of each round."""
    with ExitStack() as stack:
        network: Network = Loopback()
        if setting.link_mbit:
            network = stack.enter_context(ShapedNetwork(p, setting.link_mbit))
        ranks = run_ranks(
            p,
            network,
            lambda rank, meeting, departure: _rank_main(rank, meeting, departure, p, shapes, systems, setting),
        )
    return {
        n: {
            system: [max(rank[str(n)][system][number] for rank in ranks) for number in range(setting.rounds)]
            for system in systems
        }
        for n in shapes
    }


def _rank_main(
    rank: int,
    rendezvous: DelayedRendezvous,
    departure: Departure,
    p: int,
    shapes: Sequence[int],
    systems: Sequence[str],
    setting: Setting,
) -> dict[str, dict[str, list[float]]]:
    """This rank's end of each mini-batch, in milliseconds after its start."""
    delays = Delays(setting.jitter_ms, setting.seed) if setting.jitter_ms else None
    rendezvous.delays = delays
    links = connect_links(Topology(p, 1, rank), rendezvous, torch.device("cpu"), departure)
    everyone = rendezvous.group("everyone", range(p))
    dist.init_process_group("gloo", store=PrefixStore("peers", rendezvous.store), rank=rank, world_size=p)
    if delays is not None:
        delay_peers(delays, rank)
    results: dict[str, dict[str, list[float]]] = {}
    for n in shapes:
        runs: dict[str, Callable[[], Any]] = {
            system: make_peer(system, setting.times, rank, p, n)
            if system in PEERS
            else make_ours(Policy(system), setting.times, rank, p, n, setting.run_ahead_for(p), links, departure)
            for system in systems
        }
        taken: dict[str, list[float]] = {system: [] for system in systems}
        for number in range(setting.rounds + 1):
            for system, run in runs.items():
                if delays is not None:
                    delays.begin(f"{n}/{number}")
                elapsed_ms = _timed(run, everyone)
                if number:  # the first warms up
                    taken[system].append(elapsed_ms)
        results[str(n)] = taken
    everyone.all_reduce([torch.zeros(1)])
    return results


def _timed(run: Callable[[], Any], everyone: Group) -> float:
    """Runs from a moment that is the same on all ranks; they share a machine and so a clock."""
    everyone.all_reduce([torch.zeros(1)])
    start = torch.tensor([time.perf_counter() + _START_AFTER_S], dtype=torch.float64)
    everyone.broadcast([start])
    start_s = float(start)
    time.sleep(max(0.0, start_s - time.perf_counter()))
    run()
    return (time.perf_counter() - start_s) * 1e3


def _pipeline(p: int, n: int, setting: Setting) -> Pipeline:
    times = setting.times
    transfer_us = times.activation_bytes * 8 / setting.link_mbit if setting.link_mbit else 0.0
    pipeline = uniform(
        p,
        n,
        forward_us=times.forward_ms * 1e3,
        recompute_us=times.recompute_ms * 1e3,
        backward_us=times.backward_ms * 1e3,
    )
    pipeline.activation_transfer_us[:] = transfer_us
    pipeline.gradient_transfer_us[:] = transfer_us
    return pipeline


def _simulated_ms(pipeline: Pipeline, policy: Policy, run_ahead: int, jitter_ms: float) -> float:
    seeds = range(_SIMULATED_SEEDS if jitter_ms else 1)
    runs = [
        simulate(pipeline, policy, run_ahead=run_ahead, jitter=Jitter(latency_us=jitter_ms * 1e3, seed=seed))
        for seed in seeds
    ]
    return float(np.mean([run.makespan_us for run in runs])) / 1e3


def _rows(p: int, n: int, measured: dict[str, list[float]], setting: Setting) -> list[Row]:
    pipeline = _pipeline(p, n, setting)
    bound_ms = lower_bound(pipeline) / 1e3
    means = {system: statistics.fmean(rounds) for system, rounds in measured.items()}

    def ratio(system: str, to: str) -> float | None:
        return means[system] / means[to] if to in means else None

    rows = []
    for system, rounds in measured.items():
        policy = {"torch-gpipe": Policy.GPIPE, "torch-1f1b": Policy.ONE_F_ONE_B}.get(system) or Policy(system)
        run_ahead = setting.run_ahead_for(p)
        simulated_ms = None if system in PEERS else _simulated_ms(pipeline, policy, run_ahead, setting.jitter_ms)
        rows.append(
            Row(
                p=p,
                n=n,
                system=system,
                stash=max(most_in_flight(policy.code, stage, p, n, run_ahead) for stage in range(p)),
                mean_ms=means[system],
                best_ms=min(rounds),
                rounds_ms=tuple(rounds),
                simulated_ms=simulated_ms,
                lower_bound_ms=bound_ms,
                to_simulated=None if simulated_ms is None else means[system] / simulated_ms,
                to_lower_bound=means[system] / bound_ms,
                to_torch_1f1b=ratio(system, "torch-1f1b"),
                to_torch_gpipe=ratio(system, "torch-gpipe"),
            )
        )
    return rows


def _print_table(rows: Sequence[Row], setting: Setting) -> None:
    times = setting.times
    print(
        f"F {times.forward_ms:g} ms, R {times.recompute_ms:g} ms, B {times.backward_ms:g} ms, "
        f"{times.activation_bytes // 1024} KiB, jitter {setting.jitter_ms:g} ms, "
        f"links {f'{setting.link_mbit:g} Mbit/s' if setting.link_mbit else 'not shaped'}, {setting.rounds} rounds"
    )
    print(
        f"{'P':>2} {'N':>3} {'system':<16} {'stash':>5} {'mean ms':>9} {'best ms':>9} {'sim. ms':>9} {'bound ms':>9} "
        f"{'/sim.':>6} {'/bound':>6} {'/1F1B':>6} {'/GPipe':>6}"
    )
    for row in rows:
        print(
            f"{row.p:>2} {row.n:>3} {row.system:<16} {row.stash:>5} {row.mean_ms:>9.1f} {row.best_ms:>9.1f} "
            f"{_figure(row.simulated_ms, 9, 1)} {row.lower_bound_ms:>9.1f} {_figure(row.to_simulated, 6, 3)} "
            f"{row.to_lower_bound:>6.3f} {_figure(row.to_torch_1f1b, 6, 3)} {_figure(row.to_torch_gpipe, 6, 3)}"
        )
    sys.stdout.flush()


def _figure(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


if __name__ == "__main__":
    main()
