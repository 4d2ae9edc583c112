"""Which ranks run where, what arguments they get, and what is refused before anything is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.launching.layout import LaunchError, RankLayout, make_script_arguments
from varuna.launching.machines import is_this_machine, make_launcher_command, read_env_file, read_machine_list
from varuna.launching.submit import make_job_document, parse_manager_address
from varuna_manager.domain.spec import JobSpec
from varuna_proto.environment import Mode, WorkerEnvironment
from waiting import DEADLINE_S


def environment(layout: RankLayout, rank: int) -> WorkerEnvironment:
    return layout.make_environment(
        rank, job_id="run", generation=3, host="10.0.0.1", port=7, checkpoint_url="/ckpt", device="cpu"
    )


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 30))
def test_every_rank_runs_once_on_the_first_machines(machines: int, gpus: int, p: int) -> None:
    if p > machines * gpus:
        with pytest.raises(LaunchError, match=r"lower --nstages or add machines"):
            RankLayout(machines=machines, gpus_per_node=gpus, p=p, global_batch=64, micro_batch=1)
        return
    layout = RankLayout(machines=machines, gpus_per_node=gpus, p=p, global_batch=64, micro_batch=1)
    ranks = [rank for machine in range(machines) for rank in layout.list_ranks(machine)]
    assert ranks == list(range(layout.world_size))
    assert layout.world_size == p * layout.d <= machines * gpus < p * (layout.d + 1)
    assert all(layout.list_ranks(machine) for machine in range(layout.machines_used))
    assert not any(layout.list_ranks(machine) for machine in range(layout.machines_used, machines))
    assert all(environment(layout, rank).local_rank < gpus for rank in ranks)


def test_scripts_of_the_seeds_are_told_their_place() -> None:
    layout = RankLayout(machines=2, gpus_per_node=2, p=2, global_batch=8, micro_batch=2)
    environment_of_rank = environment(layout, 3)
    assert (environment_of_rank.local_rank, environment_of_rank.world_size, environment_of_rank.generation) == (1, 4, 3)
    assert make_script_arguments(environment_of_rank, 20) == [
        "--rank=3",
        "--chunk_size=2",
        "--local_rank=1",
        "--stage_to_rank_map=0,2;1,3",
        "--batch-size=4",
        "--resume_step=20",
    ]
    assert "--resume_step" not in " ".join(make_script_arguments(environment_of_rank, None))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"p": 5}, "5 stages x 1 replicas need 5 GPUs, but there are 2 x 2 = 4"),
        ({"p": 2, "replicas": 3}, "2 stages x 3 replicas need 6 GPUs"),
        ({"p": 0}, "nstages 0: it must be at least 1"),
        ({"micro_batch": 9}, "chunk_size 9 exceeds batch_size 8"),
        ({"p": 1, "micro_batch": 4}, "4 replicas share only 2 micro-batches"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, int], says: str) -> None:
    sizes = {"machines": 2, "gpus_per_node": 2, "p": 2, "global_batch": 8, "micro_batch": 2, **change}
    with pytest.raises(LaunchError, match=re.escape(says)):
        RankLayout(**sizes)


def test_a_share_that_differs_between_replicas_cannot_be_an_argument() -> None:
    layout = RankLayout(machines=1, gpus_per_node=3, p=1, global_batch=8, micro_batch=1)
    with pytest.raises(LaunchError, match="batch_size 8 is not a multiple of the 3 replicas"):
        make_script_arguments(environment(layout, 0), None)


def test_shares_that_a_plan_makes_unequal_cannot_be_an_argument_either() -> None:
    launched = environment(RankLayout(machines=1, gpus_per_node=2, p=1, global_batch=8, micro_batch=2), 0)
    equal = replace(launched, plan=replace(launched.plan, shares=(2, 2)))
    assert make_script_arguments(equal, None) == make_script_arguments(launched, None)
    unequal = replace(launched, plan=replace(launched.plan, shares=(3, 1)))
    with pytest.raises(LaunchError, match=r"run 3, 1 micro-batches, but .* the same for all") as refused:
        make_script_arguments(unequal, None)
    assert "\n" not in str(refused.value)


def test_the_machine_list_is_one_address_per_line(tmp_path: Path) -> None:
    path = tmp_path / "machines"
    path.write_text("\n# the first\n10.0.0.4  # rack 1\nuser@node-5\n")
    assert read_machine_list(path) == ["10.0.0.4", "user@node-5"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("# none\n\n", "is empty"),
        ("-oProxyCommand=x\n", "'-oProxyCommand=x' is not an address"),
        ("a b\n", "'a b' is not an address"),
        ("127.0.0.1\n10.0.0.4\n", "begins with 127.0.0.1, where the other machines cannot reach rank 0"),
    ],
)
def test_a_bad_machine_list_is_explained(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "machines"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=re.escape(says)) as refused:
        read_machine_list(path)
    assert "\n" not in str(refused.value)


def test_an_env_file_is_read_as_a_shell_would(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# tokens\nexport A=1 B='two words'\nC=\"x#y\" # no\n\nD=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "x#y", "D": ""}
    path.write_text("A=1\nrm -rf\n")
    with pytest.raises(LaunchError, match="line 2: expected NAME=value, found 'rm'"):
        read_env_file(path)


@pytest.mark.parametrize(
    ("machine", "here"),
    [
        ("localhost", True),
        ("127.0.0.7", True),
        ("::1", True),
        ("me@127.0.0.1", True),
        ("10.0.0.4", False),
        ("n", False),
    ],
)
def test_only_loopback_addresses_need_no_ssh(machine: str, here: bool) -> None:
    assert is_this_machine(machine) is here


def test_the_far_shell_sees_the_words_that_were_meant() -> None:
    flags = ["--code_dir", "/a folder/$HOME", "train.py", "--text", "it's; `odd` \"\n"]
    *ssh, machine, line = make_launcher_command("me@10.0.0.4", "/opt/py thon", flags)
    assert (ssh[0], machine) == ("ssh", "me@10.0.0.4")
    assert "BatchMode=yes" in ssh
    assert shlex.split(line) == ["exec", "/opt/py thon", "-u", "-m", "varuna.launcher", *flags]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:8750"),
        ("host:99", "http://host:99"),
        ("http://host", "http://host:8750"),
        ("[::1]:5", "http://[::1]:5"),
    ],
)
def test_a_manager_is_named_by_host_or_url(given: str, url: str) -> None:
    assert parse_manager_address(given) == url


@pytest.mark.parametrize("given", ["host:port", "http://", "host:99999"])
def test_a_bad_manager_address_is_explained(given: str) -> None:
    with pytest.raises(LaunchError, match="give HOST or HOST:PORT"):
        parse_manager_address(given)


def test_the_job_is_one_that_the_manager_takes(tmp_path: Path) -> None:
    document = make_job_document(
        script="my run/train it.py",
        arguments=["--data", "a b"],
        workdir=tmp_path,
        global_batch=16,
        p=2,
        micro_batch=None,
        checkpoint_url="",
        env={"A": "1"},
        pass_arguments=True,
    )
    spec = JobSpec.model_validate(document)
    assert shlex.split(spec.run) == [
        *("python", "-u", "-m", "varuna.launching.script"),
        *("my run/train it.py", "--data", "a b"),
    ]
    assert (spec.plan.p, spec.plan.micro_batch, spec.checkpoint.url) == (2, None, None)
    assert spec.name.startswith("train-it-")


@pytest.mark.processes
@pytest.mark.parametrize("mode", Mode)
def test_workers_of_a_manager_get_the_same_arguments(tmp_path: Path, mode: Mode) -> None:
    (tmp_path / "echo.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    layout = RankLayout(machines=1, gpus_per_node=4, p=2, global_batch=8, micro_batch=2)
    variables = {**os.environ, **environment(layout, 1).to_environ(), "VARUNA_MODE": mode.value}
    command = [sys.executable, "-m", "varuna.launching.script", "echo.py", "--own"]
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert json.loads(result.stdout) == [*make_script_arguments(environment(layout, 1), None), "--own"]
