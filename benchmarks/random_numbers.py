"""The cost of random numbers that belong to examples: the example GPT with dropout, with such numbers and without.

Both sides train the same model in one process, on one thread, taking turns round by round; their order changes each
round. A round's figure is a ratio of times. The report has the median of all rounds, of times by the wall clock and of
CPU time: on a machine with other work to do, the latter varies less. On a machine with a GPU, that is what trains.

    python benchmarks/random_numbers.py --rounds 10
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

from model import GPT, GPTConfig  # noqa: E402
from varuna import Varuna  # noqa: E402

Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--examples", type=int, default=8, help="examples of a batch")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 8], help="examples in a micro-batch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--window", type=int, default=GPTConfig.window, help="tokens of an example")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {str(chunk): measure(given, chunk) for chunk in given.chunks}
    report = {"by_micro_batch": found, "torch": torch.__version__, "threads": 1}
    if given.json:
        print(json.dumps(report, indent=1))
        return
    for chunk, row in found.items():
        print(
            f"micro-batch {chunk:>3}: a step takes {row['ratio']:.3f} times as long ({row['cpu_ratio']:.3f} by CPU "
            f"time), {row['step_s'] * 1e3:.0f} ms instead of {row['plain_step_s'] * 1e3:.0f} ms"
        )


def measure(given: argparse.Namespace, chunk: int) -> dict[str, Any]:
    """The medians, for micro-batches of `chunk` examples."""
    sides = [make_step(given, chunk, by_example) for by_example in (True, False)]
    for step in sides:
        step()
    rounds = [take_turns(sides, given.steps, turn) for turn in range(given.rounds)]
    return {
        "ratio": statistics.median(ours[0] / plain[0] for ours, plain in rounds),
        "cpu_ratio": statistics.median(ours[1] / plain[1] for ours, plain in rounds),
        "step_s": statistics.median(ours[0] for ours, _ in rounds) / given.steps,
        "plain_step_s": statistics.median(plain[0] for _, plain in rounds) / given.steps,
    }


def make_step(given: argparse.Namespace, chunk: int, by_example: bool) -> Step:
    config = GPTConfig(width=given.width, window=given.window, dropout=given.dropout)
    torch.manual_seed(0)

    def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
        tokens = torch.randint(config.vocabulary, (size, config.window + 1), device=device)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    model = Varuna(
        GPT(config),
        get_batch_fn=batch,
        batch_size=given.examples,
        chunk_size=chunk,
        random_by_example=by_example,
    )
    model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    examples = batch(given.examples)
    return lambda: model.step(examples)


if __name__ == "__main__":
    main()
