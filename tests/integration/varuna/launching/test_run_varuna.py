"""`python -m varuna.run_varuna` with real launchers and ranks on this machine."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from repository import TRAINING_SCRIPTS
from seeds_script import SEEDS_SCRIPT
from small_gpt import Examples, Task, make_model, make_optimizer
from varuna.data import Batches
from waiting import DEADLINE_S, wait_until

SIZES = ("--nstages", "2", "--batch_size", "8", "--chunk_size", "2")

PROBE = """
import json, os, pathlib, signal, sys, time

def has_ended(place):
    if not os.path.exists(place):
        return False
    pid = json.loads(pathlib.Path(place).read_text())["pid"]
    try:
        return ") Z " in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True

rank = int(os.environ["RANK"])
place = {"pid": os.getpid(), "arguments": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd()}
pathlib.Path(f"part{rank}").write_text(json.dumps(place))
os.rename(f"part{rank}", f"rank{rank}.json")
fault = os.environ.get(f"FAULT_{rank}")
if fault == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while fault == "76" and not has_ended("rank3.json"):
    time.sleep(0.02)  # no peer is lost before it is gone
if fault:
    sys.exit(int(fault))
print("hello from", rank)
if os.environ.get("STAY"):
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "machines").write_text("127.0.0.1\nlocalhost\n")
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "varuna.run_varuna", "--machine_list", "machines", "--gpus_per_node", "2", *arguments]


