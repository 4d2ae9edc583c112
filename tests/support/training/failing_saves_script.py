"""A training script whose ranks fail to save in turn, synchronously and in the background.

Its one argument is a JSON file: {"out": folder, "url": store, "fails": rank, "ends_badly": bool}. `fails` is the rank
whose state cannot be kept; with `ends_badly` the last save, in the background, fails too and the script ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from small_gpt import Examples, Task, example_batch, make_model
from varuna import Varuna
from varuna.checkpoint import CheckpointError
from varuna.data import Batches


class Callbacks:
    """A state that a checkpoint cannot hold while `value` is a function."""

    value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"callback": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["callback"]


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    out, url, rank = Path(wanted["out"]), wanted["url"], int(os.environ["RANK"])
    model = Varuna(make_model(Task()), get_batch_fn=example_batch)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = Callbacks()
    model.register_state("callbacks", state)
    failing = print if rank == wanted["fails"] else 0
    raised: list[str] = []

    def save(value: Any, **options: Any) -> None:
        state.value = value
        try:
            assert model.checkpoint(url, **options)
            raised.append("")
        except CheckpointError as error:
            raised.append(str(error))

    for step, batch in Batches(Examples(), global_batch=8, first_step=1, last_step=2):
        model.step(batch)
        if step == 1:
            save(failing)
            save(0)
        else:
            save(failing, tmpdir=str(out / "copies"))
            save(0)
            save(0)
    (out / f"rank{rank}.json").write_text(json.dumps(raised))
    if wanted["ends_badly"]:
        save(failing, step=3, tmpdir=str(out / "copies"))


if __name__ == "__main__":
    main()
