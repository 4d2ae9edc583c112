"""Accelerate: accelerate launch accelerate_before.py"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from task import Classifier, load_datasets, parse_arguments

BATCH, ACCUMULATE = 8, 2  # examples of each process, twice for an update


def main() -> None:
    arguments = parse_arguments(__doc__)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATE, mixed_precision="bf16" if arguments.bf16 else "no"
    )
    set_seed(0)
    train, validation = load_datasets()
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Accelerate steps the scheduler once for each process.
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step // accelerator.num_processes + 1) / 10))
    loader = DataLoader(train, batch_size=BATCH, shuffle=not arguments.in_order)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    step = 0
    if Path(arguments.checkpoint).exists():
        accelerator.load_state(arguments.checkpoint)
        step = int(Path(arguments.checkpoint, "step").read_text())

    losses = []
    while step < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
            losses.clear()
            accelerator.print(f"step {step} loss {mean.item():.6f}", flush=True)
            if step % 8 == 0:
                accelerator.print(f"step {step} validation {evaluate(model, validation):.6f}", flush=True)
            if step % 50 == 0:
                accelerator.save_state(arguments.checkpoint)
                Path(arguments.checkpoint, "step").write_text(str(step))
            if step == arguments.steps:
                break
    accelerator.end_training()


@torch.no_grad()
def evaluate(model: nn.Module, validation) -> float:
    model.eval()
    device = next(model.parameters()).device
    batches = DataLoader(validation, batch_size=16)
    losses = [
        nn.functional.cross_entropy(model(batch["tokens"].to(device)), batch["labels"].to(device)) for batch in batches
    ]
    model.train()
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    main()
