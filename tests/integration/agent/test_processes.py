"""Workers under their guards: real processes, no manager."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_world import runs
from varuna_agent.link.worker_link import WorkerLink, socket_path
from varuna_agent.state import Workdir, WorkerKey
from varuna_agent.workers.isolation import make_worker_environ
from varuna_agent.workers.processes import (
    ProcessEnd,
    ProcessNotStartedError,
    ProcessSpec,
    WorkerProcesses,
)
from varuna_agent.workers.rendezvous_ports import RendezvousPorts
from varuna_proto import framing
from varuna_proto.v1 import agent_pb2, worker_pb2
from waiting import DEADLINE_S, until
from workdirs_in_place import workdirs_in_place


class Workers:
    """Starts workers and waits for their ends."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._ends: dict[WorkerKey, asyncio.Future[ProcessEnd | ProcessNotStartedError]] = {}
        self.processes = WorkerProcesses(on_end=self._ended, workdirs=workdirs_in_place(tmp_path))

    async def _ended(self, key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        self._ends[key].set_result(end)

    def start(self, command: str, rank: int = 0, **changes: Any) -> WorkerKey:
        key = WorkerKey("job", 1, rank)
        self._ends[key] = asyncio.get_running_loop().create_future()
        fields: dict[str, Any] = {"workdir": Workdir(path=str(self._tmp_path)), "environment": dict(os.environ)}
        self.processes.start_worker(
            ProcessSpec(key=key, command=command, log=self._tmp_path / "logs" / f"{rank}.log", **{**fields, **changes})
        )
        return key

    async def find_end(self, key: WorkerKey) -> ProcessEnd | ProcessNotStartedError:
        async with asyncio.timeout(DEADLINE_S):
            return await self._ends[key]

    async def end(self, key: WorkerKey) -> ProcessEnd:
        end = await self.find_end(key)
        assert isinstance(end, ProcessEnd)
        return end

    async def file(self, name: str) -> str:
        """The text of a file that a worker writes in one go."""
        path = self._tmp_path / name
        await until(lambda: path.exists() and bool(path.read_text()))
        return path.read_text()


def is_there(pid: int) -> bool:
    try:
        return runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def guards() -> list[psutil.Process]:
    """Of this process, of the workers."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if "guard.py" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest_asyncio.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    workers = Workers(tmp_path)
    yield workers
    await workers.processes.close()
    assert guards() == []


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("exit 75", 75), ("kill -SEGV $$", -11), ("nope", 127)])
async def test_the_end_of_a_worker_is_passed_on(workers: Workers, command: str, code: int) -> None:
    assert (await workers.end(workers.start(command))).exit_code == code


async def test_output_and_errors_go_to_the_log_and_its_last_lines_come_back(workers: Workers, tmp_path: Path) -> None:
    end = await workers.end(workers.start("seq 100; echo oops >&2; exit 3"))
    assert end.log_tail.splitlines() == [*map(str, range(62, 101)), "oops"]
    assert (tmp_path / "logs" / "0.log").read_text().startswith("1\n2\n")


async def test_a_worker_for_which_no_thread_is_left_is_reported_as_not_started(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    end = await workers.find_end(workers.start("true"))
    assert isinstance(end, ProcessNotStartedError)
    assert str(end) == "cannot start the worker: can't start new thread"


async def test_a_worker_whose_log_cannot_be_read_has_ended_all_the_same(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> NoReturn:
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr("varuna_agent.logs.log_files.read_tail", fail)
    end = await workers.end(workers.start("exit 7"))
    assert end.exit_code == 7
    assert "Too many open files" in end.log_tail


async def test_what_a_worker_leaves_behind_is_killed(workers: Workers) -> None:
    left = "sleep 600 & echo $! > group; setsid sh -c 'echo $$ > session.tmp; mv session.tmp session; sleep 600' &"
    key = workers.start(f"{left} while [ ! -s session ]; do sleep 0.01; done; exit 0")
    assert (await workers.end(key)).exit_code == 0
    for name in ("group", "session"):
        assert not is_there(int(await workers.file(name)))


async def test_a_kill_reaches_all_generations_of_children(workers: Workers) -> None:
    key = workers.start("bash -c 'sh -c \"echo \\$\\$ > deep; sleep 600\"; true'; true")
    deep = int(await workers.file("deep"))
    workers.processes.kill_worker(key)
    assert (await workers.end(key)).exit_code == -signal.SIGKILL
    assert not is_there(deep)
    workers.processes.kill_worker(key)  # again: nothing


async def test_a_kill_at_once_after_the_start_is_not_lost(workers: Workers, tmp_path: Path) -> None:
    key = workers.start("sleep 600")
    workers.processes.kill_worker(key)
    assert (await workers.end(key)).exit_code == -signal.SIGKILL


async def test_a_worker_does_not_outlive_its_guard(workers: Workers) -> None:
    key = workers.start("sh -c 'echo $$ > child; sleep 600'; true")
    child = int(await workers.file("child"))
    (guard,) = guards()
    guard.kill()
    assert (await workers.end(key)).exit_code == -signal.SIGKILL
    await until(lambda: not is_there(child))


async def test_signals_are_as_a_shell_expects_them(workers: Workers) -> None:
    script = "import signal; print([signal.getsignal(s) for s in (2, 13, 15)] == [signal.default_int_handler, 1, 0])"
    end = await workers.end(workers.start(f"{sys.executable} -c '{script}'; exit 1"))
    assert end.log_tail == "True"  # SIGPIPE: ignored by Python itself


async def test_a_worker_inherits_no_descriptor_that_is_not_its_own(workers: Workers) -> None:
    with closing(RendezvousPorts("127.0.0.1")) as ports:
        ports.open_port()
        end = await workers.end(workers.start("ls /proc/self/fd | wc -w; exit 1"))
    # 0, 1, 2, the pipe for stacks, and the folder that ls reads.
    assert end.log_tail.splitlines() == ["5"]


def test_the_port_of_a_rank_0_is_held_until_it_has_ended() -> None:
    key = WorkerKey("job", 1, 0)
    with closing(RendezvousPorts("127.0.0.1")) as ports, socket.socket() as other:
        port = ports.open_port()
        ports.claim_port(port)
        ports.assign_port(port, key)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        ports.release_worker(key)
        ports.release_worker(key)  # again: nothing
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9"])
def test_a_held_port_is_nobody_elses_by_chance(address: str) -> None:
    # Not on another address either: a connection from there would keep torch's store from listening on all addresses.
    sockets = RendezvousPorts("127.0.0.1")
    port = sockets.open_port()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    finally:
        sockets.close()


def test_a_scripts_own_process_group_may_listen_on_the_held_port() -> None:
    sockets = RendezvousPorts("127.0.0.1")
    port = sockets.open_port()
    try:
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("", port))  # as torch's store does
            own.listen()
    finally:
        sockets.close()


def test_a_host_that_is_not_of_this_vm_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot bind a port on 192\.0\.2\.1"):
        RendezvousPorts("192.0.2.1").open_port()


def test_the_environment_of_a_worker() -> None:
    base = {"PATH": "/bin", "VARUNA_MANAGER_TOKEN": "secret", "HOME": "/root"}
    environ = make_worker_environ(base, {"A": "job's"}, on_cpu=True)
    assert environ == {
        "PATH": f"{Path(sys.executable).parent}:/bin",
        "HOME": "/root",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "A": "job's",
    }
    assert "OMP_NUM_THREADS" not in make_worker_environ(base, {}, on_cpu=False)
    assert make_worker_environ({"OMP_NUM_THREADS": "4"}, {}, on_cpu=True)["OMP_NUM_THREADS"] == "4"


# ---------------------------------------------------------------- the socket of the workers


class WorkerLinkListener:
    def __init__(self, *ours: WorkerKey) -> None:
        self.ours = set(ours)
        self.events: list[Any] = []

    def accept_worker(self, key: WorkerKey, pid: int) -> bool:
        self.events.append(("connected", key, pid))
        return key in self.ours

    def receive_worker_message(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> None:
        self.events.append(message.WhichOneof("body"))

    def handle_worker_disconnection(self, key: WorkerKey) -> None:
        self.events.append(("disconnected", key))


KEY = WorkerKey("job", 1, 0)


def hello(key: WorkerKey) -> bytes:
    message = worker_pb2.WorkerHello(job_id=key.job_id, generation=key.generation, rank=key.rank, pid=7)
    return framing.frame(worker_pb2.WorkerMessage(hello=message))


@pytest_asyncio.fixture
async def link(tmp_path: Path) -> AsyncIterator[tuple[WorkerLink, WorkerLinkListener]]:
    listener = WorkerLinkListener(KEY)
    link = WorkerLink(socket_path(tmp_path), listener)
    await link.start()
    yield link, listener
    await link.close()
    assert not link.path.exists()


async def test_all_that_a_worker_said_is_handled_before_its_end(link: tuple[WorkerLink, WorkerLinkListener]) -> None:
    server, listener = link
    _, writer = await asyncio.open_unix_connection(server.path)
    writer.write(hello(KEY))
    for _ in range(3):
        writer.write(framing.frame(worker_pb2.WorkerMessage(ready=worker_pb2.WorkerReady())))
    writer.close()
    await writer.wait_closed()
    await server.wait_drained(KEY, timeout_s=DEADLINE_S)
    assert listener.events == [("connected", KEY, 7), "ready", "ready", "ready", ("disconnected", KEY)]


@pytest.mark.parametrize(
    "first",
    [hello(WorkerKey("job", 2, 0)), b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\xff\xff\xff\xff", b""],
    ids=["another generation", "another protocol", "not a message", "nothing"],
)
async def test_strangers_are_turned_away(link: tuple[WorkerLink, WorkerLinkListener], first: bytes) -> None:
    server, listener = link
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(first)
    if not first:
        writer.write_eof()
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read() == b""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    assert [event for event in listener.events if event[0] != "connected"] == []


FRAMES = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda body: len(body).to_bytes(4, "big") + body),
    st.integers(framing.MAX_FRAME_BYTES + 1, 2**32 - 1).map(lambda length: length.to_bytes(4, "big")),
)


async def test_whatever_bytes_a_worker_sends_the_others_are_heard(link: tuple[WorkerLink, WorkerLinkListener]) -> None:
    server, listener = link
    sent: list[tuple[bool, bytes]] = []

    @settings(max_examples=80, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(greets=st.booleans(), data=st.lists(FRAMES, max_size=3).map(b"".join))
    def play(greets: bool, data: bytes) -> None:
        sent.append((greets, data))

    play()
    for greets, data in sent:
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write((hello(KEY) if greets else b"") + data)
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                assert await reader.read() == b"", "it is not answered, and the connection ends"
        writer.close()
        await server.wait_drained(KEY, timeout_s=DEADLINE_S)
    listener.events.clear()
    _, writer = await asyncio.open_unix_connection(server.path)
    writer.write(hello(KEY) + framing.frame(worker_pb2.WorkerMessage(ready=worker_pb2.WorkerReady())))
    await until(lambda: "ready" in listener.events)
    writer.close()


async def test_a_second_connection_of_the_same_rank_does_not_disturb_the_first(
    link: tuple[WorkerLink, WorkerLinkListener],
) -> None:
    server, listener = link
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(hello(KEY))
    await until(lambda: bool(listener.events))
    second_reader, second = await asyncio.open_unix_connection(server.path)
    second.write(hello(KEY))
    assert await second_reader.read() == b""
    server.send_leave(KEY, agent_pb2.STOP_MODE_LEAVE_NOW)
    message = await framing.read(reader, worker_pb2.AgentToWorker)
    assert message is not None
    assert message.leave.mode == agent_pb2.STOP_MODE_LEAVE_NOW
    for stream in (writer, second):
        stream.close()
        await stream.wait_closed()


def test_a_long_folder_name_does_not_break_the_socket(tmp_path: Path) -> None:
    path = socket_path(tmp_path / ("x" * 120))
    try:
        assert len(str(path)) < 104
    finally:
        path.parent.rmdir()
