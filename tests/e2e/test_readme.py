"""The commands in the README and the docs work exactly as they are printed.

Those for jobs are run by `make test-slow`; that all commands exist and have these options is in tests/unit/docs.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from manager_world import PROGRAMS, ROOT, RunningManager, run_varuna
from varuna_client import Client
from varuna_client.jobfile.schema import KEYS
from waiting import DEADLINE_S, wait_until

PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])
FLEET_PAGES = frozenset({"ec2.md", "gce.md", "kubernetes.md", "pools.md", "slurm.md", "writing-a-provider.md"})
"""Their YAML is settings of a provider."""


def blocks(language: str) -> list[tuple[Path, str]]:
    """The fenced blocks of a language on all pages."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page, block) for page in PAGES for block in pattern.findall(page.read_text())]


def commands() -> list[str]:
    """Every command on all pages, each once, in the order of the pages."""
    lines = [line for _, block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), "a console block shows commands, each after '$ '"
    return list(dict.fromkeys(line.removeprefix("$ ") for line in lines))


def varuna_commands(*names: str) -> list[list[str]]:
    """The arguments of the pages' commands `.venv/bin/varuna <one of names>`."""
    found = [shlex.split(command)[1:] for command in commands() if command.startswith(".venv/bin/varuna ")]
    return [arguments for arguments in found if arguments[0] in names]


RUN_BY_OTHERS = {"manager", "demo"}
"""`varuna manager` is the fixture, and `varuna demo --short` is test_demo.py."""
ASKING = ("ps", "show", "events", "logs", "vms", "config")
FOLLOWING = ("watch", "-f")
"""Words of commands that go on until the job is over."""
PLANNING = ("estimate",)
CHECKING = ("validate",)
"""Commands that need no manager."""


def test_the_pages_have_no_command_that_is_not_tried_here() -> None:
    known = {"--help", "submit", "watch", "drain", "cancel", *ASKING, *PLANNING, *CHECKING, *RUN_BY_OTHERS}
    for command in commands():
        program, *arguments = shlex.split(command)
        if program == ".venv/bin/varuna":
            assert arguments[0] in known, command
        else:
            assert program in ("make", ".venv/bin/python"), command


def test_the_first_screen_has_both_commands() -> None:
    first = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("$ ")][:2]
    assert first == ["$ make demo", "$ make test"]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_every_make_target_exists(command: str) -> None:
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [program, "-n", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    targets = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout
    assert f"make {arguments[0]} " in targets


@pytest.mark.slow
@pytest.mark.parametrize("arguments", varuna_commands(*RUN_BY_OTHERS), ids=" ".join)
def test_the_long_running_commands_take_their_options(arguments: list[str]) -> None:
    done = run_varuna(*arguments, "--help")
    assert done.returncode == 0, done.stderr
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, id=" ".join(arguments), marks=pytest.mark.slow if number else ())
        for number, arguments in enumerate(varuna_commands(*PLANNING))
    ],
)
def test_the_planning_commands_give_a_plan(arguments: list[str]) -> None:
    done = run_varuna(*arguments)
    assert done.returncode == 0, done.stderr
    assert re.search(r"plan +[0-9]+×[0-9]+, micro-batch [0-9]+", done.stdout)
    assert "cost" in done.stdout


@pytest.mark.parametrize("arguments", varuna_commands(*CHECKING), ids=" ".join)
def test_the_job_files_are_fine(arguments: list[str]) -> None:
    done = run_varuna(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("e2e")
def test_the_commands_for_jobs_do_what_they_say(running_manager: RunningManager, tmp_path: Path) -> None:
    endless_example(tmp_path)
    assert "submit" in running_manager.varuna("--help").stdout
    *asking, submit = sorted(varuna_commands("submit"), key=lambda arguments: "--dry-run" not in arguments)
    assert all("--dry-run" in arguments for arguments in asking)
    for arguments in (*asking, submit):
        done = running_manager.varuna(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "profile" in done.stdout, "what would run"
    with running_manager.client() as client:
        wait_until(lambda: client.job("gpt")["step"] > 0, "the first step")

    following: list[Follower] = []
    for arguments in varuna_commands(*ASKING, "watch"):
        if any(word in FOLLOWING for word in arguments):
            following.append(Follower(running_manager, arguments, tmp_path / f"following-{len(following)}"))
            continue
        done = running_manager.varuna(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        assert done.stdout.strip(), arguments

    for follower in following:  # each follows the job's first shape
        wait_until(follower.output.read_text, f"what {follower.arguments} prints")

    # A VM is drained: the job morphs, and goes on. The plan may have left the page's VM idle.
    ((command, _),) = varuna_commands("drain")
    with running_manager.client() as client:
        before = client.job("gpt")["generation"]
        vm_id = client.generations("gpt")[-1]["placement"][0]["vm_id"]
        assert running_manager.varuna(command, vm_id).returncode == 0
        wait_until(lambda: _trains_after(client, before), "the first step in another shape")

    (cancel,) = varuna_commands("cancel")
    assert running_manager.varuna(*cancel).returncode == 0
    with running_manager.client() as client:
        wait_until(lambda: client.job("gpt")["state"] == "cancelled", "the job's end")
    for follower in following:
        code, is_log = follower.process.wait(DEADLINE_S), "logs" in follower.arguments
        assert code == (0 if is_log else 1), "a job that was cancelled did not succeed"
        assert ("step 1 loss" if is_log else "gpt: step ") in follower.output.read_text()


def endless_example(folder: Path) -> None:
    """Copy the example into `folder` as the pages' commands name it, with a job that only `cancel` ends."""
    example = shutil.copytree(ROOT / "examples" / "gpt", folder / "examples" / "gpt")
    text = (example / "job.yaml").read_text()
    assert "--steps 120" in text
    (example / "job.yaml").write_text(text.replace("--steps 120", "--steps 1000000"))


def _trains_after(client: Client, generation: int | None) -> bool:
    newest = client.generations("gpt", brief=True)[-1]
    return newest["number"] > (generation or 0) and newest["started_at"] is not None


class Follower:
    """A command that goes on until the job is over. `output`: the file for what it prints."""

    def __init__(self, manager: RunningManager, arguments: list[str], output: Path) -> None:
        self.arguments, self.output = arguments, output
        command = [str(PROGRAMS / "varuna"), *arguments, "--manager-url", manager.url]
        with output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands() if command.startswith(".venv/bin/python ")])
def test_the_python_commands_run(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_job_of_your_own_trains_in_a_plain_process(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text().partition("## A job of your own")[2]
    for language, file in (("python", "train.py"), ("yaml", "job.yaml")):
        block = re.search(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert block is not None
        (tmp_path / file).write_text(block[1])
    assert run_varuna("validate", str(tmp_path / "job.yaml")).returncode == 0
    command = [sys.executable, "train.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == yaml.safe_load((tmp_path / "job.yaml").read_text())["steps"]
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_python_in_the_pages_compiles_and_imports_what_there_is() -> None:
    for page, block in blocks("python"):
        tree = compile(block, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # pages quote parts of coroutines
        assert tree
        for line in re.findall(r"^from varuna\S* import .*$", block, re.MULTILINE):
            exec(line, {})


def test_job_files_in_the_pages_say_what_a_job_file_may_say() -> None:
    found = [yaml.safe_load(block) for page, block in blocks("yaml") if page.name not in FLEET_PAGES]
    jobs = [document for document in found if "hosts" not in document]  # those list a fleet's hosts
    assert jobs
    for document in jobs:
        assert set(document) <= set(KEYS)


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", index))
