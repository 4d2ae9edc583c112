"""How close Varuna's pipeline comes to its simulation and to the lower bound, and how it compares with its peers.

    python benchmarks/pipeline.py --suite --json pipeline.json                   # all targets; slow links need root
    python benchmarks/pipeline.py --stages 4 --micro-batches 32 --jitter-ms 10
    python benchmarks/pipeline.py --stages 4 --micro-batches 32 --link-mbit 400  # needs root

Stages sleep instead of computing; the engine, the transport and the processes are real. All systems take turns in the
same processes, so that other load on the machine affects them all. Peers have no recompute, so their backwards contain
it. The planner's simulator draws random delays of messages and times of ops, new ones for each round. In a round they
are the same for every system and for the simulation. The simulator gets the time of a message on the bare link,
measured at the start, as it does from calibration. Ratios are of means.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _pipeline_network import Loopback, ShapedNetwork
from _pipeline_report import LinkCondition, ReportRow, judge, print_rows, print_verdicts
from _pipeline_systems import PEERS, delay_peers, make_ours, make_peer
from _pipeline_world import Conditions, DelayedRendezvous, NamespaceNetwork, message_us, run_ranks
from torch._C._distributed_c10d import PrefixStore

from varuna.assembly.connections import LinkConnector, start_links
from varuna.diagnostics.timeline import Timeline
from varuna.distributed.departure import Departure
from varuna.distributed.groups import RankGroup
from varuna.distributed.topology import Topology
from varuna.pipeline.stage_setting import StagePosition
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.schedule.policies import Policy, most_in_flight
from varuna_planner.simulator.simulation import Jitter, MinibatchTimes, lower_bound, simulate, uniform

_START_AFTER_S = 0.005
"""Every rank knows the start of a mini-batch this long before it comes."""

_PEER_POLICIES = {"torch-gpipe": Policy.GPIPE, "torch-1f1b": Policy.ONE_F_ONE_B}
_OURS = [policy.value for policy in Policy if policy.executable]
_SUITE_SYSTEMS = ["work-conserving", *PEERS]


@dataclass(frozen=True, kw_only=True)
class BenchmarkSetting:
    """The settings of a run that hold for all its shapes and conditions."""

    systems: tuple[str, ...]
    forward_ms: float
    recompute_ms: float
    backward_ms: float
    activation_bytes: int
    rounds: int
    seed: int


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    systems = arguments.systems or (_SUITE_SYSTEMS if arguments.suite else [*_OURS, *PEERS])
    setting = BenchmarkSetting(
        systems=tuple(systems),
        forward_ms=arguments.forward_ms,
        recompute_ms=arguments.recompute_ms,
        backward_ms=arguments.backward_ms,
        activation_bytes=arguments.activation_kib * 1024,
        rounds=arguments.rounds,
        seed=arguments.seed,
    )
    conditions = _suite(setting) if arguments.suite else [_condition(arguments)]
    if os.geteuid() != 0 and any(condition.link_mbit for condition in conditions):
        sys.exit("slow links need network namespaces, which need root: run as root, or without --suite and --link-mbit")
    print(
        f"F {setting.forward_ms:g} ms, R {setting.recompute_ms:g} ms, B {setting.backward_ms:g} ms, "
        f"{setting.activation_bytes // 1024} KiB, {setting.rounds} rounds"
    )
    rows: list[ReportRow] = []
    for condition in conditions:
        here = [row for p in arguments.stages for row in _measure(p, arguments.micro_batches, condition, setting)]
        print_rows(condition, here)
        rows += here
    verdicts = judge(rows, conditions)
    if arguments.suite:
        print_verdicts(verdicts)
    if arguments.json:
        found = {
            "environment": _environment(),
            "setting": asdict(setting),
            "conditions": [asdict(condition) for condition in conditions],
            "rows": [asdict(row) for row in rows],
            "targets": [asdict(verdict) for verdict in verdicts],
        }
        arguments.json.write_text(json.dumps(found, indent=1))


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
    parser.add_argument("--suite", action="store_true", help="judge all targets: plain, jittery and slow links")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], metavar="P")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32], metavar="N")
    parser.add_argument("--systems", nargs="+", choices=[*_OURS, *PEERS], help="default: all; with --suite, the judged")
    parser.add_argument("--rounds", type=int, default=3, help="measured mini-batches of each system")
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--recompute-ms", type=float, default=10.0)
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument("--activation-kib", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same figures there")
    own = parser.add_argument_group("the condition, without --suite")
    own.add_argument("--run-ahead", type=float, default=1.0, help="k of varuna and work-conserving, in multiples of P")
    own.add_argument("--latency-ms", type=float, default=0.0, help="delay of every message")
    own.add_argument("--jitter-ms", type=float, default=0.0, help="mean of an exponential delay on top of it")
    own.add_argument("--compute-noise", type=float, default=0.0, help="relative standard deviation of ops' times")
    own.add_argument("--link-mbit", type=float, default=0.0, help="rate of every link (tbf); needs root")
    return parser


def _condition(arguments: argparse.Namespace) -> LinkCondition:
    return LinkCondition(
        name="as asked for",
        link_mbit=arguments.link_mbit,
        latency_ms=arguments.latency_ms,
        jitter_ms=arguments.jitter_ms,
        compute_noise=arguments.compute_noise,
        run_ahead=arguments.run_ahead,
    )


def _suite(setting: BenchmarkSetting) -> list[LinkCondition]:
    """Plain links; jitter as in ANCHORS, "Schedules", with k = P and 2P; links on which a message takes F / 2."""
    half_ms = setting.forward_ms / 2
    jitter = LinkCondition(name="jitter", latency_ms=half_ms, jitter_ms=half_ms, compute_noise=0.05)
    return [
        LinkCondition(name="plain"),
        jitter,
        replace(jitter, name="jitter, k = 2P", run_ahead=2.0),
        LinkCondition(name="slow", link_mbit=round(setting.activation_bytes * 8e-3 / half_ms, 1)),
    ]


def _measure(
    p: int, micro_batches: Sequence[int], condition: LinkCondition, setting: BenchmarkSetting
) -> list[ReportRow]:
    shapes = [n for n in micro_batches if n >= p]  # torch's 1F1B wants no fewer micro-batches than stages
    with ExitStack() as stack:
        network: NamespaceNetwork = Loopback()
        if condition.link_mbit:
            network = stack.enter_context(ShapedNetwork(p, condition.link_mbit))
        ranks = run_ranks(
            p,
            network,
            lambda rank, meeting, departure: _rank_main(
                rank, meeting, departure, p=p, shapes=shapes, condition=condition, setting=setting
            ),
        )
    rows: list[ReportRow] = []
    for n in shapes:
        rounds_ms = {
            system: tuple(
                max(rank["rounds"][str(n)][system][number] for rank in ranks) for number in range(setting.rounds)
            )
            for system in setting.systems
        }
        rows += _rows(
            p, n, rounds_ms=rounds_ms, message_us=ranks[0]["message_us"], condition=condition, setting=setting
        )
    return rows


def _rank_main(
    rank: int,
    rendezvous: DelayedRendezvous,
    departure: Departure,
    *,
    p: int,
    shapes: Sequence[int],
    condition: LinkCondition,
    setting: BenchmarkSetting,
) -> dict[str, Any]:
    """ "rounds": [N][system] -> this rank's end of each measured mini-batch, in milliseconds after its start;
    "message_us": the time of a message, from rank 0 alone."""
    conditions = Conditions(rank, condition.latency_ms * 1e3)
    delayed = bool(condition.latency_ms or condition.jitter_ms)
    rendezvous.delays = conditions if delayed else None
    topology, device = Topology(p, 1, rank), torch.device("cpu")
    connections = LinkConnector(rendezvous=rendezvous, device=device).connect_links(topology)
    links = start_links(connections, topology, device, departure=departure, timeline=Timeline())
    everyone = rendezvous.make_group("everyone", range(p))
    size = setting.activation_bytes
    taken_us = message_us(rendezvous.connect_gloo("probe", (0, 1)), rank == 0, size) if rank < 2 else 0.0
    dist.init_process_group("gloo", store=PrefixStore("peers", rendezvous.store), rank=rank, world_size=p)
    if delayed:
        delay_peers(conditions, rank)
    results: dict[str, dict[str, list[float]]] = {}
    for n in shapes:
        k = round(condition.run_ahead * p)
        runs: dict[str, Callable[[], Any]] = {
            system: make_peer(system, conditions=conditions, activation_bytes=size, stage=rank, p=p, n=n)
            if system in PEERS
            else make_ours(
                StagePosition(stage=rank, p=p, policy=Policy(system), run_ahead=k, recompute=rank < p - 1),
                n,
                conditions=conditions,
                activation_bytes=size,
                links=links,
                departure=departure,
            )
            for system in setting.systems
        }
        taken: dict[str, list[float]] = {system: [] for system in setting.systems}
        for number in range(-1, setting.rounds):
            course = _course(_pipeline(p, n, condition, setting), condition, setting, number)
            for system, run in runs.items():
                conditions.begin(course)
                elapsed_ms = _timed(run, everyone)
                if number >= 0:  # the first warms up
                    taken[system].append(elapsed_ms)
        results[str(n)] = taken
    everyone.all_reduce([torch.zeros(1)])
    return {"rounds": results, "message_us": taken_us}


def _timed(run: Callable[[], Any], everyone: RankGroup) -> float:
    """Runs from a moment that is the same on all ranks; they share a machine and so a clock."""
    everyone.all_reduce([torch.zeros(1)])
    start = torch.tensor([time.perf_counter() + _START_AFTER_S], dtype=torch.float64)
    everyone.broadcast_tensors([start])
    start_s = float(start)
    time.sleep(max(0.0, start_s - time.perf_counter()))
    run()
    return (time.perf_counter() - start_s) * 1e3


def _pipeline(p: int, n: int, condition: LinkCondition, setting: BenchmarkSetting) -> Pipeline:
    pipeline = uniform(
        p,
        n,
        forward_us=setting.forward_ms * 1e3,
        recompute_us=setting.recompute_ms * 1e3,
        backward_us=setting.backward_ms * 1e3,
        latency_us=condition.latency_ms * 1e3,
    )
    transfer_us = setting.activation_bytes * 8 / condition.link_mbit if condition.link_mbit else 0.0
    pipeline.activation_transfer_us[:] = transfer_us
    pipeline.gradient_transfer_us[:] = transfer_us
    return pipeline


def _course(pipeline: Pipeline, condition: LinkCondition, setting: BenchmarkSetting, number: int) -> MinibatchTimes:
    """The times of ops and messages in one round."""
    seed = setting.seed * 1000 + number + 1
    return Jitter(latency_us=condition.jitter_ms * 1e3, compute=condition.compute_noise, seed=seed).draw_times(pipeline)


def _simulated_us(pipeline: Pipeline, course: MinibatchTimes, system: str, run_ahead: int) -> float:
    if system not in PEERS:
        return simulate(pipeline, Policy(system), run_ahead=run_ahead, jitter=course).makespan_us
    # The peers' recompute is part of their backwards.
    action_us = course.action_us.copy()
    action_us[2] += np.where(pipeline.recompute[:, None], action_us[1], 0.0)
    whole = replace(
        pipeline,
        backward_us=pipeline.backward_us + np.where(pipeline.recompute, pipeline.recompute_us, 0.0),
        recompute=np.zeros_like(pipeline.recompute),
    )
    return simulate(whole, _PEER_POLICIES[system], jitter=replace(course, action_us=action_us)).makespan_us


def _rows(
    p: int,
    n: int,
    *,
    rounds_ms: dict[str, tuple[float, ...]],
    message_us: float,
    condition: LinkCondition,
    setting: BenchmarkSetting,
) -> list[ReportRow]:
    pipeline = _pipeline(p, n, condition, setting)
    # The time of a message beyond the rate of its link: through gloo and the kernel.
    beyond_us = max(0.0, message_us - float(pipeline.activation_transfer_us[0, 0]))
    as_found = replace(pipeline, latency_us=pipeline.latency_us + beyond_us)
    courses = [_course(pipeline, condition, setting, number) for number in range(setting.rounds)]
    bound_ms = lower_bound(pipeline) / 1e3
    means = {system: statistics.fmean(rounds) for system, rounds in rounds_ms.items()}
    k = round(condition.run_ahead * p)
    rows = []
    for system, rounds in rounds_ms.items():
        policy = _PEER_POLICIES.get(system) or Policy(system)
        simulated_ms = statistics.fmean(_simulated_us(as_found, course, system, k) for course in courses) / 1e3
        rows.append(
            ReportRow(
                condition=condition.name,
                link_mbit=condition.link_mbit,
                latency_ms=condition.latency_ms,
                jitter_ms=condition.jitter_ms,
                compute_noise=condition.compute_noise,
                p=p,
                n=n,
                system=system,
                run_ahead=k if policy in (Policy.VARUNA, Policy.WORK_CONSERVING) else None,
                stash=max(most_in_flight(policy.code, stage, p, n, k) for stage in range(p)),
                mean_ms=means[system],
                best_ms=min(rounds),
                rounds_ms=rounds,
                message_ms=message_us / 1e3,
                simulated_ms=simulated_ms,
                lower_bound_ms=bound_ms,
                to_simulated=means[system] / simulated_ms,
                to_lower_bound=means[system] / bound_ms,
                to_torch_1f1b=means[system] / means["torch-1f1b"] if "torch-1f1b" in means else None,
                to_torch_gpipe=means[system] / means["torch-gpipe"] if "torch-gpipe" in means else None,
            )
        )
    return rows


if __name__ == "__main__":
    main()
