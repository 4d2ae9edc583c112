"""Memory of each process: a model built on the CPU, or on `meta` with its weights in files, and in plain PyTorch.

    python benchmarks/model_memory.py [--p 4] [--json]

A GPT-2 of transformers whose weights are in a safetensors file is trained for two steps of plain SGD: by one process of
plain PyTorch (`from_pretrained`), and by P stages of Varuna. The benchmark measures the peak of resident memory of each
process (`VmHWM`), once until the model was ready and once until the end, less the same run's with a tiny model, which
is PyTorch, transformers and the like. Last, `varuna export` of what was trained, for `from_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
STEPS, EXAMPLES, TOKENS = 2, 4, 32
KINDS = ("plain", "cpu", "meta")


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """One process."""

    kind: str
    rank: int
    own_bytes: int
    """Of the parameters that it trains."""
    built_bytes: int
    """The most that was resident until the model was ready to train."""
    peak_bytes: int
    """The same until the end, with gradients and activations."""
    loss: float


def worker(kind: str, folder: Path) -> MeasuredMemory:
    """One process of a run; of Varuna, its environment says which."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from varuna import Varuna

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder)
    batch = {"input_ids": torch.arange(EXAMPLES * TOKENS).view(EXAMPLES, TOKENS)}
    batch["labels"] = batch["input_ids"]
    loss = float("nan")
    if kind == "plain":
        model = AutoModelForCausalLM.from_pretrained(folder, config=config)
        model.train()
        built = _peak()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            result = model(**batch).loss
            result.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = result.item()
        own = sum(p.nbytes for p in model.parameters())
    else:
        if kind == "meta":
            with torch.device("meta"):
                hollow = AutoModelForCausalLM.from_config(config)
            stage = Varuna(hollow, get_batch_fn=batch, weights=folder)
        else:
            # Not by from_pretrained, which maps the file, so that only what is copied from it is in memory.
            stage = Varuna(AutoModelForCausalLM.from_config(config), get_batch_fn=batch, weights=folder)
        built = _peak()
        stage.set_optimizer(torch.optim.SGD(stage.parameters(), lr=1e-3))
        for _ in range(STEPS):
            loss, _, _ = stage.step(batch)
        stage.checkpoint(str(folder.parent / f"checkpoints-{kind}"))
        own = sum(p.nbytes for p in stage.parameters())
    return MeasuredMemory(
        kind=kind,
        rank=int(os.environ.get("RANK", "0")),
        own_bytes=own,
        built_bytes=built,
        peak_bytes=_peak(),
        loss=loss,
    )


def _peak() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def write_model(folder: Path, blocks: int, width: int, vocabulary: int = 50257) -> int:
    """A GPT-2 with random weights as `save_pretrained` writes it, in a process of its own; bytes of its parameters."""
    code = (
        "import sys, torch; from transformers import GPT2Config, GPT2LMHeadModel;"
        f"c = GPT2Config(n_layer={blocks}, n_embd={width}, n_head=8, n_positions=128, vocab_size={vocabulary},"
        " use_cache=False, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0);"
        "m = GPT2LMHeadModel(c); m.save_pretrained(sys.argv[1]); print(sum(p.nbytes for p in m.parameters()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def run(kind: str, folder: Path, p: int) -> list[MeasuredMemory]:
    """All processes of one kind of run."""
    out = folder.parent / f"out-{kind}"
    out.mkdir()
    script = [str(Path(__file__).resolve()), "--worker", kind, "--model", str(folder), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launcher = ["-m", "varuna.run_varuna", "--nstages", str(p), "--batch_size", str(EXAMPLES), "--chunk_size", "2"]
    machines = folder.parent / "machines.txt"
    machines.write_text("127.0.0.1\n")
    launcher += ["--gpus_per_node", str(p), "--no_morphing", "--no_arguments", "--machine_list", str(machines)]
    command = [sys.executable, *([] if kind == "plain" else launcher), *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder.parent)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = [MeasuredMemory(**json.loads(path.read_text())) for path in out.iterdir()]
    return sorted(found, key=lambda measured: measured.rank)


def export(folder: Path) -> dict[str, Any]:
    """Memory of `varuna export --hf`, less what importing it takes."""
    code = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]); import model_memory as memory;"
        "from varuna.checkpoint.export import export; before = memory._peak();"
        "done = export(sys.argv[1], Path(sys.argv[2]), hf=True);"
        "print(json.dumps({'bytes': done.bytes, 'peak_bytes': memory._peak() - before}))"
    )
    here = Path(__file__).resolve().parent
    arguments = [str(folder.parent / "checkpoints-meta"), str(folder.parent / "exported"), str(here)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--p", type=int, default=4, help="stages")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measured = worker(arguments.worker, arguments.model)
        (arguments.out / f"{measured.rank}.json").write_text(json.dumps(asdict(measured)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        tiny, large = Path(scratch) / "tiny" / "model", Path(scratch) / "large" / "model"
        write_model(tiny, arguments.blocks, 8, 128)
        model_bytes = write_model(large, arguments.blocks, arguments.width)
        found = [
            replace(each, built_bytes=each.built_bytes - base.built_bytes, peak_bytes=each.peak_bytes - base.peak_bytes)
            for kind in KINDS
            for base, each in zip(run(kind, tiny, arguments.p), run(kind, large, arguments.p), strict=True)
        ]
        exported = export(large)
    if arguments.json:
        report = {"model_bytes": model_bytes, "processes": [asdict(m) for m in found], "export": exported}
        print(json.dumps(report, indent=2))
        return
    print(f"GPT-2 with {arguments.blocks} blocks of width {arguments.width}: {model_bytes / MIB:.0f} MiB of parameters")
    print(f"{'model':8}{'rank':>5}{'own MiB':>10}{'built MiB':>11}{'/ model':>9}{'peak MiB':>10}{'/ model':>9}   loss")
    for each in found:
        built, peak = each.built_bytes / model_bytes, each.peak_bytes / model_bytes
        print(
            f"{each.kind:8}{each.rank:>5}{each.own_bytes / MIB:>10.0f}{each.built_bytes / MIB:>11.0f}{built:>9.2f}"
            f"{each.peak_bytes / MIB:>10.0f}{peak:>9.2f}   {each.loss:.6f}"
        )
    print(f"varuna export --hf: {exported['peak_bytes'] / MIB:.0f} MiB to write {exported['bytes'] / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
