"""A rank that dies while the profile is measured: the others report that, and do not blame the script."""

from __future__ import annotations

import signal
from pathlib import Path
from textwrap import dedent

from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

SCRIPT = """
    import os, signal
    import torch
    from torch import nn
    from varuna import Varuna

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x).square().mean()

    measuring = False

    def get_batch(size, device=None):
        if measuring and os.environ["RANK"] == "0":  # it serves the store, too
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": torch.ones(size, 4)}

    model = Varuna(Small(), get_batch_fn=get_batch)
    measuring = True
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_the_others_leave_as_those_who_lost_a_peer(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "calibrate.py"
    script.write_text(dedent(SCRIPT))
    with Ranks(zygote, tmp_path, Task(), 1, 2, script=script, environ={"VARUNA_MODE": "calibrate"}) as world:
        assert world.exit_codes() == [-signal.SIGKILL, EXIT_PEER_LOST], world.logs()
