"""Workdirs on a VM: fetched, unpacked and set up once; nothing gets out of its folder."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from varuna_agent.folders.workdirs import WorkdirError, Workdirs
from varuna_agent.state import Workdir
from varuna_agent.workers.processes import PreparationSpec, WorkerProcesses
from waiting import DEADLINE_S, until


def archive_of(**files: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("_UP_", "../"))
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


class ServedWorkdirs:
    def __init__(self, folder: Path) -> None:
        self.answers: list[bytes] = []
        self.asked = 0
        self.workdirs = Workdirs(folder, self.fetch)

    async def fetch(self, sha256: str) -> AsyncIterator[bytes]:
        self.asked += 1
        data = self.answers.pop(0)
        if not data:
            raise WorkdirError("no manager")
        for at in range(0, len(data), 50):
            yield data[at : at + 50]

    async def ready(self, data: bytes, setup: str = "", **environment: str) -> Path:
        wanted = Workdir(path="/nowhere", archive=hashlib.sha256(data).hexdigest(), setup=setup)
        return Path(await self.workdirs.make_ready(wanted, {**os.environ, **environment}))


async def first_pid(file: Path, making: asyncio.Future[str]) -> int:
    while not file.exists():
        assert not making.done()
        await asyncio.sleep(0.02)
    return int(file.read_text().split()[0])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedWorkdirs:
    monkeypatch.setattr("varuna_agent.folders.workdirs._RETRY_WAITS_S", (0.0, 0.0))
    return ServedWorkdirs(tmp_path / "workdirs")


async def test_many_callers_get_one_folder_that_was_set_up_once(world: ServedWorkdirs) -> None:
    data = archive_of(train="x = 1")
    world.answers = [data]
    setup = 'test "$GREETING" = hello && echo done >> count'
    places = await asyncio.gather(*(world.ready(data, setup, GREETING="hello") for _ in range(5)))
    assert len(set(places)) == 1
    assert (places[0] / "train").read_text() == "x = 1"
    assert await world.ready(data, setup, GREETING="hello") == places[0]
    assert (places[0] / "count").read_text() == "done\n"
    assert world.asked == 1


async def test_another_setup_or_another_environment_of_it_is_another_folder(world: ServedWorkdirs) -> None:
    data = archive_of(train="x")
    world.answers = [data] * 3
    first = await world.ready(data, "true", A="1")
    assert first != await world.ready(data, "true", A="2")
    assert first != await world.ready(data, "exit 0", A="1")


async def test_what_does_not_arrive_whole_is_asked_for_again(world: ServedWorkdirs) -> None:
    data = archive_of(train="x" * 500)
    world.answers = [b"", data[:70], data]
    assert ((await world.ready(data)) / "train").stat().st_size == 500
    world.answers = [b"", b"", b""]
    with pytest.raises(WorkdirError, match="no manager"):
        await world.ready(archive_of(train="y"))


async def test_an_archive_that_leaves_its_folder_is_refused(world: ServedWorkdirs, tmp_path: Path) -> None:
    data = archive_of(_UP_evil="x")
    world.answers = [data]
    with pytest.raises(WorkdirError, match=r"cannot be unpacked: .*evil.* leads out of the folder"):
        await world.ready(data)
    assert not list(tmp_path.rglob("evil"))


async def test_a_setup_that_fails_says_its_last_lines_and_is_tried_anew(world: ServedWorkdirs, tmp_path: Path) -> None:
    data = archive_of(train="x")
    world.answers = [data, data]
    setup = f"echo no such wheel; test -e {tmp_path}/there || exit 3"
    with pytest.raises(WorkdirError, match=r"(?s)exit code 3.*no such wheel") as caught:
        await world.ready(data, setup)
    assert caught.value.exit_code == 3
    (tmp_path / "there").touch()
    assert (await world.ready(data, setup)).is_dir()


async def test_a_folder_that_is_there_is_only_set_up(world: ServedWorkdirs, tmp_path: Path) -> None:
    wanted = Workdir(path=str(tmp_path), setup="echo done >> count")
    for _ in range(2):
        assert await world.workdirs.make_ready(wanted, dict(os.environ)) == str(tmp_path)
    assert (tmp_path / "count").read_text() == "done\n"


async def test_a_setup_ends_with_its_agent(world: ServedWorkdirs, tmp_path: Path) -> None:
    wanted = Workdir(path=str(tmp_path), setup="echo $$ > pid.part; mv pid.part pid; sleep 1000")
    making = asyncio.create_task(world.workdirs.make_ready(wanted, dict(os.environ)))
    pid = await first_pid(tmp_path / "pid", making)
    await world.workdirs.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(asyncio.CancelledError):
        await making


async def test_a_setup_has_a_limit_after_which_it_is_killed(
    world: ServedWorkdirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "echo $$ > pid; echo loading the data; sleep 3600"
    wanted = Workdir(path=str(tmp_path), setup=setup, timeout_s=DEADLINE_S)
    making = asyncio.create_task(world.workdirs.make_ready(wanted, dict(os.environ)))
    logs = tmp_path / "workdirs"
    await until(lambda: [log for log in logs.glob("*/setup.log") if "loading the data\n" in log.read_text()])
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + DEADLINE_S)  # the limit is over
    with pytest.raises(WorkdirError, match=r"(?s)not ended after 600 s \(setup_timeout_s\).*loading") as caught:
        await making
    assert caught.value.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    await world.workdirs.make_ready(replace(wanted, setup="true"), dict(os.environ))


async def test_an_archive_that_does_not_come_has_the_same_limit(world: ServedWorkdirs, tmp_path: Path) -> None:
    async def fetch(sha256: str) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    places = Workdirs(tmp_path / "others", fetch)
    wanted = Workdir(path="/nowhere", archive="0" * 64, setup="true", timeout_s=0.2)
    with pytest.raises(WorkdirError, match=r"not here and unpacked after 0.2 s \(setup_timeout_s\)") as caught:
        await places.make_ready(wanted, dict(os.environ))
    assert caught.value.exit_code == 0


async def test_a_setup_goes_on_while_anybody_waits_and_ends_with_the_last(
    world: ServedWorkdirs, tmp_path: Path
) -> None:
    setup = "echo $$ >> pids.part; cp pids.part pids.copy; mv pids.copy pids; test -e go || sleep 1000"
    wanted = Workdir(path=str(tmp_path), setup=setup)
    first, second = (asyncio.create_task(world.workdirs.make_ready(wanted, dict(os.environ))) for _ in range(2))
    pid = await first_pid(tmp_path / "pids", first)
    first.cancel()
    await asyncio.wait([first])
    assert psutil.pid_exists(pid), "the other one needs it"
    second.cancel()
    await asyncio.wait([second])
    assert not psutil.pid_exists(pid)
    (tmp_path / "go").touch()
    assert await world.workdirs.make_ready(wanted, dict(os.environ)) == str(tmp_path)
    assert len((tmp_path / "pids").read_text().split()) == 2


async def test_each_preparation_is_told_of_once_whatever_ends_it(world: ServedWorkdirs, tmp_path: Path) -> None:
    endings: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()

    async def ended(key: object, end: object) -> None: ...

    def note(job_id: str, error: WorkdirError | None) -> None:
        endings.put_nowait((job_id, None if error is None else str(error)))

    processes = WorkerProcesses(on_end=ended, workdirs=world.workdirs, on_prepared=note)

    def prepare(job_id: str, path: Path, setup: str) -> None:
        wanted = Workdir(path=str(path), setup=setup)
        processes.prepare_job(
            PreparationSpec(
                job_id=job_id,
                command="./run",
                workdir=wanted,
                environment=dict(os.environ),
                log=tmp_path / "warm.log",
            )
        )

    prepare("a", tmp_path, "true")
    assert await endings.get() == ("a", None)
    prepare("b", tmp_path / "missing", "true")
    assert await endings.get() == ("b", f"workdir '{tmp_path}/missing' is not a folder on this VM")
    prepare("c", tmp_path, "echo $$ > pid.part; mv pid.part pid; sleep 1000")
    pid = await first_pid(tmp_path / "pid", asyncio.get_running_loop().create_future())
    processes.cancel_preparation("c")
    assert await endings.get() == ("c", "it is no longer wanted")
    assert not psutil.pid_exists(pid)
    await processes.close()
    assert endings.empty()


async def test_a_folder_that_no_job_uses_any_more_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna_agent.folders.workdirs._KEPT_UNUSED", 0)
    world = ServedWorkdirs(tmp_path)
    paths: list[Path] = []
    for job_id in ("over", "runs", "new"):
        data = archive_of(train=job_id)
        world.answers = [data]
        if job_id == "new":
            assert all(path.exists() for path in paths)
            world.workdirs.keep_only({"runs", "new"})
        wanted = Workdir(path="/nowhere", archive=hashlib.sha256(data).hexdigest())
        paths.append(Path(await world.workdirs.make_ready(wanted, {}, job_id=job_id)))
    assert [path.exists() for path in paths] == [False, True, True]


async def test_only_the_newest_of_what_nobody_uses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna_agent.folders.workdirs._KEPT_UNUSED", 1)
    paths = []
    for round_ in range(4):  # each an agent of its own: what was used before its start belongs to nobody
        world = ServedWorkdirs(tmp_path)
        data = archive_of(train=str(round_))
        world.answers = [data]
        paths.append(await world.ready(data))
        os.utime(paths[-1].parent / "ready", (round_, round_))
    assert [path.exists() for path in paths] == [False, False, True, True]
