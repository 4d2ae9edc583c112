"""Cut every model of the zoo at every place and into 2, 3 and 4 stages, and compare each with the uncut model.

make soak-zoo                # all of them
make soak-zoo SOAK="T5 BERT" # some

The table is left in test-artifacts/zoo.txt; docs/models.md has it, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from zoo import ARTIFACT, ZOO, as_expected, summary, table, train_cut_and_whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*ZOO])
    options = parser.parse_args()
    rows = []
    flaws = []
    for name in options.models:
        made = train_cut_and_whole(name, (2, 3, 4))
        rows += made
        print(table(made), flush=True)
        if not as_expected(ZOO[name], made):
            flaws.append(name)
    ARTIFACT.parent.mkdir(exist_ok=True)
    ARTIFACT.write_text(table(rows) + "\n")
    print(f"\n{table(rows)}\n\n{summary(rows)}")
    print(f"{len(options.models)} models, {len(rows)} rows: {f'flaws in {flaws}' if flaws else 'all as expected'}")
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
