"""A training script in the shape of the seeds' BERT example: its structure, its calls, its arguments; a small model.

Without `--varuna` it is ordinary PyTorch in one process. With it, it trains through Varuna: started by the launcher, or
as it is. Letters: B examples, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from small_gpt import Lamb
from varuna import CutPoint, Profiler, Varuna, get_this_rank_config_varuna, get_varuna_config

V, T, H, LAYERS, IGNORED = 31, 7, 16, 4, -1
TIED = ("model.bert.embeddings.word_embeddings.weight", "model.cls.decoder.weight")


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(V, H)
        self.token_type_embeddings = nn.Embedding(2, H)
        self.norm = nn.LayerNorm(H)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        return self.norm(self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output, self.norm = nn.Linear(H, 3 * H), nn.Linear(H, H), nn.LayerNorm(H)

    def forward(self, hidden_states: Tensor, extended_attention_mask: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(H) + extended_attention_mask
        return self.norm(hidden_states + F.gelu(self.output(scores.softmax(-1) @ value)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.cutpoints = nn.ModuleList([CutPoint() for _ in range(LAYERS - 1)])

    def forward(self, hidden_states: Tensor, extended_attention_mask: Tensor) -> Tensor:
        for i, layer in enumerate(self.layer):
            hidden_states = layer(hidden_states, extended_attention_mask)
            if i < len(self.cutpoints):
                hidden_states = self.cutpoints[i](hidden_states)
        return hidden_states


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(), Encoder()
        self.pooler = nn.Linear(H, H)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        extended_attention_mask = (1.0 - attention_mask.unsqueeze(1)) * -10000.0
        sequence_output = self.encoder(self.embeddings(input_ids, token_type_ids), extended_attention_mask)
        return sequence_output, torch.tanh(self.pooler(sequence_output[:, 0]))


class PreTrainingHeads(nn.Module):
    def __init__(self, embedding_weights: nn.Parameter, two_parameters: bool) -> None:
        super().__init__()
        self.decoder = nn.Linear(H, V, bias=False)
        # With Varuna: two parameters over one storage, named as shared weights.
        self.decoder.weight = nn.Parameter(embedding_weights) if two_parameters else embedding_weights
        self.bias = nn.Parameter(torch.zeros(V))
        self.seq_relationship = nn.Linear(H, 2)

    def forward(self, sequence_output: Tensor, pooled_output: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(sequence_output) + self.bias, self.seq_relationship(pooled_output)


class BertForPreTraining(nn.Module):
    def __init__(self, two_parameters: bool) -> None:
        super().__init__()
        self.bert = Bert()
        self.cls = PreTrainingHeads(self.bert.embeddings.word_embeddings.weight, two_parameters)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls(*self.bert(input_ids, token_type_ids, attention_mask))


class PretrainingCriterion(nn.Module):
    """Every example has as many masked words as every other, so means over shares are the mean over the whole."""

    def forward(self, scores: Tensor, relationship: Tensor, masked_lm_labels: Tensor, labels: Tensor) -> Tensor:
        masked_lm_loss = F.cross_entropy(scores.view(-1, V), masked_lm_labels.view(-1), ignore_index=IGNORED)
        return masked_lm_loss + F.cross_entropy(relationship.view(-1, 2), labels.view(-1))


class BertForPreTrainingWithCriterion(nn.Module):
    def __init__(self, two_parameters: bool) -> None:
        super().__init__()
        self.model, self.criterion = BertForPreTraining(two_parameters), PretrainingCriterion()

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        masked_lm_labels: Tensor,
        next_sentence_labels: Tensor,
    ) -> Tensor:
        scores, relationship = self.model(input_ids, token_type_ids, attention_mask)
        return self.criterion(scores, relationship, masked_lm_labels, next_sentence_labels)


def pretraining_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    input_ids = torch.randint(V, (64, T), generator=generator)
    masked = torch.rand(64, T, generator=generator).argsort(1) < 2
    return TensorDataset(
        input_ids,
        torch.randint(2, (64, T), generator=generator),
        (torch.arange(T) < torch.randint(4, T + 1, (64, 1), generator=generator)).float(),
        torch.where(masked, input_ids, IGNORED),
        torch.randint(2, (64,), generator=generator),
    )


def get_dict_batch(batch: Sequence[Tensor], device: torch.device | str | None = None) -> dict[str, Tensor]:
    if device is not None:
        batch = [t.to(device) for t in batch]
    names = ("input_ids", "token_type_ids", "attention_mask", "masked_lm_labels", "next_sentence_labels")
    return dict(zip(names, batch, strict=True))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", default=8, type=int)
    parser.add_argument("--learning_rate", default=2e-2, type=float)
    parser.add_argument("--max_steps", default=6, type=int)
    parser.add_argument("--steps_this_run", default=-1, type=int)
    parser.add_argument("--output_dir", type=str)
    parser.add_argument("--init_loss_scale", default=2**20, type=int)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    parser.add_argument("--resume_step", default=-1, type=int)
    parser.add_argument("--local_rank", default=int(os.getenv("LOCAL_RANK", "-1")), type=int)
    # Arguments for Varuna; its launcher passes all but the first and the last.
    parser.add_argument("--varuna", action="store_true")
    parser.add_argument("--stage_to_rank_map", default=None, type=str)
    parser.add_argument("--chunk_size", default=None, type=int)
    parser.add_argument("--batch-size", default=None, type=int)
    parser.add_argument("--rank", default=-1, type=int)
    parser.add_argument("--profiling", action="store_true")
    return parser.parse_args(arguments)


def setup_training(args: argparse.Namespace) -> torch.device:
    if args.local_rank != -1:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
    if args.varuna and args.batch_size is not None:
        args.train_batch_size = args.batch_size
    return torch.device("cpu")


def get_batch_fn(size: int, device: torch.device | str | None = None) -> dict[str, Tensor]:
    return get_dict_batch(next(iter(DataLoader(pretraining_dataset(), batch_size=size))), device=device)


def poly_warm_up(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / 3, (1 - done / (2 * args.max_steps)) ** 0.5)
    )


def prepare_model_and_optimizer(args: argparse.Namespace, device: torch.device) -> tuple[Any, ...]:
    torch.manual_seed(42)
    model: nn.Module = BertForPreTrainingWithCriterion(two_parameters=args.varuna)
    if args.varuna:
        _, data_parallel_size = get_varuna_config(args.stage_to_rank_map)
        model = Varuna(
            model,
            args.stage_to_rank_map,
            get_batch_fn,
            args.train_batch_size * data_parallel_size,
            args.chunk_size,
            fp16=args.fp16,
            device=device,
            shared_weights=[TIED],
        )
    no_decay = ("bias", "norm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = Lamb([group for group in groups if group["params"]], lr=args.learning_rate, weight_decay=0.01)
    lr_scheduler = poly_warm_up(optimizer, args)
    global_step = 0
    if args.varuna:
        model.set_optimizer(optimizer, loss_scale="dynamic", init_loss_scale=args.init_loss_scale)
        model.register_state("lr_scheduler", lr_scheduler)
        if args.resume_from_checkpoint:
            global_step = args.resume_step
            model.load_checkpoint(args.output_dir, global_step)
    return model, optimizer, lr_scheduler, global_step


def take_optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, global_step: int) -> int:
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    return global_step + 1


def batches(args: argparse.Namespace, first_step: int) -> Iterator[dict[str, Tensor]]:
    """This replica's share of each global batch: neighbours in the data set, so that the whole is the same at any D."""
    for step in range(first_step, args.max_steps):
        yield share_of_batch(args, step)


