"""Trains the rows of the equality matrix one after the other.

They are "rows": [{"task", "environ": by rank, and maybe "wanted" of training_script.py}] in its JSON file.

Each row is a generation of its own, with its own store, groups and threads; only the process is the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import training_script
from small_gpt import Task
from varuna import Varuna


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    port = os.environ["MASTER_PORT"]
    models: list[Varuna] = []  # kept: with the first one, the store would go that rank 0 serves to all
    for number, row in enumerate(wanted["rows"]):
        os.environ.update({**row["environ"][rank], "MASTER_PORT": port})
        out = Path(wanted["out"]) / str(number)
        out.mkdir(exist_ok=True)
        models.append(training_script.train(Task(**row["task"]), row.get("wanted", {}), out))


if __name__ == "__main__":
    main()
