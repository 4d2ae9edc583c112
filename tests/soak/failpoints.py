"""SIGKILL of the manager or of an agent at each failpoint of a morph, in turns, each in several morphs of one job.

make soak-failpoints                      # each once: some 3 minutes
make soak-failpoints SOAK="--rounds 20"

At the end every step is on record once, no two generations have overlapped, and no worker is left over.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from failpoint_world import failpoint_world
from scripted_manager import profile_json

MANAGER = (
    "manager.StopGeneration.decided",
    "manager.StopGeneration.committed",
    "manager.EndGeneration.decided",
    "manager.EndGeneration.committed",
    "manager.StartGeneration.decided",
    "manager.StartGeneration.committed",
    "manager.LaunchKey.sent",
    "manager.reports.stored",
)
AGENT = (
    "agent.stop.received",
    "agent.launch.received",
    "agent.StartWorker.before",
    "agent.worker_started.sent",
    "agent.worker_exited.sent",
    "agent.worker.connected",
    "agent.worker.ended",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often each failpoint fires")
    options = parser.parse_args()
    for kind, names in (("the manager", MANAGER), ("an agent", AGENT)):
        with tempfile.TemporaryDirectory() as folder, failpoint_world(Path(folder), profile_json()) as world:
            world.submit()
            for number in range(options.rounds):
                for name in names:
                    began = time.monotonic()
                    world.provoke_morph(name)
                    took_s = time.monotonic() - began
                    print(f"round {number + 1}: {kind} killed at {name}, trains again {took_s:.1f} s later", flush=True)
            world.finish()
        print(f"{kind}: every step is on record once, and nothing is left over", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
