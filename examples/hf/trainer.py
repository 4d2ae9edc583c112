"""A trainer in the manner of Hugging Face's: for a model in plain PyTorch, and for one that is wrapped in `Varuna`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from arguments import Arguments
from text import Blocks
from varuna import Varuna
from varuna.data import Batches


class Plain:
    """A model in one process of plain PyTorch, on one device, with the methods of `Varuna` that are used here."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.named_parameters = model.named_parameters

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def register_state(self, name: str, state: Any) -> None:
        """Nothing to do: this process is not restarted."""

    def resume(self) -> int:
        return 0

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        loss: Tensor = self.model(**inputs).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip_grad_max_norm or torch.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), False, norm.item()

    def evaluate(self, inputs: Mapping[str, Any]) -> float:
        self.model.eval()
        with torch.no_grad():
            loss: Tensor = self.model(**inputs).loss
        self.model.train()
        return loss.item()


class Trainer:
    """Trains `model` on `blocks`, with AdamW, a learning-rate schedule and clipping."""

    def __init__(
        self,
        model: PreTrainedModel | Varuna,
        arguments: Arguments,
        tokenizer: PreTrainedTokenizerBase,
        train: Blocks,
        evaluation: Blocks,
    ) -> None:
        self.arguments = arguments
        self.train_blocks, self.evaluation_blocks = train, evaluation
        self.tokenizer = tokenizer
        self.model = model if isinstance(model, Varuna) else Plain(model)
        self.optimizer = AdamW(
            self._parameter_groups(),
            lr=arguments.learning_rate,
            betas=(arguments.adam_beta1, arguments.adam_beta2),
            eps=arguments.adam_epsilon,
        )
        self.model.set_optimizer(self.optimizer)
        self.scheduler = get_scheduler(
            arguments.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=arguments.warmup_steps,
            num_training_steps=arguments.max_steps,
        )
        self.model.register_state("scheduler", self.scheduler)

    def train(self) -> None:
        """From the job's newest checkpoint to `max_steps`."""
        arguments = self.arguments
        start = self.model.resume()
        batches = Batches(
            self.train_blocks,
            global_batch=arguments.per_device_train_batch_size,
            seed=arguments.seed,
            first_step=start + 1,
            last_step=arguments.max_steps,
        )
        for step, batch in batches:
            learning_rate = self.scheduler.get_last_lr()[0]
            loss, overflow, norm = self.model.step(batch, clip_grad_max_norm=arguments.max_grad_norm)
            if not overflow:
                self.scheduler.step()
            if step % arguments.logging_steps == 0:
                print(f"step {step} loss {loss:.6f} grad_norm {norm:.4f} learning_rate {learning_rate:.3g}", flush=True)
            if step == arguments.max_steps or (arguments.eval_steps and step % arguments.eval_steps == 0):
                self.evaluate(step)
        self.save()

    def evaluate(self, step: int) -> None:
        """The loss of the examples that are not trained on."""
        loss = self.model.evaluate(self.evaluation_blocks.batch(range(len(self.evaluation_blocks))))
        print(f"step {step} eval_loss {loss:.6f}", flush=True)

    def save(self) -> None:
        """Plain PyTorch's model into `output_dir`; Varuna's last state as a checkpoint of the job, if it is one."""
        folder = self.arguments.output_dir
        if isinstance(self.model, Varuna):
            if self.model.checkpoint_url:
                self.model.checkpoint()
        elif folder is not None:
            self.model.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """As transformers' Trainer has them: no decay of biases and norms. The same two on every stage."""
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": self.arguments.weight_decay},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
