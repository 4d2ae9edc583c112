"""DistributedDataParallel: torchrun --nproc-per-node 4 ddp_before.py"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from task import Classifier, load_datasets, parse_arguments

BATCH, ACCUMULATE = 8, 2  # examples of each process, twice for an update


def main() -> None:
    arguments = parse_arguments(__doc__)
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    train, validation = load_datasets()
    sampler = DistributedSampler(train, shuffle=not arguments.in_order, seed=0)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(Classifier().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    step = 0
    if Path(arguments.checkpoint).exists():
        saved = torch.load(arguments.checkpoint, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]

    losses = []
    epoch = step * ACCUMULATE // len(loader)
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=arguments.bf16):
                scores = model(batch["tokens"].to(device))
                loss = nn.functional.cross_entropy(scores, batch["labels"].to(device))
            (loss / ACCUMULATE).backward()
            losses.append(loss.detach())
            if len(losses) < ACCUMULATE:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            losses.clear()
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item() / dist.get_world_size():.6f}", flush=True)
            if step % 8 == 0:
                print(f"step {step} validation {evaluate(model.module, validation, device):.6f}", flush=True)
            if step % 50 == 0 and dist.get_rank() == 0:
                parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**saved, "step": step}, arguments.checkpoint)
            if step == arguments.steps:
                break
        epoch += 1
    dist.destroy_process_group()


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
