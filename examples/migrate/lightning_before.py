"""Lightning: python lightning_before.py"""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from task import Classifier, load_datasets, parse_arguments

BATCH, ACCUMULATE = 8, 2  # examples of each process, twice for an update


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()
        self.losses = []

    def training_step(self, batch, batch_index):
        loss = nn.functional.cross_entropy(self.model(batch["tokens"]), batch["labels"])
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_index):
        if len(self.losses) == ACCUMULATE:
            print(f"step {self.global_step} loss {torch.stack(self.losses).mean().item():.6f}", flush=True)
            self.losses.clear()

    def validation_step(self, batch, batch_index):
        loss = nn.functional.cross_entropy(self.model(batch["tokens"]), batch["labels"])
        self.log("validation", loss)

    def on_validation_end(self):
        value = self.trainer.callback_metrics["validation"].item()
        print(f"step {self.global_step} validation {value:.6f}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    arguments = parse_arguments(__doc__)
    lightning.seed_everything(0)
    train, validation = load_datasets()
    folder = Path(arguments.checkpoint)
    trainer = lightning.Trainer(
        max_steps=arguments.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        val_check_interval=8 * ACCUMULATE,
        num_sanity_val_steps=0,
        precision="bf16-mixed" if arguments.bf16 else "32-true",
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=50, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Module(),
        DataLoader(train, batch_size=BATCH, shuffle=not arguments.in_order),
        DataLoader(validation, batch_size=16),
        ckpt_path=folder / "last.ckpt" if (folder / "last.ckpt").exists() else None,
    )


if __name__ == "__main__":
    main()
