"""Lightning, brought to Varuna: varuna submit job.yaml --set run="python lightning_after.py" --name lightning"""

import lightning
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from task import Classifier, load_datasets, parse_arguments
from varuna import Varuna
from varuna.data import Batches

GLOBAL_BATCH = 16  # examples for an update; job.yaml says the same


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch, batch_index):
        return nn.functional.cross_entropy(self.model(batch["tokens"]), batch["labels"])

    def forward(self, **batch):
        return self.training_step(batch, 0)


def configure_optimizers(model: Varuna):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    return optimizer, scheduler


def main() -> None:
    arguments = parse_arguments(__doc__)
    lightning.seed_everything(0)
    train, validation = load_datasets()
    example = torch.utils.data.default_collate([train[0], train[1]])
    model = Varuna(Module(), get_batch_fn=example, dtype=torch.bfloat16 if arguments.bf16 else None)
    optimizer, scheduler = configure_optimizers(model)
    model.set_optimizer(optimizer)
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
