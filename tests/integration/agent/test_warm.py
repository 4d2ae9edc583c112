"""Workers from a warmed process must not notice it. Real processes, no manager."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from agent_world import runs
from varuna_agent.state import Workdir, WorkerKey
from varuna_agent.workers.processes import (
    PreparationSpec,
    ProcessEnd,
    ProcessNotStartedError,
    ProcessSpec,
    WorkerProcesses,
)
from varuna_agent.workers.warm_process import Recipe
from waiting import DEADLINE_S, until
from workdirs_in_place import workdirs_in_place

SCRIPT = """
import json, os, random, signal, sys, threading
from pathlib import Path

result = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "environ": dict(os.environ), "stdin": sys.stdin.read(), "random": random.random(), "pid": os.getpid(),
    "group": os.getpgid(0), "parent_is_warm": "zygote.py" in Path(f"/proc/{os.getppid()}/cmdline").read_text(),
    "signals": {s.name: str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP,
                                                            signal.SIGPIPE, signal.SIGCHLD)},
    "umask": os.umask(0o22), "fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "main": sys.modules["__main__"].__dict__ is globals(),
}
Path(os.environ["OUT"] + os.environ["RANK"]).write_text(json.dumps(result))
print("said on stdout")
print("said on stderr", file=sys.stderr)
what = os.environ.get("THEN", "")
if what == "raise":
    raise RuntimeError("as asked")
if what == "wait":
    if os.fork() == 0:
        os.setpgid(0, 0)
    signal.pause()
sys.exit(int(os.environ.get("CODE", "0")))
"""
NO_PROCESS_LEFT = """
import os
warmed, fork = os.getpid(), os.fork
def fork_if_allowed():
    if os.getpid() == warmed and os.path.exists("no_process_left"):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = fork_if_allowed
"""
"""A job's limit of processes, while the file is there."""


Warmth = tuple[frozenset[str], frozenset[str]]
"""(jobs whose workers would have to wait, jobs whose workers would start at once)."""


