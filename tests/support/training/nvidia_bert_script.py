"""NVIDIA's BERT pretraining with Varuna's published patch, on CPUs: `run_pretraining.py` with all the patch's calls.

Structure, names and order of calls are those of the patched script; the model is small, and what needs a GPU (apex's
optimizer, its amp) is left out. Without `--varuna` it is ordinary PyTorch in one process.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import small_gpt
from seed_example_script import TIED, BertForPreTrainingWithCriterion
from varuna import Profiler, Varuna, get_this_rank_config_varuna, get_varuna_config

Dict = dict[str, Tensor]


class FusedLamb(small_gpt.Lamb):
    """Counts the steps in its groups, as apex's does; the schedule reads them there."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()


class PolyWarmUpScheduler(torch.optim.lr_scheduler.LRScheduler):
    """As in the recipe's `schedulers.py`."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: float, total_steps: int, degree: float = 0.5) -> None:
        self.warmup, self.total_steps, self.degree = warmup, total_steps, degree
        super().__init__(optimizer, -1)

    def step(self, epoch: int | None = None) -> None:
        param_group = self.optimizer.param_groups[0]
        self.last_epoch = param_group["step"] + 1 if "step" in param_group else 1
        for param_group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            param_group["lr"] = lr

    def get_lr(self) -> list[float | Tensor]:
        progress = self.last_epoch / self.total_steps
        if progress < self.warmup:
            return [base_lr * progress / self.warmup for base_lr in self.base_lrs]
        return [base_lr * ((1.0 - progress) ** self.degree) for base_lr in self.base_lrs]


def pretraining_dataset(input_file: str) -> TensorDataset:
    return TensorDataset(*torch.load(input_file))


def create_pretraining_dataset(input_file: str, args: argparse.Namespace) -> Iterator[list[Tensor]]:
    """Each replica has its own part of the data; all stages of a replica have the same."""
    train_data = pretraining_dataset(input_file)
    replicas, replica = 1, 0
    if args.varuna:
        _, replicas = get_varuna_config(args.stage_to_rank_map)
        _, replica = get_this_rank_config_varuna(args.stage_to_rank_map, args.rank)
    sampler: DistributedSampler[Any] = DistributedSampler(
        train_data, num_replicas=replicas, rank=replica, shuffle=False
    )
    return iter(DataLoader(train_data, sampler=sampler, batch_size=args.train_batch_size, drop_last=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input_dir", type=str, required=True)
    parser.add_argument("--output_dir", type=str, required=True)
    parser.add_argument("--init_checkpoint", default=None, type=str)
    parser.add_argument("--train_batch_size", default=8, type=int)
    parser.add_argument("--learning_rate", default=2e-2, type=float)
    parser.add_argument("--warmup_proportion", default=0.2, type=float)
    parser.add_argument("--max_steps", default=16, type=int)
    parser.add_argument("--steps_this_run", type=int, default=-1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--init_loss_scale", type=int, default=2**20)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    parser.add_argument("--resume_step", type=int, default=-1)
    parser.add_argument("--local_rank", type=int, default=int(os.getenv("LOCAL_RANK", "-1")))
    # The patch's
    parser.add_argument("--varuna", action="store_true")
    parser.add_argument("--stage_to_rank_map", default=None, type=str)
    parser.add_argument("--chunk_size", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--profiling", action="store_true")
    return parser.parse_args()


def setup_training(args: argparse.Namespace) -> torch.device:
    if args.local_rank != -1:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
    if args.varuna:
        args.gradient_accumulation_steps = 1
        args.train_batch_size = args.batch_size
    return torch.device("cpu")


def find_data_file(args: argparse.Namespace) -> str:
    for f in Path(args.input_dir).iterdir():
        if f.is_file() and "training" in f.name:
            return str(f)
    raise FileNotFoundError(args.input_dir)


def prepare_model_and_optimizer(
    args: argparse.Namespace, device: torch.device, get_dict_batch: Callable[..., Dict]
) -> tuple[Any, torch.optim.Optimizer, PolyWarmUpScheduler, int]:
    torch.manual_seed(42)
    model: Any = BertForPreTrainingWithCriterion(two_parameters=args.varuna or args.profiling)
    if args.varuna or args.profiling:
        train_data = pretraining_dataset(find_data_file(args))

        def get_batch_fn(size: int, device: torch.device | str | None = None) -> Dict:
            batch = next(iter(DataLoader(train_data, batch_size=size)))
            return get_dict_batch(batch, device=device)

        if args.profiling:
            profiler = Profiler(
                model, get_batch_fn, fp16=args.fp16, device=args.local_rank, from_cache=True, out_folder=args.output_dir
            )
            profiler.profile_all([1, 2])
            raise SystemExit
        pipeline_parallel_size, data_parallel_size = get_varuna_config(args.stage_to_rank_map)
        global_batch_size = args.train_batch_size * data_parallel_size
        assert pipeline_parallel_size * data_parallel_size == torch.distributed.get_world_size()
        model = Varuna(
            model,
            args.stage_to_rank_map,
            get_batch_fn,
            global_batch_size,
            args.chunk_size,
            fp16=args.fp16,
            device=device,
            shared_weights=[TIED],
        )

    global_step = load_iter = args.resume_step if args.resume_from_checkpoint else 0
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "gamma", "beta", "norm"]
    groups = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedLamb(groups, lr=args.learning_rate, weight_decay=0.01)
    lr_scheduler = PolyWarmUpScheduler(optimizer, warmup=args.warmup_proportion, total_steps=args.max_steps)
    if args.varuna:
        model.set_optimizer(optimizer, loss_scale="dynamic", init_loss_scale=args.init_loss_scale)
    if args.resume_from_checkpoint:
        model.load_checkpoint(args.output_dir, load_iter)
    return model, optimizer, lr_scheduler, global_step


def take_optimizer_step(optimizer: torch.optim.Optimizer, model: nn.Module, global_step: int) -> int:
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    return global_step + 1


def main() -> None:
    torch.set_num_threads(1)
    args = parse_arguments()
    device = setup_training(args)

    def get_dict_batch(batch: list[Tensor], device: torch.device | str | None = None) -> Dict:
        if device is not None:
            batch = [t.to(device) for t in batch]
        input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels = batch
        return {
            "input_ids": input_ids,
            "token_type_ids": segment_ids,
            "attention_mask": input_mask,
            "masked_lm_labels": masked_lm_labels,
            "next_sentence_labels": next_sentence_labels,
        }

    model, optimizer, lr_scheduler, global_step = prepare_model_and_optimizer(args, device, get_dict_batch)
    losses: list[float] = []
    rates: list[float] = []
    model.train()
    train_iter = create_pretraining_dataset(find_data_file(args), args)
    for training_steps, batch in enumerate(train_iter):
        if training_steps < global_step:  # the recipe keeps its place in the files; this is its place in the one file
            continue
        if len(losses) == args.steps_this_run:
            break
        rates.append(optimizer.param_groups[0]["lr"])
        inputs = get_dict_batch(batch, device=device)
        if args.varuna:
            loss, overflow, _ = model.step(inputs)
            loss = torch.tensor(loss)
            assert not overflow
        else:
            loss = model(**inputs)
            loss.backward()
            take_optimizer_step(optimizer, model, global_step)
        losses.append(loss.item())
        lr_scheduler.step()
        if args.varuna:
            take_optimizer_step(optimizer, model, global_step)
        global_step += 1
    if args.varuna:
        evaluated = model.evaluate(get_dict_batch(batch, device=device))
        assert model.checkpoint(args.output_dir, global_step)
    else:
        evaluated = model.eval()(**inputs).item()
    results = {"steps": global_step, "losses": losses, "rates": rates, "evaluated": evaluated}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(args.output_dir, f"log-{global_step}-rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
