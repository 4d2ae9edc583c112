"""A small GPT, its batches, and its training by plain PyTorch: what Varuna's training is compared with.

Letters: B examples, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from varuna.cut_point import CutPoint
from varuna.partition import loss_of

V, T, H = 29, 6, 16
IGNORED = -100
"""Where a target is padding: `F.cross_entropy`'s own default."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, however it is spread over processes."""

    global_batch: int = 8
    steps: int = 4
    blocks: int = 4
    dropout: float = 0.0
    tied: bool = False
    tied_blocks: tuple[int, int] | None = None
    """Two blocks that mix with one weight."""
    declared: bool = False
    """The tied weights are two parameters, and the script declares to Varuna that they are one."""
    clip: float | None = None
    learning_rate: float = 1e-2
    weight_decay: float = 0.01
    optimizer: str = "adamw"
    """Or "momentum", or "lamb"."""
    precision: str = "float32"
    """The name of a torch type."""
    loss_scale: float | None = None
    """A fixed one; None: a dynamic one that starts at 2**10."""
    offload: bool = False
    """The optimizer is on the host."""
    skip: bool = False
    """The embedding's output also goes past all blocks, through a projection."""

    padded: bool = False
    """Texts have different lengths, some have nothing to predict, and the model returns its loss with its weight."""

    counts: bool = False
    """The model counts in a buffer the examples that it has seen."""

    scaled: bool = False
    """The later blocks get their input times what a module without parameters makes of its buffer, which the script
    fills."""

    groups: bool = False
    """Vectors are in a parameter group of their own, with another learning rate and no weight decay."""

    frozen: bool = False
    """The second block does not train."""

    checkpointed: bool = False
    """The blocks run again in the backward (torch.utils.checkpoint)."""

    noisy: bool = False
    """The model draws noise for its tokens in evaluation mode only."""

    doubled: bool = False
    """The model is in float64, in which another order of sums makes no difference that could hide a mistake."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mix = nn.Linear(H, H)
        self.feed = nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (x @ x.transpose(1, 2) / H**0.5).masked_fill(~mask, -torch.inf)
        x = x + self.dropout(scores.softmax(-1) @ self.mix(self.norm(x)))
        return x + self.dropout(self.feed(x))


class Scale(nn.Module):
    """Its code runs again in all stages that use its result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.ones(()))

    def forward(self) -> Tensor:
        return self.get_buffer("square").sqrt()


class SmallGPT(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(Block(task.dropout) for _ in range(task.blocks))
        self.cut_points = [CutPoint() for _ in range(task.blocks - 1)]
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.skip = nn.Linear(H, H) if task.skip else None
        self.scale = Scale() if task.scaled else None
        self.weighted, self.counts, self.checkpointed = task.padded, task.counts, task.checkpointed
        self.noisy = task.noisy
        if task.counts:
            self.register_buffer("seen", torch.zeros(()))
        self.tie_weights(task)

    def tie_weights(self, task: Task) -> None:
        if task.tied:
            self.head.weight = self.embedding.weight
        if task.tied_blocks is not None:
            one, other = task.tied_blocks
            self.blocks[other].mix.weight = self.blocks[one].mix.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        if self.counts:
            self.get_buffer("seen").add_(tokens.shape[0])
        if self.noisy and not self.training:
            x = x + torch.randn_like(x)
        past = 0 if self.skip is None else self.skip(x)
        scale: Tensor | None = None
        for number, (block, cut_point) in enumerate(zip(self.blocks, [*self.cut_points, None], strict=True)):
            if self.scale is not None and number >= len(self.blocks) // 2:
                scale = self.scale() if scale is None else scale
                x = x * scale
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if cut_point is not None:
                x = cut_point(x)
        loss = F.cross_entropy(self.head(self.norm(x + past)).transpose(1, 2), targets)  # NaN where all is padding
        return (loss, (targets != IGNORED).sum()) if self.weighted else loss


def make_model(task: Task) -> SmallGPT:
    torch.manual_seed(7)
    model = SmallGPT(task)
    if task.frozen:
        model.blocks[1].requires_grad_(False)
    return model.double() if task.doubled else model


def fill_scale(model: nn.Module) -> None:
    """What the script does when the model has been wrapped."""
    with torch.no_grad():
        model.get_buffer("scale.square").fill_(2.0)


class Lamb(torch.optim.Optimizer):
    """Layerwise Adam (You et al., 2020), which warms up by a count of its steps; `step` after clipping to the global
    norm. The count is no parameter's, as in MADGRAD."""

    def __init__(self, parameters: object, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # without a closure
        count: Tensor = self.state.setdefault("count", torch.zeros(()))  # type: ignore[call-overload]
        warmth = 1 - 0.5 ** count.add_(1).item()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6) + group["weight_decay"] * p
                size, length = p.norm(), update.norm()
                trust = (size / length).item() if size > 0 and length > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * trust * warmth)


