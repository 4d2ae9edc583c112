"""Kill every rank at every op and phase; every survivor must leave within a second of it.

make soak-kills                     # on a quiet machine
make soak-kills SOAK="--longest 2"  # on a machine that does other things, too
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from training_kills import SHAPES, make_checkpoint, op_kills, phase_kills, seconds_until_survivors_left
from training_world import Zygote


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=float, default=1.0, help="seconds that a survivor may take to leave")
    options = parser.parse_args()
    zygote = Zygote()
    flaws: list[str] = []
    left_s: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="varuna-kills-") as name:
        folder = Path(name)
        checkpoint = make_checkpoint(zygote, folder)
        kills = [
            kill
            for p, d in SHAPES
            for rank in range(p * d)
            for kill in (*op_kills(p, d, rank), *phase_kills(p, d, rank))
        ]
        for number, kill in enumerate(kills):
            try:
                after_s = seconds_until_survivors_left(zygote, folder / str(number), kill, checkpoint)
            except AssertionError as error:
                flaws.append(str(error))
                print(f"FLAW: {error}", flush=True)
                continue
            left_s[f"{kill.p}x{kill.d} {kill.at} {kill.details.get('op', '')}"] += after_s
            if max(after_s) > options.longest:
                flaws.append(f"{kill}: a survivor left only after {max(after_s):.2f} s")
                print(f"FLAW: {flaws[-1]}", flush=True)
    zygote.close()
    print(f"{'':28}{'survivors':>10}{'median s':>10}{'longest s':>11}")
    for row, seconds in left_s.items():
        print(f"{row:28}{len(seconds):10}{statistics.median(seconds):10.3f}{max(seconds):11.3f}")
    everything = [each for seconds in left_s.values() for each in seconds]
    print(f"{'all':28}{len(everything):10}{statistics.median(everything):10.3f}{max(everything):11.3f}")
    print(f"{len(kills)} kills: {'all well' if not flaws else f'{len(flaws)} flaws'}")
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
