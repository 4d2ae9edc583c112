"""What the ranks of `test_launched.py` run: `training_script.py`, with the things that scripts for torchrun do.

Its one argument is a JSON file: that of `training_script.py`, and {"group": when the script makes torch's default
group: "before" its Varuna, "after" it (and then it trains another one), or "never"; "differs": arguments of Varuna
that the last rank gives otherwise; "place": stage and replica of each rank}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from small_gpt import Task
from training_script import RANKS, train
from varuna import get_this_rank_config_varuna, get_varuna_config

SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def make_default_group() -> None:
    """Makes the group as scripts do, with the numbers as arguments where the launcher's variables are not torch's."""
    rank, world_size = (int(next(os.environ[name] for name in names if name in os.environ)) for names in (RANKS, SIZES))
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    if wanted["group"] == "before":
        make_default_group()
    if "differs" in wanted and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        wanted["varuna"] |= wanted["differs"]
    train(Task(**wanted["task"]), wanted, Path(wanted["out"]))
    if wanted["group"] == "after":
        make_default_group()
        train(Task(**wanted["task"]), wanted, Path(wanted["out"]))  # a second model meets by itself
    if "place" in wanted:  # by rank
        rank = int(next(os.environ[name] for name in RANKS if name in os.environ))
        stage, replica = wanted["place"][rank]
        text = wanted["varuna"].get("stage_to_rank_map")
        assert get_this_rank_config_varuna() == get_this_rank_config_varuna(text) == (stage, replica)
        assert get_varuna_config() == get_varuna_config(text)


if __name__ == "__main__":
    main()
