"""A training script with an average of the weights of its own, Varuna's, and states of each rank.

Its one argument is a JSON file: {"out": folder, "url": store, "step": the only one to train, "cursor": how it is
registered, or ""}. The two averages must be equal to the last bit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from small_gpt import Examples, Task, example_batch, make_model, make_optimizer
from varuna import Varuna
from varuna.data import Batches

DECAY = 0.75
TASK = Task(global_batch=8, tied=True, clip=0.5)


class OwnAverage:
    """PyTorch's average of this stage's weights, kept by name."""

    def __init__(self, model: Varuna) -> None:
        named = dict(model.named_parameters())
        self.names = list(named)
        self.stage = nn.ParameterList(named.values())
        self.averaged = AveragedModel(self.stage, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def update(self) -> None:
        self.averaged.update_parameters(self.stage)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.averaged.module.parameters(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.averaged.n_averaged, "shadow": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert list(state["shadow"]) == self.names
        self.averaged.n_averaged.copy_(state["updates"])
        with torch.no_grad():
            for name, value in self.values.items():
                value.copy_(state["shadow"][name])


class Cursor:
    """Where a rank is in its own data."""

    def __init__(self, rank: int) -> None:
        self.at = f"rank {rank}'s"

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    out, step, rank = Path(wanted["out"]), wanted["step"], int(os.environ["RANK"])
    model = Varuna(make_model(TASK), get_batch_fn=example_batch, ema=DECAY)
    model.set_optimizer(make_optimizer(model.parameters(), TASK))
    own, cursor = OwnAverage(model), Cursor(rank)
    model.register_state("own", own)
    if wanted["cursor"]:
        model.register_state("cursor", cursor, per=wanted["cursor"])
    assert model.resume() == step - 1
    [(_, batch)] = Batches(Examples(), global_batch=TASK.global_batch, first_step=step, last_step=step)
    model.step(batch, clip_grad_max_norm=TASK.clip)
    own.update()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    evaluated = {"average": model.evaluate(batch, ema=True), "parameters": model.evaluate(batch)}
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), f"evaluate(ema=True) left another {name}"
    assert model.checkpoint()
    torch.save({name: value.detach() for name, value in own.values.items()}, out / f"rank{rank}.pt")
    (out / f"rank{rank}.json").write_text(json.dumps({"cursor": cursor.at, "evaluated": evaluated}))


if __name__ == "__main__":
    main()
