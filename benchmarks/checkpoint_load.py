"""Peak host memory and time of loading a checkpoint, and bytes written for a model with a frozen base.

    python benchmarks/checkpoint_load.py [--megabytes 600] [--json]

`values` is the model with AdamW; the load happens in a process of its own, whose peak is compared with what it had
before. The figure to watch is `staged_bytes`: what the load takes beyond the state itself, which the process keeps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from varuna.checkpoint import CheckpointWriter, ShapePosition, TrainingState, load_checkpoint

SECTIONS = 12
SAVES = 6


def make_state(megabytes: int, *, frozen_share: float = 0.0) -> TrainingState:
    """Values, and AdamW's two moments of what is not frozen, of `megabytes` together (as if nothing was frozen)."""
    width = 1024
    rows = megabytes * 2**20 // 3 // 4 // width // SECTIONS
    frozen_rows = int(rows * frozen_share)
    parameters: dict[str, nn.Parameter] = {}
    for section in range(SECTIONS):
        parameters[f"{section}.weight"] = nn.Parameter(torch.ones(rows - frozen_rows, width))
        if frozen_rows:
            parameters[f"{section}.base"] = nn.Parameter(torch.ones(frozen_rows, width), requires_grad=False)
    trained = [value for value in parameters.values() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for value in trained:
        optimizer.state[value] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones_like(value.data),
            "exp_avg_sq": torch.ones_like(value.data),
        }
    return TrainingState(
        sections=range(SECTIONS),
        section_count=SECTIONS,
        parameters=parameters,
        section_of={name: int(name.split(".")[0]) for name in parameters},
        optimizers=[optimizer],
    )


def save(url: str, step: int, state: TrainingState) -> None:
    checkpointer = CheckpointWriter(url, generation=1, position=ShapePosition(rank=0, p=1, d=1))
    checkpointer.start_save(step, state)
    outcome = checkpointer.wait()
    assert outcome is not None
    assert outcome.result == "committed", outcome.error


def measure_load(url: str, megabytes: int) -> dict[str, Any]:
    """In this process, which has done nothing else."""
    state = make_state(megabytes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("VmRSS")
    began_s = time.perf_counter()
    loaded = load_checkpoint(url, 1, state)
    load_s = time.perf_counter() - began_s
    peak = _memory("VmHWM")
    return {"load_s": round(load_s, 3), "read_bytes": loaded.bytes_read, "staged_bytes": peak - before}


def _memory(key: str) -> int:
    """Bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure_frozen(megabytes: int) -> dict[str, Any]:
    """Bytes that each of some saves writes for a model with 99 % of its parameters frozen."""
    state = make_state(megabytes, frozen_share=0.99)
    written = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, SAVES + 1):
            save(folder, step, state)
            files = (Path(folder) / f"varuna_ckpt_{step}").glob("*.safetensors")
            written.append(sum(file.stat().st_size for file in files))
    return {"written_bytes": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=600, help="values and optimizer state together")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", metavar="URL", help="what this program calls itself with")
    given = parser.parse_args()
    if given.load:
        print(json.dumps(measure_load(given.load, given.megabytes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1, make_state(given.megabytes))
        command = [sys.executable, __file__, "--load", folder, "--megabytes", str(given.megabytes)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    result |= {"state_bytes": given.megabytes * 2**20, **measure_frozen(given.megabytes)}
    if given.json:
        print(json.dumps(result, indent=2))
        return
    read, staged = result["read_bytes"] / 2**20, result["staged_bytes"] / 2**20
    print(f"load: {read:.0f} MiB in {result['load_s']} s, {staged:.0f} MiB of host memory more at the peak")
    print("saves with 99 % frozen:", ", ".join(f"{size / 2**20:.1f} MiB" for size in result["written_bytes"]))


if __name__ == "__main__":
    main()