def share_of_batch(args: argparse.Namespace, step: int) -> dict[str, Tensor]:
    _, replica = get_this_rank_config_varuna(args.stage_to_rank_map, args.rank)
    _, replicas = get_varuna_config(args.stage_to_rank_map)
    share, data = args.train_batch_size, pretraining_dataset()
    start = (step * share * replicas + replica * share) % len(data)
    return get_dict_batch(data[start : start + share])


def plain_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    loss = model(**batch)
    loss.backward()
    return loss, float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def main(arguments: Sequence[str] | None = None, report: Callable[[dict[str, Any]], None] | None = None) -> None:
    args = parse_arguments(arguments)
    device = setup_training(args)
    if args.profiling:
        model = BertForPreTrainingWithCriterion(two_parameters=True)
        profiler = Profiler(
            model, get_batch_fn, fp16=args.fp16, device=args.local_rank, from_cache=True, out_folder=args.output_dir
        )
        sections = {"sections": len(profiler.profile_all([1, 2]).sections)}
        Path(f"rank{args.rank}.json").write_text(json.dumps(sections))
        return
    model, optimizer, lr_scheduler, global_step = prepare_model_and_optimizer(args, device)
    model.train()
    losses, norms = [], []
    for steps_this_run, batch in enumerate(batches(args, global_step)):
        if steps_this_run == args.steps_this_run:
            break
        if args.varuna:
            loss, overflow, grad_norm = model.step(batch, 0.5)
            loss = torch.tensor(loss)
            assert overflow is False
            assert all(p.grad is not None for p in model.parameters())
        else:
            loss, grad_norm = plain_step(model, batch)
        losses.append(loss.item())
        norms.append(grad_norm)
        global_step = take_optimizer_step(model, optimizer, global_step)
        lr_scheduler.step()
    batch = share_of_batch(args, 0)
    if args.varuna:
        evaluated = model.evaluate(batch)
        if args.output_dir:
            model.checkpoint(args.output_dir, step=global_step)
    else:
        with torch.no_grad():
            evaluated = model.eval()(**batch).item()
    results = {"steps": global_step, "losses": losses, "norms": norms, "evaluated": evaluated}
    if report is not None:
        report(results)
    else:
        Path(f"rank{args.rank}-{global_step}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
