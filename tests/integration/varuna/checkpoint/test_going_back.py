"""A script goes back to an earlier checkpoint of its job: what it trains again is what a restart finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.checkpoint import newest_complete

SCRIPT = TRAINING_SCRIPTS / "going_back_script.py"


@pytest.mark.parametrize(("p", "d"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_what_was_trained_again_is_what_a_restart_finds(zygote: Zygote, tmp_path: Path, p: int, d: int) -> None:
    store = str(tmp_path / "store")

    def run(generation: int, *, goes_back: bool) -> tuple[list[int], dict[str, torch.Tensor]]:
        wanted = {"goes_back": goes_back}
        with Ranks(
            zygote, tmp_path, Task(), p, d, generation=generation, checkpoint_url=store, wanted=wanted, script=SCRIPT
        ) as world:
            assert world.exit_codes() == [0] * (p * d), world.logs()
            log = world.logs()
        assert log.count("later checkpoints are given up") == goes_back, "one rank does it for all"
        began = [json.loads((world.out / f"rank{rank}.json").read_text()) for rank in range(p * d)]
        return began, torch.load(world.out / "parameters.pt")

    _, trained = run(1, goes_back=True)
    assert newest_complete(store) == 4
    began, found = run(2, goes_back=False)
    assert began == [4] * (p * d)
    assert found.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(found[name], value), name
