"""A script in the form of the seeds' example."""

from __future__ import annotations

__all__ = ["SEEDS_SCRIPT"]


SEEDS_SCRIPT = """
import argparse, json, pathlib
import torch
from small_gpt import Examples, Task, example_batch, make_model, make_optimizer
from varuna import Varuna, get_this_rank_config_varuna, get_varuna_config
from varuna.data import Batches

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage_to_rank_map", type=str, default=None)
parser.add_argument("--chunk_size", type=int, default=None)
parser.add_argument("--batch-size", type=int, default=None)
parser.add_argument("--resume_step", type=int, default=0)
parser.add_argument("--steps", type=int)
parser.add_argument("--save")
args = parser.parse_args()
torch.set_num_threads(1)
p, d = get_varuna_config(args.stage_to_rank_map)
stage, replica = get_this_rank_config_varuna(args.stage_to_rank_map, args.rank)
task = Task()
model = Varuna(make_model(task), args.stage_to_rank_map, example_batch, args.batch_size * d, args.chunk_size,
               local_rank=args.local_rank, device=args.local_rank)
model.set_optimizer(make_optimizer(model.parameters(), task))
if args.resume_step:
    model.load_checkpoint(args.save, args.resume_step)
losses = []
for step, batch in Batches(Examples(), global_batch=args.batch_size * d, first_step=args.resume_step + 1,
                           last_step=args.steps):
    losses.append(model.step(batch)[0])
model.checkpoint(args.save)
pathlib.Path(f"losses{args.rank}-{args.steps}.json").write_text(json.dumps([stage, replica, losses]))
"""
