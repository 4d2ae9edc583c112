"""Cut every model of the zoo into 2, 3 and 4 stages, and compare each with the uncut model.

make soak-zoo                # all of them
make soak-zoo SOAK="T5 BERT" # some
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from zoo import FURTHER, ZOO, table, train_cut_and_whole

REFUSED = {"Mixtral": "dry run"}
"""What cannot be cut yet, and a word of the reason that it must be given."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*ZOO, *FURTHER])
    options = parser.parse_args()
    rows = []
    for name in options.models:
        made = train_cut_and_whole(name, (2, 3, 4))
        rows += [row for row in made if row.status != "too few sections"]
        print(table(rows[-len(made) :]), flush=True)
    print(f"\n{table(rows)}")
    flaws = [row for row in rows if not row.well and REFUSED.get(row.name, "\0") not in row.status]
    print(f"{len(rows)} rows: {'all well' if not flaws else f'{len(flaws)} flaws'}")
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
