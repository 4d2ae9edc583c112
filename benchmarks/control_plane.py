"""What the manager bears, how fast it decides and answers, and how soon a job trains again after a VM was killed.

    python benchmarks/control_plane.py --json
    python benchmarks/control_plane.py load | decide | recovery | rest

The manager is the real process, with SQLite; agents are simulated (`load`) or real (`recovery`). Take a quiet machine:
other programs lengthen the latencies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from typing import Any

from rich.console import Console

PARTS = ("load", "decide", "recovery", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "all"), nargs="?", default="all", help="its --help lists its options")
    parser.add_argument("--json", action="store_true")
    given, rest = parser.parse_known_args()
    report: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    for part in PARTS if given.part == "all" else (given.part,):
        module = importlib.import_module(f"_control_plane_{part}")
        options = argparse.ArgumentParser(prog=f"control_plane.py {part}")
        module.add_arguments(options)
        report[part] = module.run(options.parse_args([] if given.part == "all" else rest))
        report[part]["load_1_minute"] = os.getloadavg()[0]
        if not given.json:
            Console().print(module.table(report[part]))
    if given.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
