"""Accelerate, brought to Varuna: varuna submit job.yaml --set run="python accelerate_after.py" --name accelerate"""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from task import Classifier, load_datasets, parse_arguments
from varuna import Varuna
from varuna.data import Batches

GLOBAL_BATCH = 16  # examples for an update; job.yaml says the same


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return nn.functional.cross_entropy(self.model(tokens), labels)


def main() -> None:
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    train, validation = load_datasets()
    example = torch.utils.data.default_collate([train[0], train[1]])
    model = Varuna(WithLoss(Classifier()), get_batch_fn=example, dtype=torch.bfloat16 if arguments.bf16 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.set_optimizer(optimizer)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model.register_state("scheduler", scheduler)
    start = model.resume()

    batches = Batches(
        train,
        global_batch=GLOBAL_BATCH,
        shuffle=not arguments.in_order,
        first_step=start + 1,
        last_step=arguments.steps,
    )
    for step, batch in batches:
        loss, _overflow, _norm = model.step(batch, clip_grad_max_norm=1.0)
        scheduler.step()
        print(f"step {step} loss {loss:.6f}", flush=True)
        if step % 8 == 0:
            print(f"step {step} validation {evaluate(model, validation):.6f}", flush=True)
    if model.checkpoint_url:
        model.checkpoint()


def evaluate(model: Varuna, validation) -> float:
    batches = Batches(validation, global_batch=GLOBAL_BATCH, shuffle=False)
    rounds = len(validation) // GLOBAL_BATCH
    return sum(model.evaluate(batches.batch(index)) for index in range(1, rounds + 1)) / rounds


if __name__ == "__main__":
    main()
