"""What a copy of a rank's state costs the processors, at the rank that sends it and at the one that keeps it.

    python benchmarks/copies.py --megabytes 22 200 --rounds 5 --json

An owner and a keeper, each a process, on loopback, without the pace that leaves the processors to training. `capture`
is the copy to the owner's own memory, `send` what follows there, `keep` what the keeper does, all in seconds of
processor time per GB (the least of all rounds); `seconds` is the time of a whole round by the clock. Not measured: what
a pipeline feels of it, and links.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from varuna.checkpoint import TrainingState
from varuna.copies.keeper import CopyKeeper
from varuna.copies.owner import CopyOwner
from varuna.copies.pacing import CopyPace
from varuna.distributed.handshake import MeetingKey

_HOST = "127.0.0.1"
_KEY = MeetingKey.derive_key("secret", "job", 1, host=_HOST, port=1)
_TENSORS = 24
_POLL_S = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", nargs="+", type=int, default=[22, 200], help="of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report = [measure_rounds(size, given.rounds) for size in given.megabytes]
    if given.json:
        print(json.dumps(report, indent=2))
        return
    for row in report:
        figures = ", ".join(f"{name} {row[name]:.3f}" for name in ("capture", "send", "keep"))
        print(f"{row['megabytes']:>6} MB: {figures} s of processor per GB; a round {row['seconds']:.3f} s")


def measure_rounds(megabytes: int, rounds: int) -> dict[str, Any]:
    CopyPace.begin_chunk = CopyPace.end_chunk = lambda self: None  # type: ignore[method-assign, assignment]
    ours, theirs = multiprocessing.Pipe()
    keeping = multiprocessing.get_context("spawn").Process(target=_keep, args=(theirs,), daemon=True)
    keeping.start()
    owner = CopyOwner(
        ours.recv(), _KEY, generation=1, rank=0, device=torch.device("cpu"), series=0, is_pipeline_sending=lambda: False
    )
    state = _make_state(megabytes)
    seen: list[dict[str, float]] = []
    for step in range(1, rounds + 2):
        kept_s, began_s, own_s = _ask(ours), time.monotonic(), time.process_time()
        owner.begin_round(step, state)
        owner.finish_capture()
        captured_s = time.process_time()
        while owner.is_sending:
            time.sleep(_POLL_S)
        row = {"seconds": time.monotonic() - began_s, "capture": captured_s - own_s}
        seen.append(row | {"send": time.process_time() - captured_s, "keep": _ask(ours) - kept_s})
    owner.shut_down()
    ours.send(None)
    keeping.join()
    costs = {name: min(row[name] for row in seen[1:]) / megabytes * 1e3 for name in ("capture", "send", "keep")}
    return {"megabytes": megabytes, **costs, "seconds": statistics.median(row["seconds"] for row in seen[1:])}


def _ask(keeper: Connection) -> float:
    """The processor time that the keeper's process has had."""
    keeper.send("time")
    return float(keeper.recv())


def _keep(connection: Connection) -> None:
    keeper = CopyKeeper([0], 1, _KEY, _HOST)
    connection.send(keeper.address)
    while connection.recv() is not None:
        connection.send(time.process_time())


def _make_state(megabytes: int) -> TrainingState:
    values = {f"w{place}": nn.Parameter(torch.rand(megabytes * 250_000 // _TENSORS)) for place in range(_TENSORS)}
    return TrainingState(sections=range(1), section_count=1, parameters=values, section_of=dict.fromkeys(values, 0))


if __name__ == "__main__":
    main()
