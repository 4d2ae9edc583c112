"""Every command in the pages' `bash` blocks is run here as it is printed, or stands in NOT_RUN with the reason.

That the others exist and have their options is in tests/unit/docs/test_commands.py. Commands of `console` blocks are in
test_readme.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from manager_world import PROGRAMS, ROOT, RunningManager
from waiting import DEADLINE_S

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])
BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    "python benchmarks/*": "takes minutes to hours; tests/integration/benchmarks has what they share",
    "PYTHONPATH=/tmp/torchft python benchmarks/*": "takes minutes, and needs torchft",
    "pip install *": "needs a package registry",
    "export OTEL_EXPORTER_OTLP_ENDPOINT=*": "needs a collector",
    "varuna export s3://*": "needs a cloud's store; tests/integration/varuna/checkpoint reads one from a stand-in",
    "varuna export /ckpt/llama --hf *": "needs a Llama; tests/e2e/test_hf_example.py exports a model of transformers",
    "varuna export CHECKPOINTS --hf *": "the same; tests/e2e/test_hf_example.py",
    "python -c *transformers import pipeline*": "needs the folder that the line before writes",
    "python -m varuna.launcher *--nservers 2*": "needs two machines; tests/integration/varuna/launching has one",
    "torchrun --nnodes=2 *": "needs two machines",
    "export MASTER_ADDR=*": "needs Slurm",
    "srun *": "needs Slurm",
    "mpirun *": "needs Open MPI and two machines",
    "torchrun *run_pretraining.py*": "needs NVIDIA's BERT; test_torchrun.py runs a script with its patch",
    "python -m varuna.diagnostics.timeline *": "needs a traced job; tests/e2e/test_traces_and_curves.py has one",
    "python examples/bert/*": "takes minutes and a corpus; tests/e2e/test_bert.py runs them on a small one",
    "python train.py --input_dir *": "needs the prepared corpus; tests/e2e/test_bert.py",
    "varuna submit examples/bert/*": "takes minutes and a corpus; tests/e2e/test_bert.py",
    "export VARUNA_CHECKPOINT_URL=*": "names a store of the reader's; test_elastic_torchrun.py has one of its own",
    "bash examples/launchers/torchrun/node.sh *": "needs several machines; test_elastic_torchrun.py runs it for four",
    "sbatch *": "needs Slurm; tests/integration/varuna/launching/test_slurm_requeue.py submits it",
    "kubectl apply *": "needs a cluster with Kubeflow; test_trainjob.py runs the manifest's command",
    "make venv *": "needs a package registry",
    "make gpu*": "needs a GPU",
    "make soak-goodput *": "takes minutes; tests/unit/benchmarks/test_goodput_played.py has what computes",
    ".venv/bin/python benchmarks/gpu.py *": "needs a GPU; tests/integration/benchmarks/test_gpu.py runs it without one",
    "varuna manager --provider static:*": "needs GPUs, as what follows; tests/e2e/test_providers.py has such a manager",
    "varuna token create gpu-1 *": "needs the manager before",
    "CUDA_VISIBLE_DEVICES=*": "needs GPUs",
    "varuna submit examples/gpt/job.yaml": "needs the manager before; test_readme.py submits it",
    "varuna export /tmp/varuna-bert/*": "needs the job before; tests/e2e/test_bert.py",
}
"""Patterns of commands that no test runs as they are printed, with the reason."""
PLANNING = ("varuna simulate *", "varuna estimate *", "varuna plan *", "varuna profile [!r]*")
TRAINING = (
    "varuna inspect train.py",
    "printf *",
    "python -m varuna.run_varuna *",
    "varuna export /ckpt/gpt *",
    "torchrun --standalone *train.py",
)
MIGRATING = ("cd examples/migrate",)
MANAGED = ("varuna submit examples/migrate/*", "varuna profile run *")
RUN = (*PLANNING, *TRAINING, *MIGRATING, *MANAGED)

TRAIN = """
import os

import torch
from torch import nn

from varuna import Varuna
from varuna.data import Batches


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def forward(self, x):
        return self.blocks(x).square().mean()


