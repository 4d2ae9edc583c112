"""Attacks on the boundary between a job and the agent that starts it, on running processes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from isolated_agent import IsolatedAgent
from varuna_agent.folders.workdirs import WorkdirError, Workdirs
from varuna_agent.state import Workdir, WorkerKey
from varuna_agent.workers.control_groups import JobGroups
from varuna_agent.workers.isolation import JobUser
from varuna_agent.workers.processes import (
    ProcessEnd,
    ProcessNotStartedError,
    ProcessSpec,
    WorkerProcesses,
)
from varuna_agent.workers.spawn import Confinement
from varuna_agent.workers.worker_pipes import WorkerPipes, follow_guard, kill_group
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S, until
from workdirs_in_place import workdirs_in_place

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can start processes as another user")


def owners(pattern: str, folder: Path) -> set[int]:
    return {path.lstat().st_uid for path in folder.glob(pattern)}


@contextmanager
def mask(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


# ---------------------------------------------------------------- the job's environment


@needs_root
@pytest.mark.parametrize("command", ["python3 idle.py", "cd . && python3 idle.py"], ids=["warmed", "shell"])
async def test_nothing_that_a_job_chooses_takes_effect_as_root(agent: IsolatedAgent, command: str) -> None:
    """With LD_DEBUG_OUTPUT a process's loader writes such files; with LD_PRELOAD it would run any code."""
    loaded = agent.folder / "loaded"
    loaded.mkdir()
    loaded.chmod(0o777)
    (agent.folder / "idle.py").write_text("import os, time\nprint(os.getuid(), flush=True)\ntime.sleep(600)\n")
    environment = {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(loaded / "by")}
    process = await agent.start("--run-as", "nobody")
    agent.launch(command, 1, process, environment=environment, setup=f"env > {loaded}/setup")
    log = agent.vm_dir / "jobs" / "job" / "g1" / "rank1.log"
    nobody = JobUser.find_user("nobody")
    await until(lambda: log.exists() and f"{nobody.uid}\n" in log.read_text())
    assert owners("setup", loaded) == owners("by.*", loaded) == {nobody.uid}


@needs_root
async def test_the_guard_does_not_enter_a_folder_for_a_job_that_may_not(folder: Path) -> None:
    closed = folder / "closed"
    (closed / "open").mkdir(parents=True)
    closed.chmod(0o700)
    end = await end_of("cat /proc/self/cwd/secret", folder, workdir=closed / "open", user=JobUser.find_user("nobody"))
    assert isinstance(end, ProcessEnd)
    assert (end.exit_code, end.log_tail) == (127, f"cannot enter the workdir {closed / 'open'}: Permission denied")


async def test_a_folder_may_be_relative_to_the_agents_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "vm" / "files").mkdir(parents=True)
    monkeypatch.chdir(folder)
    end = await end_of("pwd; exit 3", folder, workdir=Path("vm/files"))
    assert isinstance(end, ProcessEnd)
    assert end.log_tail == str(folder / "vm" / "files")


async def test_a_variable_that_no_process_can_have_is_named(folder: Path) -> None:
    for name, value in (("A=B", "x"), ("", "x"), ("NUL", "a\0b"), ("HALF", "\ud800")):
        end = await end_of("true", folder, environment={name: value})
        assert isinstance(end, ProcessNotStartedError)
        assert f"cannot set the environment variable {name!r}" in str(end)


