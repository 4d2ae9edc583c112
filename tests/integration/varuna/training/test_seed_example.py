"""A script in the shape of the seeds' example trains as plain PyTorch does, in every way that it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import seed_example_script
from agent_end import AgentEnd
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_agent.workers.rendezvous_ports import RendezvousPorts
from varuna_planner.profile.document import Profile
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from waiting import DEADLINE_S

SCRIPT = Path(seed_example_script.__file__)
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def trained(*arguments: str) -> dict[str, Any]:
    """By the script in this process."""
    found: list[dict[str, Any]] = []
    seed_example_script.main(arguments, found.append)
    (result,) = found
    return result


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return trained()


def assert_same(results: list[dict[str, Any]], plain: dict[str, Any], steps: slice) -> None:
    """The same numbers on every rank. Sums are in another order there: fp32's rounding."""
    for result in results:
        assert result["losses"] == pytest.approx(plain["losses"][steps], rel=1e-5)
        assert result["norms"] == pytest.approx(plain["norms"][steps], rel=1e-4)
        if result["steps"] == plain["steps"]:
            assert result["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-4)


def launch(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """By `run_varuna`, on two devices of this machine; what the ranks have written."""
    (folder / "machines").write_text("127.0.0.1\n")
    flags = ["--machine_list", "machines", "--gpus_per_node", "2", "--batch_size", "8", "--no_morphing"]
    result = subprocess.run(
        [sys.executable, "-m", "varuna.run_varuna", *flags, *arguments],
        cwd=folder,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def test_alone_it_trains_as_plain_pytorch(plain: dict[str, Any]) -> None:
    # Without the launcher the script is one process, which takes the whole batch.
    assert_same([trained("--varuna")], plain, slice(None))
    assert_same([trained("--varuna", "--chunk_size", "3")], plain, slice(None))


@pytest.mark.slow
def test_launched_it_trains_in_two_stages_and_goes_on_in_two_replicas(tmp_path: Path, plain: dict[str, Any]) -> None:
    save = ["--varuna", "--output_dir", str(tmp_path / "ckpt")]
    pipeline = launch(tmp_path, "--nstages", "2", "--chunk_size", "2", str(SCRIPT), *save, "--steps_this_run", "3")
    assert [result["steps"] for result in pipeline] == [3, 3]
    assert_same(pipeline, plain, slice(0, 3))

    resume = ["--nstages", "1", "--chunk_size", "3", "--resume", "--checkpoint_url", str(tmp_path / "ckpt")]
    both = launch(tmp_path, *resume, str(SCRIPT), *save, "--resume_from_checkpoint")
    replicas = [result for result in both if result["steps"] == 6]
    assert len(replicas) == 2
    assert_same(replicas, plain, slice(3, 6))


@pytest.mark.slow
def test_an_agent_starts_it_too(tmp_path: Path, plain: dict[str, Any]) -> None:
    # It makes its own process group first, on the port that the agent holds open for rank 0.
    sockets = RendezvousPorts("127.0.0.1")
    port = sockets.open_port()
    with AgentEnd() as first, AgentEnd() as second, closing(sockets):
        ranks = []
        for rank, agent in enumerate((first, second)):
            environment = WorkerEnvironment(
                job_id="seeds",
                generation=1,
                mode=Mode.TRAIN,
                rank=rank,
                local_rank=rank,
                world_size=2,
                rendezvous_host="127.0.0.1",
                rendezvous_port=port,
                plan=Plan(p=2, d=1, micro_batch=2, global_batch=8, stage_starts=(0, 1)),
                agent_socket=agent.path,
            )
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "varuna.launching.script", str(SCRIPT), "--varuna"],
                    cwd=tmp_path,
                    env={**ENVIRON, **environment.to_environ()},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            errors = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert [rank.returncode for rank in ranks] == [0, 0], errors
        for end in (first, second):
            end.wait_for(lambda message: message.step_done.step == len(plain["losses"]))
        reported_losses = [[step.loss for step in end.steps()] for end in (first, second)]
    assert_same([json.loads(path.read_text()) for path in tmp_path.glob("rank*.json")], plain, slice(None))
    assert reported_losses[0] == reported_losses[1] == pytest.approx(plain["losses"], rel=1e-5)


DIFFERENT_CHECKPOINTS = """
import json, os, sys
from pathlib import Path
from small_gpt import Task, example_batch, make_model, make_optimizer
from varuna import Varuna

store = json.loads(Path(sys.argv[1]).read_text())["store"]
model = Varuna(make_model(Task()), get_batch_fn=example_batch)
model.set_optimizer(make_optimizer(model.parameters(), Task()))
for step in (3, 4):
    model.checkpoint(store, step=step)
    model.load_checkpoint(store, step)
model.load_checkpoint(store, 3 + int(os.environ["RANK"]))
"""


def test_ranks_that_ask_for_different_checkpoints_are_told(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DIFFERENT_CHECKPOINTS)
    wanted = {"store": str(tmp_path / "store")}
    with Ranks(zygote, tmp_path, Task(), 2, 1, script=script, wanted=wanted) as world:
        assert world.exit_codes() == [1, 1], world.logs()
    for step in (3, 4):
        assert f"load_checkpoint({step}): other ranks give another iteration (the mean is 3.5)" in world.logs()


@pytest.mark.slow
def test_it_profiles_without_an_optimizer(tmp_path: Path) -> None:
    profiling = ["--profiling", "--output_dir", str(tmp_path)]
    for result in launch(tmp_path, "--nstages", "1", "--chunk_size", "2", str(SCRIPT), *profiling):
        assert result == {"sections": seed_example_script.LAYERS}
    profile = Profile.from_json((tmp_path / "profile.json").read_text())
    assert profile.micro_batches == (1, 2)
    # As for Adam, two numbers of the parameter's size. The tied weights are one parameter, in two sections.
    assert all(section.optimizer_bytes == 2 * section.parameter_bytes for section in profile.sections)
    assert profile.environment["ranks"] == "2"
    assert [shared.sections for shared in profile.shared_parameters] == [(0, 3)]