class ScriptWorkers:
    """Starts workers of one script and waits for their ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        self.preload("")
        self.ends: dict[WorkerKey, asyncio.Future[ProcessEnd | ProcessNotStartedError]] = {}
        self.changes: list[Warmth] = []
        self.processes = WorkerProcesses(
            on_end=self._ended,
            workdirs=workdirs_in_place(folder),
            on_warm_change=lambda *change: self.changes.append(change),
        )
        self.cold = WorkerProcesses(on_end=self._ended, workdirs=workdirs_in_place(folder), keep_warm_s=0.0)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "OUT": str(folder / "out"), "PYTHONUNBUFFERED": "1", "PATH": path}

    async def _ended(self, key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        self.ends[key].set_result(end)

    def preload(self, code: str) -> None:
        """Stands for what is imported ahead: torch and Varuna take seconds, and most tests do not need them."""
        package = self.folder / "varuna" / "worker"
        package.mkdir(parents=True, exist_ok=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "preload.py").write_text(code)

    def start(self, rank: int, command: str = "python train.py --lr 3", *, cold: bool = False, **contract: str) -> Any:
        key = WorkerKey("job", 1, rank)
        self.ends[key] = asyncio.get_running_loop().create_future()
        spec = ProcessSpec(
            key=key,
            command=command,
            workdir=Workdir(path=str(self.folder)),
            environment=self.environment,
            contract={"RANK": str(rank), **contract},
            log=self.log(rank),
        )
        (self.cold if cold else self.processes).start_worker(spec)
        return key

    def log(self, rank: int) -> Path:
        return self.folder / "jobs" / "job" / "g1" / f"rank{rank}.log"

    async def end(self, key: WorkerKey) -> ProcessEnd:
        async with asyncio.timeout(DEADLINE_S):
            end = await self.ends[key]
        assert isinstance(end, ProcessEnd)
        return end

    async def result(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"out{rank}"
        await until(lambda: path.exists() and path.read_text().endswith("}"))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    async def warm_up(self, command: str = "python train.py --lr 3") -> None:
        log = self.folder / "jobs" / "job" / "warm.log"
        self.processes.prepare_job(
            PreparationSpec(
                job_id="job",
                command=command,
                workdir=Workdir(path=str(self.folder)),
                environment=self.environment,
                log=log,
            )
        )
        await until(lambda: self.processes.warm_job_ids == {"job"})


def zygotes() -> list[psutil.Process]:
    """The agent's, without their guards; those of other tests' worlds have another program."""
    children = psutil.Process().children(recursive=True)
    found = []
    for child in children:
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if "varuna_agent/workers/zygote.py" in "".join(child.cmdline()[1:2]):
                found.append(child)
    return found


def guards() -> list[psutil.Process]:
    """Of this process, and of what it has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if "guard.py" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warmed process that stands still with this machine is not given up."""
    monkeypatch.setattr("varuna_agent.workers.warm_process._ANSWER_S", DEADLINE_S)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptWorkers]:
    world = ScriptWorkers(tmp_path)
    yield world
    await world.processes.close()
    await world.cold.close()
    assert guards() == []


@pytest.mark.parametrize(
    ("command", "real"),
    [
        ("python train.py --lr 3", True),
        ("python -u -m train --lr 3", False),
        (f"{sys.executable} ./train.py", False),
    ],
)
async def test_a_worker_from_a_warmed_process_is_like_one_from_cold(
    world: ScriptWorkers, command: str, real: bool
) -> None:
    if real:
        shutil.rmtree(world.folder / "varuna")
    await world.end(world.start(0, command, cold=True))
    cold = await world.result(0)
    await world.warm_up(command)
    key = world.start(1, command, CODE="7", ONLY="mine")
    assert (await world.end(key)).exit_code == 7
    warm = await world.result(1)
    assert warm["pid"] == warm["group"]
    assert (cold.pop("parent_is_warm"), warm.pop("parent_is_warm")) == (False, True)
    assert warm["environ"].pop("ONLY") == "mine"
    assert cold["environ"].pop("VARUNA_STACKS").startswith("62:")  # the other is ready before its script begins
    for result, rank in ((cold, "0"), (warm, "1")):
        assert result["environ"].pop("RANK") == rank
        result["environ"] = {
            name: value for name, value in result["environ"].items() if name not in ("CODE", "THEN", "_")
        }
        result.pop("pid")
        result.pop("group")
    assert warm.pop("random") != cold.pop("random")
    assert warm == cold
    assert world.log(1).read_text().splitlines() == ["said on stdout", "said on stderr"]


async def test_a_warmed_process_knows_no_secret_of_the_job_and_its_worker_does(world: ScriptWorkers) -> None:
    await world.warm_up()
    world.environment = {**world.environment, "HF_TOKEN": "a secret"}
    assert (await world.end(world.start(1))).exit_code == 0
    found = await world.result(1)
    assert found["parent_is_warm"]
    assert found["environ"]["HF_TOKEN"] == "a secret"
    (zygote,) = zygotes()
    assert "HF_TOKEN" not in zygote.environ()


async def test_a_worker_is_not_forked_from_a_process_that_has_read_another_value(world: ScriptWorkers) -> None:
    await world.warm_up()
    world.environment = {**world.environment, "PYTHONHASHSEED": "7"}
    assert (await world.end(world.start(1))).exit_code == 0
    assert (await world.result(1))["environ"]["PYTHONHASHSEED"] == "7"
    assert "7" in [zygote.environ().get("PYTHONHASHSEED") for zygote in zygotes()]


async def test_two_workers_of_one_warmed_process_draw_different_numbers(world: ScriptWorkers) -> None:
    await world.warm_up()
    first, second = world.start(1), world.start(2)
    assert ((await world.end(first)).exit_code, (await world.end(second)).exit_code) == (0, 0)
    results = [await world.result(rank) for rank in (1, 2)]
    assert all(result["parent_is_warm"] for result in results)
    assert results[0]["random"] != results[1]["random"]


async def test_a_warm_worker_that_raises(world: ScriptWorkers) -> None:
    await world.warm_up()
    end = await world.end(world.start(1, THEN="raise"))
    assert end.exit_code == 1
    assert "RuntimeError: as asked" in end.log_tail


async def test_a_warm_worker_that_is_killed_takes_its_descendants_with_it(world: ScriptWorkers) -> None:
    await world.warm_up()
    key = world.start(1, THEN="wait")
    worker = psutil.Process((await world.result(1))["pid"])
    await until(lambda: len(worker.children()) == 1)
    family = [worker, *worker.children()]
    world.processes.kill_worker(key)
    assert (await world.end(key)).exit_code == -signal.SIGKILL
    assert not any(map(runs, family))
    assert world.processes.warm_job_ids == {"job"}, "the next one starts from it"


async def test_a_warm_worker_does_not_outlive_its_guard(world: ScriptWorkers) -> None:
    await world.warm_up()
    key = world.start(1, THEN="wait")
    worker = psutil.Process((await world.result(1))["pid"])
    worker.parent().kill()
    assert (await world.end(key)).exit_code == -signal.SIGKILL
    await until(lambda: not runs(worker))


async def test_the_first_worker_of_a_job_comes_from_a_warmed_process_too(world: ScriptWorkers) -> None:
    first, second = world.start(1), world.start(2)
    assert ((await world.end(first)).exit_code, (await world.end(second)).exit_code) == (0, 0)
    assert [(await world.result(rank))["parent_is_warm"] for rank in (1, 2)] == [True, True]
    assert world.changes == [({"job"}, frozenset()), (frozenset(), {"job"})], "waits for imports, then starts at once"


async def test_a_warmed_process_that_has_died_is_replaced(world: ScriptWorkers) -> None:
    await world.warm_up()
    (zygote,) = zygotes()
    zygote.kill()
    await until(lambda: not world.processes.warm_job_ids)
    assert (await world.end(world.start(1, CODE="5"))).exit_code == 5
    assert (await world.result(1))["parent_is_warm"]


async def test_a_warmed_process_that_cannot_fork_keeps_its_workers_and_forks_later(world: ScriptWorkers) -> None:
    world.preload(NO_PROCESS_LEFT)
    training = world.start(1, THEN="wait")
    await world.result(1)
    limit = world.folder / "no_process_left"
    limit.touch()
    assert (await world.end(world.start(2, CODE="5"))).exit_code == 5
    assert not (await world.result(2))["parent_is_warm"]
    limit.unlink()
    assert (await world.end(world.start(3, CODE="5"))).exit_code == 5
    assert (await world.result(3))["parent_is_warm"]
    assert not world.ends[training].done(), "the worker that was training has ended with the process that forked it"
    world.processes.kill_worker(training)
    await world.end(training)


async def test_where_nothing_can_be_forked_workers_start_without_and_nobody_tries_again(world: ScriptWorkers) -> None:
    world.preload("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n")
    for rank in (1, 2):
        assert (await world.end(world.start(rank, CODE="5"))).exit_code == 5
        assert not (await world.result(rank))["parent_is_warm"]
    log = (world.folder / "jobs" / "job" / "warm.log").read_text()
    assert log.count("cannot fork workers: something imported started threads") == 1
    assert world.changes == [({"job"}, frozenset()), (frozenset(), frozenset())]


async def test_a_worker_that_is_killed_while_its_imports_are_done_does_not_start(world: ScriptWorkers) -> None:
    world.preload("import time\ntime.sleep(600)")
    key = world.start(1)
    await until(lambda: (world.folder / "jobs" / "job" / "warm.log").exists())
    world.processes.kill_worker(key)
    assert (await world.end(key)).exit_code == -signal.SIGKILL
    assert not (world.folder / "out1").exists()


async def test_an_idle_warmed_process_makes_room_for_another_and_one_with_workers_stays(world: ScriptWorkers) -> None:
    await world.warm_up()

    def prepare(job_id: str, command: str) -> None:
        log = world.folder / f"{job_id}.log"
        world.processes.prepare_job(
            PreparationSpec(
                job_id=job_id,
                command=command,
                workdir=Workdir(path=str(world.folder)),
                environment=world.environment,
                log=log,
            )
        )

    prepare("other", "python train.py --lr 4")
    await until(lambda: world.processes.warm_job_ids == {"other"})
    key = world.start(1, "python train.py --lr 4", THEN="wait")
    await world.result(1)
    prepare("third", "python train.py --lr 5")
    await until(lambda: world.processes.warm_job_ids == {"job", "other", "third"})
    world.processes.kill_worker(key)
    await world.end(key)


async def test_a_warmed_process_ends_when_it_has_had_no_worker_for_a_while(world: ScriptWorkers) -> None:
    changes: list[Warmth] = []

    async def ended(key: WorkerKey, end: object) -> None: ...

    processes = WorkerProcesses(
        on_end=ended,
        workdirs=workdirs_in_place(world.folder),
        keep_warm_s=0.3,
        on_warm_change=lambda *change: changes.append(change),
    )
    try:
        log = world.folder / "warm.log"
        processes.prepare_job(
            PreparationSpec(
                job_id="job",
                command="python train.py",
                workdir=Workdir(path=str(world.folder)),
                environment=world.environment,
                log=log,
            )
        )
        await until(lambda: changes[-1:] == [(frozenset(), frozenset())])
        assert changes[:-1] == [({"job"}, frozenset()), (frozenset(), {"job"})]
    finally:
        await processes.close()


@pytest.mark.parametrize(
    "command",
    [
        "source env/bin/activate && python train.py",
        "python train.py | tee log",
        "python train.py --rank $RANK",
        "torchrun train.py",
        "python",
        "python -c 1",
        "python -m",
        "python -I train.py",
        "python train.py --files *.txt",
        "python 'train.py",
        "A=1 python train.py",
    ],
)
def test_what_needs_the_shell_is_left_to_it(command: str) -> None:
    assert Recipe.from_command(command, "/", {}) is None


def test_quotes_are_the_shells() -> None:
    recipe = Recipe.from_command("python3.11 train.py --name 'two words'", "/", {})
    assert recipe is not None
    assert (recipe.interpreter, recipe.arguments) == ("python3.11", ("train.py", "--name", "two words"))


async def test_closing_does_not_wait_for_a_process_that_is_being_warmed(world: ScriptWorkers) -> None:
    world.preload("import time\ntime.sleep(600)")
    world.start(1)
    await until(lambda: (world.folder / "jobs" / "job" / "warm.log").exists())
    async with asyncio.timeout(DEADLINE_S):
        await world.processes.close()
    assert world.changes == [({"job"}, frozenset()), (frozenset(), frozenset())]