async def end_of(
    command: str,
    folder: Path,
    *,
    workdir: Path | None = None,
    user: JobUser | None = None,
    environment: dict[str, str] | None = None,
    groups: JobGroups | None = None,
) -> ProcessEnd | ProcessNotStartedError:
    ends: asyncio.Queue[ProcessEnd | ProcessNotStartedError] = asyncio.Queue()

    async def ended(key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        ends.put_nowait(end)

    processes = WorkerProcesses(on_end=ended, workdirs=workdirs_in_place(folder), user=user, groups=groups)
    spec = ProcessSpec(
        key=WorkerKey("job", 1, 0),
        command=command,
        workdir=Workdir(path=str(workdir or folder)),
        environment={"PATH": os.environ["PATH"], **(environment or {})},
        log=folder / "logs" / "jobs" / "job" / "rank0.log",
    )
    processes.start_worker(spec)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await ends.get()
    finally:
        await processes.close()


# ---------------------------------------------------------------- archives


def escaping_archive(victim: Path) -> bytes:
    """Names so long that resolving them gives up and the result is trusted; the last file is written where they lead.

    Python 3.11.7 and 3.12.1, among others, extract this with `filter="data"` over `victim`.
    """
    out = io.BytesIO()
    steps, long = "abcdefghijklmnop", "d" * 247
    with tarfile.open(fileobj=out, mode="w:gz") as archive:

        def add(name: str, kind: bytes, target: str = "", data: bytes = b"") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, len(data)
            archive.addfile(info, io.BytesIO(data))

        path = ""
        for step in steps:
            add(os.path.join(path, long), tarfile.DIRTYPE)  # noqa: PTH118
            add(os.path.join(path, step), tarfile.SYMTYPE, long)  # noqa: PTH118
            path = os.path.join(path, long)  # noqa: PTH118
        through = "/".join(steps) + "/" + "l" * 254
        add(through, tarfile.SYMTYPE, "../" * len(steps))
        add("escape", tarfile.SYMTYPE, f"{through}/{'../' * 8}{victim.parent.relative_to('/')}")
        add("name", tarfile.LNKTYPE, f"escape/{victim.name}")
        add("name", tarfile.REGTYPE, data=b"overwritten")
    return out.getvalue()


async def ready(folder: Path, data: bytes, confinement: Confinement) -> Path:
    async def fetch(sha256: str) -> AsyncIterator[bytes]:
        yield data

    wanted = Workdir(path="/nowhere", archive=hashlib.sha256(data).hexdigest())
    return Path(await Workdirs(folder / "workdirs", fetch).make_ready(wanted, {}, confinement))


@pytest.mark.parametrize("user", [None, pytest.param("nobody", marks=needs_root)])
async def test_an_archive_does_not_write_beside_its_folder(
    folder: Path, user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna_agent.folders.workdirs._RETRY_WAITS_S", ())
    victim = folder / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    with pytest.raises(WorkdirError, match=r"cannot be unpacked: .* too (long|deep)"):
        await ready(folder, escaping_archive(victim), Confinement(user=JobUser.find_user(user) if user else None))
    assert victim.read_text() == "mine"
    assert (victim.stat().st_uid, stat.S_IMODE(victim.stat().st_mode)) == (os.geteuid(), 0o600)


@needs_root
async def test_archives_are_unpacked_by_their_user_who_gets_at_them_whatever_the_agents_umask(folder: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in ("train.py", "pkg/module.py"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "pkg"
        archive.addfile(link)
    nobody = JobUser.find_user("nobody")
    with mask(0o077):  # as in the agent's unit
        files = await ready(folder, out.getvalue(), Confinement(user=nobody))
        assert {path.name for path in files.rglob("*")} == {"train.py", "pkg", "module.py", "link"}
        assert owners("**/*", files) == {files.stat().st_uid} == {nobody.uid}
        assert files.parent.stat().st_uid == 0, "the user cannot put another folder in its place"
        end = await end_of(f"cat {files}/train.py pkg/module.py link/module.py", folder, workdir=files, user=nobody)
    assert isinstance(end, ProcessEnd)
    assert end.exit_code == 0, end.log_tail


# ---------------------------------------------------------------- memory, control groups, signals


LOWERS_ITS_SCORE = """
import time
path = '/proc/self/oom_score_adj'
print(open(path).read().strip())
try:
    with open(path, 'w') as file:
        file.write('0')
except OSError as error:
    print(type(error).__name__)
print('now', open(path).read().strip(), flush=True)
time.sleep(600)
"""


@needs_root
@pytest.mark.parametrize("command", ["python3 idle.py", "cd . && python3 idle.py"], ids=["warmed", "shell"])
async def test_the_kernel_ends_jobs_before_the_agent_and_they_cannot_change_that(
    agent: IsolatedAgent, command: str
) -> None:
    (agent.folder / "idle.py").write_text(LOWERS_ITS_SCORE)
    process = await agent.start("--run-as", "nobody")
    own = int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
    agent.launch(command, 1, process)
    log = agent.vm_dir / "jobs" / "job" / "g1" / "rank1.log"
    await until(lambda: log.exists() and re.search(r"^now .*\n", log.read_text(), re.MULTILINE))
    score, *lowered = log.read_text().split()
    assert int(score) == 500 > own == int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
    guards = [each for each in process.children() if "guard.py" in " ".join(each.cmdline())]
    assert {int(Path(f"/proc/{each.pid}/oom_score_adj").read_text()) for each in guards} == {own}
    assert lowered[-1] == ("500" if may_raise_for_good() else "0"), "without the capability, the kernel lets it"


def may_raise_for_good() -> bool:
    """Whether this process has CAP_SYS_RESOURCE, as the agent's unit gives it to the agent."""
    capabilities = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    return capabilities is not None and bool(int(capabilities[1], 16) >> 24 & 1)


def real_groups() -> Path | None:
    """A writable folder of this machine's cgroup v2, if it has one."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (root / "cgroup.controllers").exists() and os.access(root, os.W_OK):
            return root
    return None


@pytest.fixture
def real_group() -> Iterator[Path]:
    root = real_groups()
    if root is None:
        pytest.skip("needs a writable cgroup v2, at /sys/fs/cgroup or /sys/fs/cgroup/unified")
    group = root / f"varuna-test-{os.getpid()}"
    group.mkdir()
    yield group
    for each in (*group.iterdir(), group):
        if each.is_dir():
            each.rmdir()


@needs_root
async def test_a_jobs_processes_have_a_control_group_and_their_user_cannot_leave_it(
    folder: Path, real_group: Path
) -> None:
    groups = JobGroups(real_group, controllers=())
    leave = f"echo 0 > {real_group}/cgroup.procs && echo left"
    command = f"cat /proc/self/cgroup; {leave}; exit 3"
    end = await end_of(command, folder, user=JobUser.find_user("nobody"), groups=groups)
    assert isinstance(end, ProcessEnd)
    assert f"{real_group.name}/job-job" in end.log_tail
    assert "left" not in end.log_tail.splitlines()
    assert [each.name for each in real_group.glob("job-*")] == ["job-job"]
    groups.remove_unused(())
    assert list(real_group.glob("job-*")) == []


async def test_a_group_that_is_gone_ends_the_worker_and_not_the_limits(folder: Path, tmp_path: Path) -> None:
    class Gone(JobGroups):
        def make_group(self, *_: object) -> Path:
            return tmp_path / "gone"

    end = await end_of("true", folder, groups=Gone(tmp_path, controllers=()))
    assert isinstance(end, ProcessEnd)
    assert end.exit_code == 127
    assert "cannot enter the job's control group" in end.log_tail


@needs_root
def test_a_guards_word_does_not_make_root_kill_what_is_not_the_users() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as roots:
        nobody = JobUser.find_user("nobody")
        kill_group(roots.pid, nobody)
        with subprocess.Popen(["sleep", "600"], start_new_session=True, user=nobody.uid) as theirs:
            kill_group(theirs.pid, nobody)
            assert theirs.wait(DEADLINE_S) == -signal.SIGKILL
        assert roots.poll() is None
        roots.kill()


@pytest.mark.parametrize(
    ("written", "group", "exit_code"),
    [(b"77\n-9\n", 77, -9), (b"77\n", 77, None), (b"me\nfine\n", 0, None), (b"77\n" + b"1" * 200_000, 77, None)],
    ids=["true", "half", "no numbers", "no end"],
)
async def test_what_a_guard_says_is_believed_as_far_as_it_makes_sense(
    written: bytes, group: int, exit_code: int | None
) -> None:
    """The guard of a worker from a warmed process runs as the job's user, who can write in its place."""
    read, write = os.pipe()
    worker = WorkerPipes()

    def write_lines() -> None:
        with suppress(BrokenPipeError), os.fdopen(write, "wb") as pipe:
            pipe.write(written)

    writing = asyncio.create_task(asyncio.to_thread(write_lines))
    async with asyncio.timeout(DEADLINE_S):
        assert await follow_guard(read, worker) == exit_code
    await writing
    assert worker.group == group
    worker.kill_worker()
    os.close(worker.life_read)
    worker.stacks.close()


@pytest.mark.parametrize("start", ["", "cd . && exec "], ids=["warmed", "shell"])
async def test_a_worker_that_has_stopped_its_guard_is_ended_all_the_same(
    folder: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna_agent.workers.processes._GUARD_PATIENCE_S", 0.1)
    (folder / "varuna" / "worker").mkdir(parents=True)  # stands for the real one: nothing is imported ahead
    (folder / "varuna" / "__init__.py").touch()
    (folder / "varuna" / "worker" / "__init__.py").touch()
    (folder / "varuna" / "worker" / "preload.py").touch()
    (folder / "stops.py").write_text(
        "import os, pathlib, signal, time\n"
        "os.kill(os.getppid(), signal.SIGSTOP)\n"
        "pathlib.Path('part').write_text(str(os.getpid()))\n"
        "os.rename('part', 'pid')\n"
        "time.sleep(600)\n"
    )
    ends: asyncio.Queue[ProcessEnd | ProcessNotStartedError] = asyncio.Queue()

    async def ended(key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        ends.put_nowait(end)

    processes = WorkerProcesses(on_end=ended, workdirs=workdirs_in_place(folder))
    spec = ProcessSpec(
        key=WorkerKey("job", 1, 0),
        command=f"{start}{sys.executable} stops.py",
        workdir=Workdir(path=str(folder)),
        environment={"PATH": os.environ["PATH"]},
        log=folder / "logs" / "g1" / "rank0.log",
    )
    processes.start_worker(spec)
    await until((folder / "pid").exists)
    processes.kill_worker(spec.key)
    async with asyncio.timeout(DEADLINE_S):
        end = await ends.get()
    assert isinstance(end, ProcessEnd)
    assert end.exit_code == -signal.SIGKILL
    pid = int((folder / "pid").read_text())
    await until(lambda: not psutil.pid_exists(pid))
    await processes.close()


# ---------------------------------------------------------------- what concerns one worker alone


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can see an agent's descriptors")
async def test_a_vm_without_descriptors_left_loses_one_worker_and_neither_the_agent_nor_another_job(
    agent: IsolatedAgent,
) -> None:
    process = await agent.start()
    agent.launch("cd . && python3 train.py", 1, process)
    await agent.found(1)
    workers = family(process)
    limits = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 1, limits[1]))
    try:
        agent.launch("cd . && python3 train.py", 1, process, job_id="other", local_rank=1)
        (exited,) = await agent.manager.fact("worker_exited")
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert (exited.job_id, exited.cause) == ("other", pb.EXIT_CAUSE_LAUNCH_FAILED)
    assert "Too many open files" in exited.error_text, "whatever the descriptor was for"
    assert all(worker.is_running() for worker in workers)
    agent.launch("cd . && python3 train.py", 2, process, job_id="other", local_rank=1)
    log = agent.vm_dir / "jobs" / "other" / "g2" / "rank1.log"
    await until(lambda: log.exists() and log.read_text().endswith("}\n"))


@needs_root
async def test_a_folder_that_cannot_be_made_for_a_job_concerns_that_job_alone(agent: IsolatedAgent) -> None:
    process = await agent.start("--run-as", "nobody")
    (agent.vm_dir / "varuna-checkpoints" / "job").write_text("in its way")
    agent.launch("cd . && python3 train.py", 1, process)
    (exited,) = await agent.manager.fact("worker_exited")
    assert (exited.cause, "File exists" in exited.error_text) == (pb.EXIT_CAUSE_LAUNCH_FAILED, True)
    (agent.vm_dir / "varuna-checkpoints" / "job").unlink()
    agent.launch("cd . && python3 train.py", 2, process)
    await agent.found(2)


async def test_an_agent_removes_nothing_around_its_folder_for_copies(agent: IsolatedAgent) -> None:
    shared = agent.folder / "scratch"
    (shared / "data-set").mkdir(parents=True)
    (shared / "data-set" / "tokens.bin").write_text("three weeks of work")
    process = await agent.start("--checkpoint-dir", str(shared))
    for count, job_id in enumerate(("job", "other"), start=1):
        agent.launch("cd . && python3 train.py", 1, process, job_id=job_id)
        await until((shared / "varuna-checkpoints" / job_id / "varuna_ckpt_1").exists)
        agent.manager.send_message(stop=pb.Stop(job_id=job_id, generation=1, mode=pb.STOP_MODE_LEAVE_NOW))
        await agent.manager.fact("worker_exited", count)
    await until(lambda: not (shared / "varuna-checkpoints" / "job").exists())
    assert (shared / "data-set" / "tokens.bin").read_text() == "three weeks of work"


def family(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)
