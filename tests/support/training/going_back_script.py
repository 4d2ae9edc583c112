"""A training script that may go back to an earlier checkpoint of its job, and goes on from there with another rate.

Its one argument is a JSON file: {"out": folder, "goes_back": bool}. Each rank leaves the step from which it began; rank
0 leaves the parameters after the last step, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from small_gpt import Examples, Task, example_batch, make_model
from varuna import Varuna
from varuna.data import Batches

SAVED = (2, 4, 6)
BACK_TO = 2


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    out, rank = Path(wanted["out"]), int(os.environ["RANK"])
    model = Varuna(make_model(Task()), get_batch_fn=example_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)

    def train(first: int, last: int) -> None:
        for step, batch in Batches(Examples(), global_batch=8, first_step=first, last_step=last):
            model.step(batch)
            if step in SAVED:
                assert model.checkpoint()

    began = model.resume()
    if wanted["goes_back"]:
        train(began + 1, 6)
        assert model.checkpoint_url is not None
        model.load_checkpoint(model.checkpoint_url, BACK_TO)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        train(BACK_TO + 1, 4)
    parameters = model.full_state_dict()
    if rank == 0:
        torch.save(parameters, out / "parameters.pt")
    (out / f"rank{rank}.json").write_text(json.dumps(began))


if __name__ == "__main__":
    main()
