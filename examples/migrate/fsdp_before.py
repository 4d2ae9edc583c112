"""FSDP: torchrun --nproc-per-node 4 fsdp_before.py"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from task import Classifier, load_datasets, parse_arguments

BATCH = 16  # examples of each process


def main() -> None:
    arguments = parse_arguments(__doc__)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    train, validation = load_datasets()
    sampler = DistributedSampler(train, shuffle=not arguments.in_order, seed=0)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    model = Classifier().to(device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if arguments.bf16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    step = 0
    if Path(arguments.checkpoint).exists():
        parts = make_parts(model, optimizer, scheduler, step)
        dcp.load(parts, checkpoint_id=arguments.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        scheduler.load_state_dict(parts["scheduler"])
        step = parts["step"]

    epoch = step // len(loader)
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            scores = model(batch["tokens"].to(device))
            loss = nn.functional.cross_entropy(scores, batch["labels"].to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            mean = loss.detach()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item() / dist.get_world_size():.6f}", flush=True)
            if step % 8 == 0:
                print(f"step {step} validation {evaluate(model, validation, device):.6f}", flush=True)
            if step % 50 == 0:
                dcp.save(make_parts(model, optimizer, scheduler, step), checkpoint_id=arguments.checkpoint)
            if step == arguments.steps:
                break
        epoch += 1
    dist.destroy_process_group()


def make_parts(model, optimizer, scheduler, step):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict(), "step": step}


@torch.no_grad()
def evaluate(model: nn.Module, validation, device: torch.device) -> float:
    model.eval()
    batches = DataLoader(validation, batch_size=16)
    losses = [
        nn.functional.cross_entropy(model(batch["tokens"].to(device)), batch["labels"].to(device)) for batch in batches
    ]
    model.train()
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    main()
