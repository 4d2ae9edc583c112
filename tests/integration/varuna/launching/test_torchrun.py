"""torchrun starts scripts as they are: NVIDIA's BERT with Varuna's published patch, and one whose ranks die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nvidia_bert_script
import small_gpt
from seed_example_script import LAYERS, pretraining_dataset
from varuna_planner.profile.document import Profile
from waiting import DEADLINE_S

BERT = Path(nvidia_bert_script.__file__)
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, script: Path, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    flags = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(script), *arguments],
        env={**ENVIRON, "PYTHONPATH": str(BERT.parent)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """The arguments for input and output."""
    for name in ("input", "output"):
        (tmp_path / name).mkdir()
    torch.save(pretraining_dataset().tensors, tmp_path / "input" / "training_shard.pt")
    return ["--input_dir", str(tmp_path / "input"), "--output_dir", str(tmp_path / "output")]


def train(
    folders: list[str], stage_to_rank_map: str, *, steps: int, resume_step: int | None = None
) -> list[dict[str, Any]]:
    """What all ranks report; the global batch is 8."""
    stages = stage_to_rank_map.removesuffix(";").split(";")
    replicas = len(stages[0].split(","))
    plan = [f"--stage_to_rank_map={stage_to_rank_map}", "--chunk_size=2", f"--batch-size={8 // replicas}"]
    resume = [] if resume_step is None else ["--resume_from_checkpoint", f"--resume_step={resume_step}"]
    world_size = len(stages) * replicas
    result = torchrun(world_size, BERT, *folders, "--varuna", *plan, *resume, f"--steps_this_run={steps}")
    assert result.returncode == 0, result.stderr
    done = steps + (resume_step or 0)
    return [read(folders, done, rank) for rank in range(world_size)]


def read(folders: list[str], steps: int, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(Path(folders[-1], f"log-{steps}-rank{rank}.json").read_text())
    return results


def train_plainly(folders: list[str], steps: int) -> dict[str, Any]:
    command = [sys.executable, str(BERT), *folders, f"--steps_this_run={steps}"]
    subprocess.run(command, env={**ENVIRON, "PYTHONPATH": str(BERT.parent)}, timeout=DEADLINE_S, check=True)
    return read(folders, steps, 0)


def assert_same(ranks: list[dict[str, Any]], plain: dict[str, Any], steps: slice) -> None:
    for rank in ranks:
        assert rank["losses"] == pytest.approx(plain["losses"][steps], rel=1e-5)
        assert rank["rates"] == pytest.approx(plain["rates"][steps], rel=1e-12)


@pytest.mark.slow
def test_nvidias_bert_trains_and_goes_on_in_other_shapes(folders: list[str]) -> None:
    plain = train_plainly(folders, 6)
    assert_same(train(folders, "0;1;", steps=2), plain, slice(0, 2))
    assert_same(train(folders, "0,2;1,3;", steps=2, resume_step=2), plain, slice(2, 4))
    assert_same(train(folders, "0,1;", steps=2, resume_step=4), plain, slice(4, 6))


@pytest.mark.slow
def test_nvidias_bert_is_profiled_by_all_processes(folders: list[str]) -> None:
    result = torchrun(2, BERT, *folders, "--profiling")
    assert result.returncode == 0, result.stderr
    profile = Profile.from_json(Path(folders[-1], "profile.json").read_text())
    assert (len(profile.sections), profile.environment["ranks"]) == (LAYERS, "2")


DYING = """
import os, signal, sys, time
from pathlib import Path
from small_gpt import Examples, Task, example_batch, make_model, make_optimizer, make_scheduler
from varuna import Varuna
from varuna.data import Batches

task, out = Task(steps=5), sys.argv[1]
model = Varuna(make_model(task), get_batch_fn=example_batch, batch_size=8, chunk_size=2, stages=2)
optimizer = make_optimizer(model.parameters(), task)
model.set_optimizer(optimizer)
scheduler = make_scheduler(optimizer)
model.register_state("scheduler", scheduler)
for step, batch in Batches(Examples(), first_step=model.resume() + 1, last_step=task.steps):
    if step == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while "\\n3 " not in Path(f"{out}/rank0.txt").read_text():
            time.sleep(0.02)  # rank 0 may still be in step 3
        os.kill(os.getpid(), signal.SIGKILL)
    loss, _, _ = model.step(batch)
    scheduler.step()
    with open(f"{out}/rank{os.environ['RANK']}.txt", "a") as log:
        log.write(f"{step} {loss}\\n")
    if step == 2:
        model.checkpoint()
"""


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_and_they_go_on_from_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DYING)
    monkeypatch.setitem(ENVIRON, "VARUNA_CHECKPOINT_URL", str(tmp_path / "store"))
    result = torchrun(2, script, str(tmp_path), restarts=1)
    assert result.returncode == 0, result.stderr
    plain = small_gpt.train_plainly(small_gpt.Task(steps=5)).losses
    for rank in (0, 1):
        lines = [line.split() for line in (tmp_path / f"rank{rank}.txt").read_text().splitlines()]
        assert [int(step) for step, _ in lines] == [1, 2, 3, 3, 4, 5]
        assert [float(loss) for _, loss in lines] == pytest.approx([*plain[:3], *plain[2:]], rel=1e-5)
