"""The stack of a worker that hangs is read without its help. Real processes, no manager."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from varuna_agent.state import Workdir, WorkerKey
from varuna_agent.workers.processes import ProcessEnd, ProcessNotStartedError, ProcessSpec, WorkerProcesses
from varuna_agent.workers.stacks import MAX_TEXT_BYTES, NoStacksError
from waiting import DEADLINE_S, until
from workdirs_in_place import workdirs_in_place

KEY = WorkerKey("job", 1, 0)

SLEEPS = """
import time
def waits_for_ever():
    time.sleep(600)
waits_for_ever()
"""
LOCKED = """
import threading
lock = threading.Lock()
def other_thread():
    with lock:
        threading.Event().wait()
def waits_for_the_lock():
    with lock:
        pass
threading.Thread(target=other_thread, daemon=True).start()
while not lock.locked():
    pass
open("all_there", "w").close()
waits_for_the_lock()
"""
IN_C = """
import ctypes, os
nothing, _ = os.pipe()
def keeps_the_interpreter_from_all_others():
    ctypes.PyDLL(None).read(nothing, ctypes.create_string_buffer(1), 1)
keeps_the_interpreter_from_all_others()
"""
NAMELESS = (
    """
import ctypes
PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, b"\\xff\\xfe", 0, 0, 0)
"""
    + SLEEPS
)
MANY = """
import threading
arrived = threading.Semaphore(0)
def deep(levels):
    if levels:
        deep(levels - 1)
    arrived.release()
    threading.Event().wait()
for _ in range(90):
    threading.Thread(target=deep, args=(50,), daemon=True).start()
for _ in range(90):
    arrived.acquire()
open("all_there", "w").close()
threading.Event().wait()
"""


class WaitingWorker:
    """One worker, whose stack is read until it is where it will stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = WorkerProcesses(on_end=self._ended, workdirs=workdirs_in_place(folder))
        self.end: ProcessEnd | ProcessNotStartedError | None = None

    async def _ended(self, key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        self.end = end

    def start(self, script: str, command: str = f"{sys.executable} train.py", *, light: bool = True) -> None:
        (self.folder / "train.py").write_text(script)
        if light:  # imports ahead do not matter here
            (self.folder / "varuna" / "worker").mkdir(parents=True)
            (self.folder / "varuna" / "__init__.py").touch()
            (self.folder / "varuna" / "worker" / "__init__.py").touch()
            (self.folder / "varuna" / "worker" / "preload.py").touch()
        self.processes.start_worker(
            ProcessSpec(
                key=KEY,
                command=command,
                workdir=Workdir(path=str(self.folder)),
                environment=dict(os.environ),
                log=self.folder / "jobs" / "job" / "g1" / "rank0.log",
            )
        )

    async def until_all_there(self) -> None:
        """Until the script's threads stand where they will stay.

        Python reads the frames of other threads while these run: one that has just begun may end the process (SIGSEGV).
        """
        await until((self.folder / "all_there").exists)

    async def stacks(self, *standing_in: str, pid: int = 0) -> str:
        """The first dump with all of these: one that pauses is taken as whole."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    text = await self.processes.read_stacks(KEY, pid)
                except NoStacksError as error:
                    text = str(error)
                if all(place in text for place in standing_in):
                    return text
                assert self.end is None, "being asked has ended it"
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[WaitingWorker]:
    world = WaitingWorker(tmp_path)
    yield world
    await world.processes.close()


@pytest.mark.parametrize(
    ("script", "function"),
    [
        (SLEEPS, "waits_for_ever"),
        (LOCKED, "waits_for_the_lock"),
        (IN_C, "keeps_the_interpreter_from_all_others"),
        (NAMELESS, "waits_for_ever"),
    ],
    ids=["sleeps", "waits for a lock", "in a C function, with the interpreter's lock", "with a name that is no text"],
)
async def test_a_worker_says_where_it_stands_and_goes_on(world: WaitingWorker, script: str, function: str) -> None:
    world.start(script)
    if script is LOCKED:
        await world.until_all_there()
    others = ("in other_thread",) if script is LOCKED else ()
    first = await world.stacks(f"in {function}", *others)
    assert "train.py" in first
    assert "most recent call first" in first
    assert await world.stacks(f"in {function}"), "it can be asked again"
    assert world.end is None


async def test_a_worker_that_a_shell_started_answers_from_its_import_of_varuna_on(world: WaitingWorker) -> None:
    script = "import os\nopen('pid', 'w').write(f'{os.getpid()};')\nopen('go').read()\nimport varuna\n" + SLEEPS
    os.mkfifo(world.folder / "go")
    world.start(script, f"cd . && {sys.executable} train.py; true", light=False)
    pid_file = world.folder / "pid"
    async with asyncio.timeout(DEADLINE_S):
        while not (pid_file.exists() and pid_file.read_text().endswith(";")):  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.01)
    pid = int(pid_file.read_text().strip(";"))
    await world.stacks("has not imported varuna yet", pid=pid)  # once the guard has said that it started the worker
    await asyncio.to_thread((world.folder / "go").write_text, "go")
    assert "in waits_for_ever" in await world.stacks("in waits_for_ever", pid=pid)


async def test_no_more_is_taken_than_can_be_sent(world: WaitingWorker) -> None:
    world.start(MANY)
    await world.until_all_there()
    text = await world.stacks("and more")
    assert MAX_TEXT_BYTES < len(text) < MAX_TEXT_BYTES + 100


async def test_a_process_that_cannot_answer_is_described(world: WaitingWorker) -> None:
    others = set(psutil.Process().children(recursive=True))  # such as another test's browser
    world.start(SLEEPS)
    await world.stacks("in waits_for_ever")
    started = set(psutil.Process().children(recursive=True)) - others
    (worker,) = [process for process in started if not process.children()]
    worker.suspend()
    with pytest.raises(NoStacksError, match=r"did not answer within 3 s: it is T \(stopped\)"):
        await world.processes.read_stacks(KEY, 0)


async def test_a_process_that_is_not_the_workers_is_not_asked(world: WaitingWorker) -> None:
    world.start(SLEEPS)
    assert "in waits_for_ever" in await world.stacks("in waits_for_ever", pid=os.getpid())
    with pytest.raises(NoStacksError, match="has no process"):
        await world.processes.read_stacks(WorkerKey("job", 1, 7), 0)
