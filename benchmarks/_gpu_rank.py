"""One rank of `gpu.py`: trains GPT-2 with Varuna, with plain PyTorch or with DDP, and writes what it took."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpt"))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch import distributed as dist  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from recipe import CONFIGS, SEED, build_model, build_optimizer  # noqa: E402
from varuna import Varuna  # noqa: E402
from varuna.assembly.connections import LinkKind  # noqa: E402
from varuna.devices.accelerator import is_accelerator, peak_memory_bytes, wait_for_device  # noqa: E402
from varuna.devices.cuda_alone import device_model  # noqa: E402

Batch = dict[str, Tensor]
Step = Callable[[], float]
"""A training step; it returns the loss."""


def main() -> None:
    wanted, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    device = torch.device(os.environ["VARUNA_DEVICE"])
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(device)
    config, dtype = CONFIGS[wanted["size"]], getattr(torch, wanted["precision"])
    share = make_batch(config, wanted["micro_batch"] * wanted["micro_batches"])
    if wanted["side"] == "varuna":
        step = varuna_side(config, share, dtype, links=wanted["links"])
    else:
        step = peer_side(config, share, dtype, device=device, micro_batch=wanted["micro_batch"], side=wanted["side"])
    figures = measure_steps(step, device, warm_up=wanted["warm_up"], steps=wanted["steps"])
    out.write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.destroy_process_group()


def make_batch(config: GPTConfig, examples: int) -> Batch:
    """Random tokens: every rank has the same, which costs what others would."""
    tokens = torch.randint(config.vocabulary, (examples, config.window + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def varuna_side(config: GPTConfig, share: Batch, dtype: torch.dtype, *, links: LinkKind) -> Step:
    model = Varuna(
        build_model(config),
        get_batch_fn=lambda size, device=None: make_batch(config, size),
        dtype=dtype,
        links=links,
    )
    model.set_optimizer(build_optimizer(model.parameters()))
    return lambda: model.step(share)[0]


def peer_side(
    config: GPTConfig, share: Batch, dtype: torch.dtype, *, device: torch.device, micro_batch: int, side: str
) -> Step:
    """The same step as one writes it by hand."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model: nn.Module = GPT(config)
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if side == "ddp":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        replicated = nn.parallel.DistributedDataParallel(model)
        model, no_sync = replicated, replicated.no_sync
    optimizer = build_optimizer(model.parameters())
    pieces = list(split_batch(share, micro_batch))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for number, piece in enumerate(pieces, start=1):
            with no_sync() if number < len(pieces) else contextlib.nullcontext():
                inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in piece.items()}
                with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                    loss = model(**inputs)[0] / len(pieces)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total.item()

    return step


def split_batch(batch: Mapping[str, Tensor], size: int) -> Iterator[Batch]:
    parts: Iterable[tuple[Tensor, ...]] = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
    for each in parts:
        yield dict(zip(batch, each, strict=True))


def measure_steps(step: Step, device: torch.device, *, warm_up: int, steps: int) -> dict[str, Any]:
    """Its `loss` is that of the first step, which sides that do the same work have in common."""
    first = step()
    for _ in range(warm_up - 1):
        step()
    took = []
    for _ in range(steps):
        finish(device)
        began_s = time.perf_counter()
        step()
        finish(device)
        took.append(time.perf_counter() - began_s)
    on_device = is_accelerator(device)
    return {
        "loss": first,
        "step_s": statistics.median(took),
        "peak_bytes": peak_memory_bytes(device) if on_device else None,
        "device": device_model(device) if on_device else "CPU",
    }


def finish(device: torch.device) -> None:
    if is_accelerator(device):
        wait_for_device(device)


if __name__ == "__main__":
    main()