def make_optimizer(parameters: Iterable[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    if task.groups:
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for parameter in parameters:
            (matrices if parameter.dim() > 1 else vectors).append(parameter)
        slow = {"params": vectors, "lr": task.learning_rate / 2, "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": matrices}, slow], lr=task.learning_rate, weight_decay=task.weight_decay)
    if task.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=task.learning_rate, momentum=0.9, weight_decay=task.weight_decay)
    if task.optimizer == "lamb":
        return Lamb(parameters, lr=task.learning_rate, weight_decay=task.weight_decay)
    return torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=task.weight_decay)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def example_batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    return {"tokens": torch.zeros(size, T, dtype=torch.long), "targets": torch.zeros(size, T, dtype=torch.long)}


class Examples(torch.utils.data.Dataset):
    """Example i is the same in every process."""

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(V, (T + 1,), generator=generator)
        targets = text[1:].clone()
        if self.padded:
            targets[index % 5 * 2 :] = IGNORED  # 0, 2, 4, 6 or 6 targets
        return {"tokens": text[:-1], "targets": targets}


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    evaluated: float
    """The loss of the last batch after training."""
    parameters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    """Of the optimizer, by parameter."""


def states_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, dict[str, Any]]:
    """On the CPU, wherever the optimizer is."""
    return {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
        for name, p in named
    }


def train_plainly(
    task: Task,
    micro_batch: int | None = None,
    skipped: int | None = None,
    cast_once: bool = True,
    device: torch.device | None = None,
) -> Trained:
    """One process, no Varuna; the whole global batch at once, or gradients summed up over micro-batches.

    In the step `skipped` the optimizer does not step. Without `cast_once`, each use of a parameter is a cast of its
    own in half precision; so the gradients of a tied one's uses are summed in fp32, not in half precision.
    """
    from varuna.data import Batches

    device = device or torch.device("cpu")
    model = make_model(task).to(device)
    if task.scaled:
        fill_scale(model)
    model.tie_weights(task)  # `to` unties them on devices that torch does not know
    optimizer = make_optimizer(model.parameters(), task)
    scheduler = make_scheduler(optimizer)
    losses, norms = [], []
    scale = (task.loss_scale or 2.0**10) if task.dtype is torch.float16 else 1.0
    data = Examples(task.padded)
    for step, examples in Batches(data, global_batch=task.global_batch, last_step=task.steps, environ={}):
        batch = {name: value.to(device) for name, value in examples.items()}
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        # The casts of the weights last until its end.
        with torch.autocast(device.type, torch.bfloat16, enabled=False):
            for start in range(0, task.global_batch, micro_batch or task.global_batch):
                part = {k: v[start : start + (micro_batch or task.global_batch)] for k, v in batch.items()}
                share = len(part["tokens"]) / task.global_batch
                if task.padded:
                    share = int((part["targets"] != IGNORED).sum()) / int((batch["targets"] != IGNORED).sum())
                if not share:
                    continue
                with precisely(task, device, cast_once):
                    part_loss = loss_of(model(**part))
                (part_loss * share * scale).backward()
                loss += part_loss.detach() * share
        for parameter in model.parameters():
            assert (parameter.grad is not None) is parameter.requires_grad
            if parameter.grad is not None:
                parameter.grad /= scale
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), task.clip or float("inf"))))
        if step != skipped:
            optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    with torch.no_grad(), precisely(task, device):
        evaluated = loss_of(model.eval()(**batch)).item()
    named = dict(model.named_parameters())
    parameters = {name: parameter.detach().cpu() for name, parameter in named.items()}
    return Trained(losses, norms, evaluated, parameters, states_of(optimizer, named.items()))


def precisely(task: Task, device: torch.device, cast_once: bool = True) -> AbstractContextManager[object]:
    """For around plain PyTorch's forwards."""
    if task.dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, task.dtype, cache_enabled=cast_once)