torch.manual_seed(0)
inputs = torch.randn(256, 8)
shape = {"stages": 2, "batch_size": 64, "chunk_size": 4} if "TORCHELASTIC_RUN_ID" in os.environ else {}
model = Varuna(Model(), get_batch_fn={"x": inputs[:2]}, ema=0.9, **shape)
model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
start = model.resume()
print(f"begins after step {start}", flush=True)
for step, batch in Batches([{"x": x} for x in inputs], first_step=start + 1, last_step=start + 4):
    loss, _, _ = model.step(batch)
    print(f"step {step} loss {loss:.4f}", flush=True)
if model.checkpoint_url:
    model.checkpoint()
"""


def commands() -> list[str]:
    """All commands of all bash blocks, each once, in the order of the pages. A continued line is one command."""
    found = (line.strip() for page in PAGES for block in BLOCK.findall(page.read_text()) for line in lines_of(block))
    return list(dict.fromkeys(line for line in found if line and not line.startswith("#")))


def lines_of(block: str) -> list[str]:
    return re.sub(r"\\\n\s*", "", block).splitlines()


def find(*patterns: str) -> list[str]:
    return [command for command in commands() if any(fnmatch(command, pattern) for pattern in patterns)]


def run(command: str, folder: Path, **environ: str) -> str:
    """Runs a command as a user would in a shell whose PATH has the environment's programs."""
    variables = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environ}
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_is_run_or_listed() -> None:
    for command in commands():
        listed = [pattern for pattern in NOT_RUN if fnmatch(command, pattern)]
        is_run = any(fnmatch(command, pattern) for pattern in RUN)
        assert bool(listed) != is_run, f"{command}: it must be run by a test of this file, or stand in NOT_RUN"
    for pattern in (*NOT_RUN, *RUN):
        assert find(pattern), f"no page has a command like {pattern}"


@pytest.mark.slow
def test_the_planning_commands_work_on_a_profile(tmp_path: Path) -> None:
    for name in ("P.json", "Q.json"):
        model = "--model gpt2 --layers 24 --hidden 256 --seq 128 --gpu v100-16gb --network ethernet-10g"
        run(f"varuna profile synth {model} --out {name}", tmp_path)
    trace = [f"{at * 600_000},add,node-{at}" for at in range(24)]
    (tmp_path / "history.csv").write_text("\n".join([*trace, "15000000,remove,node-3", "16000000,add,node-25"]) + "\n")
    for command in find(*PLANNING):
        assert run(command, tmp_path).strip(), command
    assert (tmp_path / "plan.svg").exists()


@pytest.mark.slow
def test_the_commands_without_a_manager_train_and_export(tmp_path: Path) -> None:
    """In the order of a user: look, train, go on, export; then by torchrun."""
    (tmp_path / "train.py").write_text(TRAIN)
    where: Mapping[str, str] = {"VARUNA_CHECKPOINT_URL": str(tmp_path / "ckpt" / "gpt")}
    ours = [command for command in find(*TRAINING) if "ddp_after.py" not in command]
    for command in (each for each in ours if each.startswith("varuna inspect")):
        assert "cut-point" in run(command, tmp_path), command
    for command in (each for each in ours if each.startswith("printf")):
        run(command, tmp_path)
    first, resume = (each for each in ours if each.startswith("python -m varuna.run_varuna"))
    assert "step 4 loss" in run(first, tmp_path, **where)
    assert "begins after step 4" in run(resume, tmp_path, **where)
    for command in (each for each in ours if each.startswith("varuna export")):
        local = command.replace("/ckpt/", f"{tmp_path}/ckpt/")
        run(local, tmp_path)
    assert {"model.safetensors", "averaged.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    (torchrun,) = (each for each in ours if each.startswith("torchrun"))
    assert "step 4 loss" in run(torchrun, tmp_path)


@pytest.mark.slow
def test_the_blocks_with_the_examples_run(running_manager: RunningManager, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "migrate", tmp_path / "examples" / "migrate")
    (block,) = (block for page in PAGES for block in BLOCK.findall(page.read_text()) if block.startswith(MIGRATING[0]))
    assert "step 128 loss" in run(block, tmp_path)

    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.yaml").write_text("name: small\nrun: python train.py\nglobal_batch: 8\n")
    for command in find(*MANAGED):
        if "lightning" in command:
            pytest.importorskip("lightning")
        output = run(command, tmp_path, VARUNA_MANAGER_URL=running_manager.url)
        assert "succeeded" in output or "--watch" not in command, output
