"""Plays simulated fleets, one seed after the other: `make soak-fleets SOAK="--seeds 10000"`.

A seed that fails is told with its event log; `--first SEED --seeds 1` plays it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "simulation")]

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
                told = asyncio.run(play(Path(folder), seed))
        except Exception as error:
            failed.append(seed)
            told = f"FAILED: {type(error).__name__}: {error}"
        print(f"seed {seed}: {told} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{options.seeds} fleets, failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
