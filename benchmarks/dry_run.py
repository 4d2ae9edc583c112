"""What the dry run of a model takes, which each process of a job makes when it starts, for the example GPT.

The other side is torch alone: the same forwards, of two and of four examples, on fake tensors, with nothing recorded.
Both take turns in one process, on one thread; their order changes each round. A round before that does not count, in
which torch imports what it needs. Times are of the processor.

Dry runs of a process know what operations gave in those before. `first` is the time in a process that has run another
model, of another width, but not this one.

    python benchmarks/dry_run.py --blocks 6 54
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpt"))

import torch  # noqa: E402
from _turns import take_turns  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from varuna.partition import trace  # noqa: E402

EXAMPLES = (2, 4)
"""Of the forwards of a dry run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 54])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warm_up = GPTConfig(width=32)
    run_dry(warm_up)()
    run_fake(warm_up)()
    found = {str(blocks): measure(GPTConfig(blocks=blocks), given.rounds) for blocks in given.blocks}
    report = {"by_blocks": found, "torch": torch.__version__, "threads": 1}
    if given.json:
        print(json.dumps(report, indent=1))
        return
    for blocks, row in found.items():
        print(
            f"{blocks:>3} blocks: {row['dry_run_s'] * 1e3:.0f} ms (first {row['first_s'] * 1e3:.0f} ms), torch alone "
            f"{row['torch_s'] * 1e3:.0f} ms: ratio {row['ratio']:.2f}"
        )


def measure(config: GPTConfig, rounds: int) -> dict[str, Any]:
    """The first dry run's time, and the medians of the rounds after it."""
    sides = [run_dry(config), run_fake(config)]

    def take_turn(turn: int) -> list[float]:
        return [cpu_s for _, cpu_s in take_turns(sides, 1, turn)]

    first, *turns = map(take_turn, range(1, rounds + 2))
    return {
        "first_s": first[0],
        "dry_run_s": statistics.median(ours for ours, _ in turns),
        "torch_s": statistics.median(alone for _, alone in turns),
        "ratio": statistics.median(ours / alone for ours, alone in turns),
    }


def run_dry(config: GPTConfig) -> Callable[[], object]:
    with torch.device("meta"):
        model = GPT(config)
    examples = make_batch(config, 2)
    return lambda: trace(model, examples)


def run_fake(config: GPTConfig) -> Callable[[], object]:
    mode = FakeTensorMode()
    with mode:
        model = GPT(config)
        batches = [make_batch(config, size) for size in EXAMPLES]

    def run() -> None:
        with mode:
            for batch in batches:
                model(**batch)

    return run


def make_batch(config: GPTConfig, size: int) -> dict[str, Tensor]:
    tokens = torch.randint(config.vocabulary, (size, config.window + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


if __name__ == "__main__":
    main()
