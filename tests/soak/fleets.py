"""Plays simulated fleets, one seed after the other: `make soak-fleets SOAK="--seeds 10000"`.

The event log of a seed that fails is printed; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from disturbed_fleet import disturbed, whole_trace


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--trace", action="store_true", help="play the recorded trace with each seed instead")
    options = parser.parse_args()
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                play = whole_trace if options.trace else disturbed
                result = asyncio.run(play(Path(folder), seed))
        except Exception as error:
            failed.append(seed)
            result = f"FAILED: {type(error).__name__}: {error}"
        print(f"seed {seed}: {result} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{options.seeds} fleets, failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
