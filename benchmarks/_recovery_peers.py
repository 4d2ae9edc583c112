"""Workers of torchrun and torchft that train the model of `recovery.py`, and the loss of one amid a step."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _recovery_figures import find_gap, find_idle, median_step_s, parse_activity, parse_record
from _recovery_trial import IDLE_STEPS, ModelSize, TrialOptions, wait_for

from varuna_client.demo.processes import DemoProcesses

__all__ = ["PEERS", "Peer", "run_peer_trial"]

_SCRIPT = Path(__file__).with_name("_recovery_peer_training.py")
_LIGHTHOUSE = """
import sys, time, torchft.coordination as coordination
server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=int(sys.argv[1]))
open(sys.argv[2] + ".part", "w").write(server.address())
__import__("os").rename(sys.argv[2] + ".part", sys.argv[2])
time.sleep(1e9)
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How a peer's workers are started, and what is killed."""

    name: str
    start: Callable[[DemoProcesses, Path, ModelSize, int], list[int]]
    """Starts workers with a folder for their records. Returns the processes at the top, the victim last."""
    kills_launcher: bool
    """Whether the last process at the top is killed with all that it has started, as with a VM; otherwise only the
    worker with the highest rank."""


def run_peer_trial(peer: Peer, size: ModelSize, options: TrialOptions) -> dict[str, Any]:
    """The figures of one loss, by the names that Varuna's trials have."""
    with tempfile.TemporaryDirectory(prefix="varuna-peers-") as name, DemoProcesses(Path(name)) as processes:
        folder = Path(name)
        record = folder / "record"
        tops = peer.start(processes, folder, size, options.vms)
        survivors = tops[:-1] if peer.kills_launcher else tops

        def read() -> list[Any]:
            if not all(map(_lives, survivors)):
                raise RuntimeError(f"{peer.name} has ended: {_read_logs(folder)}")
            return parse_record(record.read_text()) if record.exists() else []

        def has_step(step: int, since: float = 0.0) -> bool:
            return any(line.step >= step and line.at > since for line in read())

        wait_for(lambda: has_step(options.steps_before), f"step {options.steps_before} of {peer.name}")
        newest = read()[-1].step
        wait_for(lambda: has_step(newest + 1), "the next step", poll_s=0.002)
        lines = read()
        before_s = median_step_s(lines)
        began = next(line.at for line in lines if line.step == newest + 1)
        victims = _list_victims(tops, peer.kills_launcher)
        time.sleep(max(0.0, began + before_s * options.kill_at - time.time()))
        killed_at = time.time()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        last = max(line.step for line in read())
        wait_for(lambda: has_step(last + 1 + options.steps_after, killed_at), f"{peer.name}'s steps after the kill")
        lines, waits = read(), parse_activity((folder / "activity").read_text())
        discarded = folder / "discarded"
        lost = parse_record(discarded.read_text()) if discarded.exists() else []
        processes.end_all()
    gap = find_gap(lines, killed_at, last + 1)
    after_s = median_step_s([line for line in lines if line.at > killed_at and line.step >= gap.next_step])
    return {
        "kill_at": options.kill_at,
        "gap_s": gap.seconds,
        "pause_s": gap.seconds - after_s,
        "idle_s": find_idle(waits, killed_at, gap.ended_at),
        "idle_before_s": find_idle(waits, killed_at - IDLE_STEPS * before_s, killed_at),
        "steps_redone": gap.steps_redone,
        "steps_discarded": len({line.step for line in lost if line.at > killed_at}),
        "cost_s": gap.seconds + gap.steps_redone * before_s,
        "step_before_s": before_s,
        "step_after_s": after_s,
        "shape_before": f"1×{options.vms}",
    }


def _list_victims(tops: Sequence[int], kills_launcher: bool) -> list[psutil.Process]:
    top = psutil.Process(tops[-1])
    children = top.children(recursive=True)
    if kills_launcher:
        return [top, *children]
    ranks = {int(child.environ().get("RANK", -1)): child for child in children}
    return [ranks[max(ranks)]]


def _read_logs(folder: Path) -> str:
    return " ".join(log.read_text()[-600:] for log in sorted(folder.glob("*.log")))


def _make_arguments(peer: str, folder: Path, size: ModelSize) -> list[str]:
    sizes = {"width": size.width, "layers": size.layers, "example-ms": size.example_ms}
    sizes |= {"global-batch": size.global_batch, "micro-batch": size.micro_batch}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    return [str(_SCRIPT), "--peer", peer, "--folder", str(folder), *flags]


# Otherwise torch 2.13's restarted ranks find the addresses of the killed one in the agent's store and wait for it.
_TORCHRUN_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
_TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts=3"]


def _start_torchrun(processes: DemoProcesses, folder: Path, size: ModelSize, workers: int) -> list[int]:
    """One launcher for all workers. It starts a worker in place of one that is lost."""
    command = [*_TORCHRUN, "--standalone", f"--nproc-per-node={workers}", *_make_arguments("torchrun", folder, size)]
    return [processes.start(command, folder / "torchrun.log", _TORCHRUN_ENVIRONMENT).pid]


def _start_elastic_torchrun(processes: DemoProcesses, folder: Path, size: ModelSize, workers: int) -> list[int]:
    """A launcher for each worker, as on VMs. The others go on without a lost one. The first has the rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*_TORCHRUN, f"--nnodes=1:{workers}", "--nproc-per-node=1", "--rdzv-id=recovery"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    arguments = _make_arguments("torchrun", folder, size)
    tops = []
    for number in range(workers):
        # Otherwise any launcher on this machine may become the host, the lost one too.
        is_host = f"--rdzv-conf=is_host={str(number == 0).lower()}"
        log = folder / f"torchrun{number}.log"
        tops.append(processes.start([*command, is_host, *arguments], log, _TORCHRUN_ENVIRONMENT).pid)
    return tops


def _make_torchft_start(join_timeout_ms: int) -> Callable[[DemoProcesses, Path, ModelSize, int], list[int]]:
    def start(processes: DemoProcesses, folder: Path, size: ModelSize, workers: int) -> list[int]:
        """A lighthouse, and a replica group of one worker for each VM."""
        address = folder / "lighthouse"
        lighthouse = processes.start(
            ["-c", _LIGHTHOUSE, str(join_timeout_ms), str(address)], folder / "lighthouse.log"
        ).pid
        wait_for(lambda: address.exists() or not _lives(lighthouse), "torchft's lighthouse")
        if not address.exists():
            raise RuntimeError(f"torchft's lighthouse has not started: {_read_logs(folder)}")
        environment = {"TORCHFT_LIGHTHOUSE": address.read_text(), "OMP_NUM_THREADS": "1"}
        command = [*_make_arguments("torchft", folder, size), "--replicas", str(workers)]
        return [
            processes.start([*command, "--replica", str(number)], folder / f"replica{number}.log", environment).pid
            for number in range(workers)
        ]

    return start


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="torchrun", start=_start_torchrun, kills_launcher=False),
        Peer(name="torchrun VM", start=_start_elastic_torchrun, kills_launcher=True),
        Peer(name="torchft", start=_make_torchft_start(100), kills_launcher=True),
        Peer(name="torchft 10 s", start=_make_torchft_start(10_000), kills_launcher=True),
    )
}