def run(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def read_places(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def all_gone(folder: Path) -> bool:
    """Whether all ranks have ended (a zombie that init has yet to reap does not)."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(runs(rank["pid"]) for rank in read_places(folder))


def test_all_ranks_are_told_their_place(folder: Path) -> None:
    (folder / "env").write_text("export TOKEN='a b'\nVARUNA_CHECKPOINT_URL=ckpt\n")
    result = run(folder, *SIZES, "--env_file", "env", "probe.py", "--own", "it's")
    assert result.returncode == 0, result.stderr
    ranks = read_places(folder)
    assert [rank["arguments"] for rank in ranks] == [
        [
            *(f"--rank={rank}", "--chunk_size=2", f"--local_rank={rank % 2}", "--stage_to_rank_map=0,2;1,3"),
            *("--batch-size=4", "--own", "it's"),
        ]
        for rank in range(4)
    ]
    environs = [rank["environ"] for rank in ranks]
    assert {environ["TOKEN"] for environ in environs} == {"a b"}
    assert {environ["VARUNA_CHECKPOINT_URL"] for environ in environs} == {str(folder / "ckpt")}
    assert len({(environ["MASTER_PORT"], environ["VARUNA_JOB_ID"]) for environ in environs}) == 1
    assert sorted(result.stdout.splitlines()) == [f"hello from {rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"FAULT_3": "7"}, 7),
        ({"FAULT_0": "kill"}, 128 + signal.SIGKILL),
        ({"FAULT_0": "76", "FAULT_1": "76", "FAULT_3": "9"}, 9),
    ],
    ids=["exit", "killed", "peers-of-the-failed"],
)
def test_the_first_failure_ends_all_and_is_the_exit_code(folder: Path, faults: dict[str, str], code: int) -> None:
    result = run(folder, *SIZES, "probe.py", env={"STAY": "1", **faults})
    assert result.returncode == code, result.stderr
    assert all_gone(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_and_no_rank_is_orphaned(folder: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        command(*SIZES, "probe.py"), cwd=folder, env={**os.environ, "STAY": "1"}, stderr=subprocess.PIPE
    ) as running:
        wait_until(lambda: len(read_places(folder)) == 4)
        running.send_signal(number)
        code = running.wait(DEADLINE_S)
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    wait_until(lambda: all_gone(folder))


def test_a_signal_that_another_thread_takes_ends_all(folder: Path) -> None:
    """Linux gives a signal to the main thread unless it is stopped as the signal comes, as by a debugger."""
    with subprocess.Popen(
        command(*SIZES, "probe.py"), cwd=folder, env={**os.environ, "STAY": "1"}, stderr=subprocess.PIPE
    ) as running:
        wait_until(lambda: len(read_places(folder)) == 4)
        wait_until(lambda: psutil.Process(running.pid).status() == psutil.STATUS_SLEEPING)
        other = next(thread.id for thread in psutil.Process(running.pid).threads() if thread.id != running.pid)
        assert ctypes.CDLL(None).tgkill(running.pid, other, int(signal.SIGTERM)) == 0
        assert running.wait(DEADLINE_S) == 128 + signal.SIGTERM
    wait_until(lambda: all_gone(folder))


def test_a_killed_launcher_takes_its_ranks_along(folder: Path) -> None:
    with subprocess.Popen(
        command(*SIZES, "probe.py"), cwd=folder, env={**os.environ, "STAY": "1"}, stderr=subprocess.PIPE
    ) as running:
        wait_until(lambda: len(read_places(folder)) == 4)
        psutil.Process(read_places(folder)[2]["pid"]).parent().kill()
        assert running.wait(DEADLINE_S) == 128 + signal.SIGKILL
    wait_until(lambda: all_gone(folder))


def test_other_machines_are_reached_through_ssh(folder: Path) -> None:
    # There is no ssh server here. This program stands for the client and runs the command as the other machine would.
    programs = folder / "bin"
    programs.mkdir()
    ssh = programs / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != "${1#-}" ]; do if [ "$1" = -o ]; then shift; fi; shift; done\n'
        f'echo "$1" >> {folder}/reached; shift; cd /; exec env -i PATH=/usr/bin:/bin sh -c "$*"\n'
    )
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (folder / "machines").write_text("0.0.0.0\nuser@0.0.0.0\n")  # an address of this machine that is not loopback
    (folder / "env").write_text("TOKEN='it is; \"odd\"'\n")
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "LOCAL_ONLY": "1"}
    result = run(folder, *SIZES, "--env_file", "env", "probe.py", "a b", env=environ)
    assert result.returncode == 0, result.stderr
    assert (folder / "reached").read_text().split() == ["0.0.0.0", "user@0.0.0.0"]
    ranks = read_places(folder)
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["arguments"][-1] == "a b"
        assert rank["environ"]["TOKEN"] == 'it is; "odd"'
        assert "LOCAL_ONLY" not in rank["environ"]
        assert rank["cwd"] == str(folder)
    result = run(folder, *SIZES, "probe.py", env={**environ, "PATH": "/nowhere"})
    assert (result.returncode, result.stderr.count("\n")) == (1, 2)
    assert "cannot start a launcher for 0.0.0.0" in result.stderr


@pytest.mark.slow
def test_a_run_is_resumed_with_the_flags_that_it_was_started_with(folder: Path) -> None:
    (folder / "env").write_text("TOKEN=x\n")
    started = ["--checkpoint_url", "ckpt", "--env_file", "env", "--device", "cpu", "probe.py", "--own", "it's"]
    assert run(folder, *SIZES, *started).returncode == 0
    first = read_places(folder)
    # From elsewhere, with the machine that is left, and with another micro-batch.
    (folder / "machines").write_text("127.0.0.1\n")
    resume = [sys.executable, "-m", "varuna.run_varuna", "--resume", "--code_dir", str(folder), "--chunk_size", "1"]
    result = subprocess.run(resume, cwd="/", capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    assert "P=2 stages x D=1 replicas on 1 of 1 machines" in result.stderr
    again = read_places(folder)[:2]
    assert [rank["arguments"] for rank in again] == [
        [
            *(f"--rank={rank}", "--chunk_size=1", f"--local_rank={rank}", "--stage_to_rank_map=0;1"),
            *("--batch-size=8", "--own", "it's"),
        ]
        for rank in (0, 1)
    ]
    for name in ("TOKEN", "VARUNA_CHECKPOINT_URL", "VARUNA_DEVICE"):
        assert {rank["environ"][name] for rank in again} == {first[0]["environ"][name]}
    other = run(folder, "--resume", "other.py")  # that nobody knows
    assert "--batch_size is missing" in other.stderr


def test_the_step_to_resume_from_is_an_argument_and_a_variable(folder: Path) -> None:
    assert run(folder, *SIZES, "--resume_step", "7", "probe.py").returncode == 0
    for rank in read_places(folder):
        assert rank["arguments"][-1] == "--resume_step=7"
        assert rank["environ"]["VARUNA_RESUME_STEP"] == "7"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nstages", "2", "--chunk_size", "2", "probe.py"], "--batch_size is missing"),
        (["--batch_size", "8", "--chunk_size", "2", "probe.py"], "--nstages is missing: only a manager"),
        ([*SIZES, "--machine_list", "none", "probe.py"], "machine_list none: No such file or directory"),
        ([*SIZES, "--resume", "probe.py"], "--resume needs a checkpoint store"),
        (["--resume"], "no script and no run to resume in this folder"),
        ([*SIZES], "no script: give its path"),
        ([*SIZES, "--manager_ip", "127.0.0.1:9", "probe.py"], "no manager answers at http://127.0.0.1:9"),
        ([*SIZES, "absent.py"], "absent.py: give its path, or --code_dir"),
        (["--nstages", "1", "--batch_size", "6", "--chunk_size", "1", "probe.py"], "not a multiple of the 4 replicas"),
        (["--nstages", "5", "--batch_size", "8", "--chunk_size", "1", "probe.py"], "lower --nstages or add machines"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(folder: Path, arguments: list[str], says: str) -> None:
    result = run(folder, *arguments)
    assert result.returncode == 1
    [line] = [line for line in result.stderr.splitlines() if says in line]
    assert line.startswith(("run_varuna: ", "varuna.launcher: "))
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_script_of_the_seeds_trains_as_one_process_does_and_resumes(folder: Path) -> None:
    (folder / "train.py").write_text(SEEDS_SCRIPT)
    (folder / "machines").write_text("127.0.0.1\n")
    env = {"PYTHONPATH": str(TRAINING_SCRIPTS)}
    flags = [*SIZES, "--checkpoint_url", "store", "--no_morphing"]
    first = run(folder, *flags, "train.py", "--steps", "2", "--save", "store", env=env)
    assert first.returncode == 0, first.stderr
    then = run(folder, "--resume", "train.py", "--steps", "4", "--save", "store", env=env)
    assert then.returncode == 0, then.stderr
    losses = [json.loads((folder / f"losses{rank}-{steps}.json").read_text()) for steps in (2, 4) for rank in (0, 1)]
    assert [(stage, replica) for stage, replica, _ in losses] == [(0, 0), (1, 0)] * 2
    assert losses[1][2] + losses[3][2] == pytest.approx(train_plainly_at_one_rate(), rel=1e-5)


def train_plainly_at_one_rate() -> list[float]:
    """The script has no scheduler."""
    task = Task()
    model = make_model(task)
    optimizer = make_optimizer(model.parameters(), task)
    losses = []
    for _, batch in Batches(Examples(), global_batch=8, last_step=4, environ={}):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OWN_GROUP_SCRIPT = """
import os, sys, time
import torch
from torch import distributed as dist
from small_gpt import Task, example_batch, make_model, make_optimizer
from varuna import Varuna

class SlowEnd:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="env://")
model = Varuna(make_model(Task()), get_batch_fn=example_batch, batch_size=8)
model.set_optimizer(make_optimizer(model.parameters(), Task()))
model.step(example_batch(8))
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2
if os.environ["RANK"] == "1":
    sys.slow_end = SlowEnd()  # the interpreter still shuts down here when the other rank is gone
"""


@pytest.mark.slow
def test_a_script_may_make_its_own_process_group_first_and_ends_well(folder: Path) -> None:
    (folder / "train.py").write_text(OWN_GROUP_SCRIPT)
    (folder / "machines").write_text("127.0.0.1\n")
    result = run(folder, *SIZES, "--no_arguments", "train.py", env={"PYTHONPATH": str(TRAINING_SCRIPTS)})
    assert result.returncode == 0, result.stderr


def test_lines_of_several_ranks_are_never_mixed(folder: Path) -> None:
    (folder / "talk.py").write_text(
        "import os, sys\n"
        "for number in range(200):\n"
        "    for stream in (sys.stdout, sys.stderr):\n"
        "        print('rank', os.environ['RANK'], 'says', number, file=stream)\n"
        "sys.stdout.write('the end')\n"
    )
    result = run(folder, *SIZES, "--no_arguments", "talk.py")
    assert result.returncode == 0, result.stderr
    whole = [f"rank {rank} says {number}" for rank in range(4) for number in range(200)]
    assert sorted(result.stdout.splitlines()) == sorted([*whole, *["the end"] * 4])
    assert sorted(line for line in result.stderr.splitlines() if "says" in line) == sorted(whole)
