"""An agent between a manager that speaks agent.proto over real gRPC and workers that speak worker.proto."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agent_world import FakeManager, ended, launch, runs, start_agent
from varuna_agent.notices.notices import FileNoticeSource
from varuna_agent.runner import AgentRunner
from varuna_agent.settings import AgentSettings
from varuna_agent.state import Identity, Timings, WorkerKey
from varuna_agent.workers.worker_starter import WorkerHost
from varuna_proto.held_port import hold_port
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S, until

STEPS_THEN_LEAVE = """
send(ready=w.WorkerReady(resumed_step=3))
step(4)
step(5)
send(evaluated=w.Evaluated(micro_batches=9))
send(checkpoint_done=w.CheckpointDone(step=5, url="file:///ckpt", total_bytes=7))
print("mode", wait_for_leave())
sys.exit(75)
"""
READY_THEN_LEAVE = "send(ready=w.WorkerReady())\nwait_for_leave()\nsys.exit(75)\n"
IGNORES_LEAVE = "import time\nsend(ready=w.WorkerReady())\nwhile True: time.sleep(60)\n"


class RecordedNotices(FileNoticeSource):
    """The notices of a cloud that asks for an acknowledgement."""

    acknowledged: tuple[str, ...] = ()

    async def acknowledge_notice(self, notice_id: str) -> None:
        self.acknowledged += (notice_id,)


class AgentInProcess:
    """An agent in this process, with its manager."""

    def __init__(self, manager: FakeManager, vm_dir: Path, gpus: int = 4) -> None:
        settings = AgentSettings(
            manager=f"127.0.0.1:{manager.port}",
            vm_id="vm-1",
            vm_dir=vm_dir,
            gpus=gpus,
            reconnect_most_s=0.2,
            notice_poll_s=0.02,
            # However busy the machine is: those who leave at once are waited for, and no pause passes for silence.
            timings=Timings(silence_s=DEADLINE_S, supersede_grace_s=DEADLINE_S, drain_linger_s=DEADLINE_S),
        )
        identity = Identity(vm_id="vm-1", incarnation="i", version="0", host="127.0.0.1", gpus=gpus)
        self.notices = RecordedNotices(vm_dir / "notice.json", settings.notice_poll_s)
        environ = {**os.environ, "VARUNA_MANAGER_TOKEN": "secret"}
        self.runner = AgentRunner(
            settings=settings,
            identity=identity,
            notice_source=self.notices,
            host=WorkerHost(base_environ=environ),
        )
        self.task = asyncio.create_task(self.runner.run())


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[FakeManager, AgentInProcess]]:
    """An agent that the manager has welcomed. At the end nothing that it started is left."""
    manager = FakeManager()
    # Nobody else is given the port while the test's manager is away.
    with closing(hold_port("127.0.0.1")) as held:
        await manager.start(held.getsockname()[1])
        vm = AgentInProcess(manager, tmp_path)
        try:
            await manager.until(lambda: manager.heartbeats)
            yield manager, vm
        finally:
            vm.task.cancel()
            with suppress(asyncio.CancelledError):
                await vm.task
            await manager.stop()
    left = [p for p in psutil.Process().children(recursive=True) if "guard.py" in " ".join(_cmdline(p))]
    assert left == []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def log_of(tmp_path: Path, rank: int = 1, generation: int = 1) -> str:
    return (tmp_path / "jobs" / "job" / f"g{generation}" / f"rank{rank}.log").read_text()


async def test_a_generation_starts_makes_steps_and_leaves_when_told(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, STEPS_THEN_LEAVE, ranks=2))
        started = await manager.fact("worker_started", 2)
        assert {(s.rank, s.resumed_step) for s in started} == {(1, 3), (2, 3)}
        assert all(psutil.pid_exists(s.pid) for s in started)

        await manager.until(lambda: [s for f in manager.facts("steps_completed") for s in f.steps if s.step == 5])
        steps = [s for fact in manager.facts("steps_completed") for s in fact.steps]
        assert [(s.step, s.loss, s.examples) for s in steps] == [(4, 0.25, 8), (5, 0.2, 8)]  # once, of two ranks

        health = await manager.until(lambda: [h for h in manager.heartbeats[-1].workers if h.evaluated])
        assert (health[0].step, health[0].forward_us, health[0].backward_us, health[0].evaluated) == (5, 11, 22, 9)
        assert (await manager.fact("checkpoint_committed"))[0].url == "file:///ckpt"

        manager.send_message(stop=pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_SAVE_FIRST, grace_s=DEADLINE_S))
        exits = await manager.fact("worker_exited", 2)
        assert {(e.rank, e.cause, e.exit_code) for e in exits} == {
            (1, pb.EXIT_CAUSE_GENERATION_ENDED, 75),
            (2, pb.EXIT_CAUSE_GENERATION_ENDED, 75),
        }
        assert log_of(tmp_path) == f"mode {pb.STOP_MODE_SAVE_FIRST}\n"


async def test_the_script_runs_in_a_clean_environment_with_the_agents_python(tmp_path: Path) -> None:
    script = """
        print(env.device, env.plan.global_batch, os.environ.get("VARUNA_MANAGER_TOKEN"), os.environ["OMP_NUM_THREADS"])
        print(os.path.dirname(sys.executable), os.environ["MINE"])
    """
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, script, environment={"MINE": "yes", "OMP_NUM_THREADS": "2"}))
        exited = (await manager.fact("worker_exited"))[0]
    assert (exited.cause, exited.error_text) == (pb.EXIT_CAUSE_FINISHED, "")
    assert log_of(tmp_path) == f"cpu 8 None 2\n{Path(sys.executable).parent} yes\n"


async def test_a_worker_hears_the_secret_over_its_socket_and_its_environment_does_not_show_it(tmp_path: Path) -> None:
    script = """
        admitted = framing.receive(agent, w.AgentToWorker).admitted
        print(admitted.secret[::-1], env.secret_from_agent, env.committed_step, "5ec3e7" in repr(os.environ))
    """
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, script, secret="5ec3e7", committed_step=7))
        await manager.fact("worker_exited")
    assert log_of(tmp_path) == "7e3ce5 True 7 False\n"


@pytest.mark.parametrize("is_warm", [False, True])
async def test_secrets_reach_the_script_and_nothing_of_the_agents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], *, is_warm: bool
) -> None:
    script = """
        import hashlib
        print(hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest(), os.environ["MINE"], env.rank)
        print("setup saw", open("seen").read())
    """
    environment, secrets = {"MINE": "yes"}, {"HF_TOKEN": "s3cr3t-value", "VARUNA_RANK": "7"}
    setup = 'printf "%s" "${HF_TOKEN:-nothing}" > seen'
    async with running(tmp_path) as (manager, _vm):
        command = launch(tmp_path, script, environment=environment, secrets=secrets, setup=setup)
        if is_warm:
            about = {"job_id": "job", "workdir": command.workdir, "environment": environment, "setup": setup}
            manager.send_message(prepare=pb.Prepare(command=command.command, **about))
            await manager.until(lambda: "job" in manager.heartbeats[-1].warm_jobs)
        manager.send_message(launch=command)
        exited = (await manager.fact("worker_exited"))[0]
    assert (exited.cause, exited.error_text) == (pb.EXIT_CAUSE_FINISHED, "")
    digest = hashlib.sha256(b"s3cr3t-value").hexdigest()
    assert log_of(tmp_path) == f"{digest} yes 1\nsetup saw nothing\n"
    output = capsys.readouterr()
    assert "s3cr3t-value" not in output.out + output.err + caplog.text
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t-value" in path.read_bytes()]
    assert not kept


async def test_copies_of_checkpoints_stay_on_the_vm_until_another_job_has_it(tmp_path: Path) -> None:
    copies = tmp_path.resolve() / "varuna-checkpoints" / "job"
    script = "os.makedirs(env.local_checkpoint_dir + '/varuna_ckpt_1', exist_ok=True)\nprint(env.local_checkpoint_dir)"
    async with running(tmp_path) as (manager, _vm):
        for generation in (1, 2):
            manager.send_message(launch=launch(tmp_path, script, generation=generation))
            await manager.fact("worker_exited", generation)
            assert log_of(tmp_path, generation=generation) == f"{copies}\n"
            assert [folder.name for folder in copies.iterdir()] == ["varuna_ckpt_1"]
        manager.send_message(launch=launch(tmp_path, script, generation=3, job_id="another"))
        await manager.until(lambda: not copies.exists())
        await manager.fact("worker_exited", 3)
    assert sorted(path.name for path in copies.parent.iterdir()) == [".varuna-agent", "another"]


async def test_the_traceback_of_a_script_arrives(tmp_path: Path) -> None:
    script = "send(failure=w.WorkerFailure(traceback='Traceback: boom'))\nsys.exit(1)"
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, script))
        exited = (await manager.fact("worker_exited"))[0]
        assert (exited.cause, exited.exit_code) == (pb.EXIT_CAUSE_SCRIPT_FAILED, 1)
        assert exited.error_text == "Traceback: boom"

        manager.send_message(launch=launch(tmp_path, "raise KeyError('the reason')", generation=2))
        exited = (await manager.fact("worker_exited", 2))[1]
        assert exited.cause == pb.EXIT_CAUSE_SCRIPT_FAILED
        assert exited.error_text.startswith("Traceback")
        assert exited.error_text.endswith("KeyError: 'the reason'")


async def test_a_worker_that_a_signal_ends_is_told_from_one_that_fails(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        script = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
        manager.send_message(launch=launch(tmp_path, script))
        exited = (await manager.fact("worker_exited"))[0]
        assert (exited.cause, exited.exit_code) == (pb.EXIT_CAUSE_KILLED, -9)
        assert "SIGKILL" in exited.error_text

        wrapped = launch(tmp_path, script, generation=2, command="bash -c 'python worker-2.py; exit $?'")
        manager.send_message(launch=wrapped)
        exited = (await manager.fact("worker_exited", 2))[1]
        assert (exited.cause, exited.exit_code) == (pb.EXIT_CAUSE_KILLED, -9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Then the shell's reason, which is another one where it may not read a folder of PATH.
        ({"command": "no-such-program --x"}, "no-such-program: "),
        ({"workdir": "/no/such/folder"}, "workdir '/no/such/folder' is not a folder"),
    ],
)
async def test_what_cannot_start_is_a_failed_launch(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, "", **changes))
        exited = (await manager.fact("worker_exited"))[0]
    assert exited.cause == pb.EXIT_CAUSE_LAUNCH_FAILED
    assert words in exited.error_text


async def test_stale_and_repeated_launches(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        second = launch(tmp_path, READY_THEN_LEAVE, generation=2)
        manager.send_message(launch=second)
        await manager.fact("worker_started")
        manager.send_message(launch=second)
        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE, generation=1))
        refused = (await manager.fact("command_refused"))[0]
        assert (refused.job_id, refused.generation) == ("job", 1)
        assert "generation 2" in refused.reason
        await manager.until(lambda: [w.generation for w in manager.heartbeats[-1].workers] == [2])

        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE, generation=3))  # takes the place of 2
        await manager.until(lambda: [s for s in manager.facts("worker_started") if s.generation == 3])
        exits = await manager.fact("worker_exited")  # on a CPU, generation 3 does not wait for the end of 2
        assert [(e.generation, e.cause) for e in exits] == [(2, pb.EXIT_CAUSE_GENERATION_ENDED)]
        assert len(manager.facts("worker_started")) == 2


async def test_rank_0_listens_on_the_port_that_the_agent_holds(tmp_path: Path) -> None:
    script = """
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        own.bind(("", env.rendezvous_port))
        own.listen()
        socket.create_connection(("127.0.0.1", env.rendezvous_port)).close()
    """
    async with running(tmp_path) as (manager, _vm):
        port = manager.heartbeats[-1].rendezvous_port
        assert port == manager.hellos[-1].rendezvous_port != 0
        rank_0 = {"workers": [pb.WorkerAssignment(rank=0, local_rank=0)], "rendezvous_port": port}
        manager.send_message(launch=launch(tmp_path, script, **rank_0))
        exited = (await manager.fact("worker_exited"))[0]
        assert exited.error_text == ""
        assert exited.cause == pb.EXIT_CAUSE_FINISHED
        await manager.until(lambda: manager.heartbeats[-1].rendezvous_port not in (0, port))

        manager.send_message(launch=launch(tmp_path, script, generation=2, **rank_0))
        exited = (await manager.fact("worker_exited", 2))[1]
        assert exited.cause == pb.EXIT_CAUSE_LAUNCH_REFUSED
        assert "rendezvous port stale" in exited.error_text


async def test_a_worker_that_does_not_leave_is_killed_after_the_grace(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, IGNORES_LEAVE))
        pid = (await manager.fact("worker_started"))[0].pid
        manager.send_message(stop=pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=0.05))
        exited = (await manager.fact("worker_exited"))[0]
        assert exited.cause == pb.EXIT_CAUSE_KILLED
        assert "had not left after 0.05 s" in exited.error_text
        assert not psutil.pid_exists(pid)


async def test_training_goes_on_without_the_manager(tmp_path: Path) -> None:
    script = """
        import time
        send(ready=w.WorkerReady())
        step(1)
        while not os.path.exists("cut"): time.sleep(0.01)
        for number in range(2, 6): step(number)
        send(checkpoint_done=w.CheckpointDone(step=5, url="file:///ckpt"))
        open("saved", "w").close()
        wait_for_leave()
    """
    async with running(tmp_path) as (first, _vm):
        first.send_message(launch=launch(tmp_path, script))
        await first.fact("steps_completed")
        first.acks = False
        await first.stop()
        (tmp_path / "cut").touch()
        await until(lambda: (tmp_path / "saved").exists())

        second = FakeManager()
        await second.start(first.port)
        try:
            hello = (await second.until(lambda: second.hellos))[0]
            assert [(w.job_id, w.generation, w.rank) for w in hello.workers] == [("job", 1, 1)]
            assert [(s.job_id, s.generation) for s in hello.seen_generations] == [("job", 1)]
            await second.fact("checkpoint_committed")
            await second.until(lambda: [s for f in second.facts("steps_completed") for s in f.steps if s.step == 5])
            steps = [s.step for fact in second.facts("steps_completed") for s in fact.steps]
            assert steps in ([1, 2, 3, 4, 5], [2, 3, 4, 5])  # step 1: if its acknowledgement was lost
            numbers = [r.number for r in second.reports]
            assert numbers == list(range(hello.first_report, hello.first_report + len(numbers)))
        finally:
            await second.stop()


async def test_reports_are_sent_again_until_they_are_acknowledged(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        manager.acks = False
        manager.send_message(launch=launch(tmp_path, STEPS_THEN_LEAVE))
        await manager.fact("checkpoint_committed")
        before = [r.number for r in manager.reports]
        manager.hang_up()
        await manager.until(lambda: len(manager.hellos) == 2)
        await manager.until(lambda: [r.number for r in manager.reports][: 2 * len(before)] == before * 2)
        manager.acks = True
        heartbeats = len(manager.heartbeats)
        await manager.until(lambda: len(manager.heartbeats) > heartbeats)
        manager.hang_up()
        await manager.until(lambda: len(manager.hellos) == 3)
        assert manager.hellos[2].first_report > before[-1]


async def test_workers_end_with_the_lease_and_that_is_reported_later(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, vm):
        manager.send_message(launch=launch(tmp_path, IGNORES_LEAVE))
        pid = (await manager.fact("worker_started"))[0].pid
        key = WorkerKey("job", 1, 1)
        manager.welcome.lease_s, manager.acks = 1.0, False
        manager.hang_up()
        await manager.until(lambda: len(manager.hellos) == 2 and manager.received[-1].HasField("heartbeat"))
        await manager.stop()
        await until(lambda: not psutil.pid_exists(pid))
        # Its guard notifies the agent a moment later; from then on no Hello names it.
        await until(lambda: key not in [worker.key for worker in vm.runner._state.workers])
        known = len(manager.hellos)
        await manager.start(manager.port)
        await manager.until(lambda: len(manager.hellos) > known)
        exited = (await manager.fact("worker_exited"))[0]
        assert exited.cause == pb.EXIT_CAUSE_LEASE_OVER
        assert "lease is over" in exited.error_text
        assert list(manager.hellos[-1].workers) == []


async def test_a_notice_in_the_file_is_reported_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        (tmp_path / "notice.json").write_text('{"id": "n-1", ')  # half written
        (tmp_path / "notice.json").write_text(json.dumps({"id": "n-1", "deadline_unix_s": time.time() + 3600}))
        notice = (await manager.fact("preemption_notice"))[0]
        assert notice.notice_id == "n-1"
        assert 3000 < notice.seconds_left <= 3600
        (tmp_path / "notice.json").write_text(json.dumps({"id": "n-2", "deadline_unix_s": time.time() + 9}))
        notices = await manager.fact("preemption_notice", 2)
        assert [n.notice_id for n in notices] == ["n-1", "n-2"]


async def test_logs_are_read_from_any_place(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, "print('a' * 10); print('b' * 600_000)"))
        await manager.fact("worker_exited")

        async def fetch(request_id: str, **fields: Any) -> list[pb.LogChunk]:
            manager.send_message(fetch_logs=pb.FetchLogs(request_id=request_id, generation=1, **fields))

            def chunks() -> list[pb.LogChunk]:
                logs = [m.log_chunk for m in manager.received if m.WhichOneof("body") == "log_chunk"]
                own = [chunk for chunk in logs if chunk.request_id == request_id]
                return own if own and own[-1].last else []

            return await manager.until(chunks)

        start = await fetch("1", job_id="job", rank=1, offset=0, max_bytes=5)
        assert [c.data for c in start] == [b"aaaaa"]
        end = await fetch("2", job_id="job", rank=1, offset=-3, max_bytes=100)
        assert [c.data for c in end] == [b"bb\n"]
        everything = await fetch("3", job_id="job", rank=1, offset=0, max_bytes=1_000_000)
        assert len(everything) > 1
        assert b"".join(c.data for c in everything) == b"a" * 10 + b"\n" + b"b" * 600_000 + b"\n"
        missing = await fetch("4", job_id="job", rank=9)
        assert "no log of job/g1/rank9" in missing[0].error
        known = len(manager.hellos)
        manager.send_message(fetch_logs=pb.FetchLogs(request_id="5", job_id="../../..", generation=1, rank=1))
        await manager.until(lambda: len(manager.hellos) > known)  # no more words with one that wants out of the folder


async def test_the_stacks_of_a_generation_come_one_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna_agent.workers.stacks._ANSWER_S", DEADLINE_S)
    script = READY_THEN_LEAVE.replace("wait_for_leave()", "def hangs():\n    wait_for_leave()\nhangs()")
    async with running(tmp_path) as (manager, _vm):
        manager.send_message(launch=launch(tmp_path, script, ranks=2))
        await manager.fact("worker_started", 2)

        async def read_dumps(request: str) -> list[pb.StackDump]:
            manager.send_message(dump_stacks=pb.DumpStacks(job_id="job", generation=1, request_id=request))

            def dumps() -> list[pb.StackDump]:
                found = [m.stack_dump for m in manager.received if m.stack_dump.request_id == request]
                return found if len(found) == 2 else []

            return list(await manager.until(dumps))

        found, request = list[pb.StackDump](), 0
        while not found or any("in hangs" not in dump.text for dump in found):  # one that pauses is taken as whole
            request += 1
            found = await read_dumps(str(request))
            assert {(dump.rank, dump.job_id, dump.generation, dump.error) for dump in found} == {
                (rank, "job", 1, "") for rank in (1, 2)
            }


async def test_stacks_and_logs_that_cannot_be_read_end_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("varuna_agent.workers.processes.WorkerProcesses.read_stacks", fail)
    monkeypatch.setattr("varuna_agent.logs.log_files.read_when_written", fail)
    async with running(tmp_path) as (manager, vm):
        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE))
        await manager.fact("worker_started")
        manager.send_message(dump_stacks=pb.DumpStacks(job_id="job", generation=1, request_id="r"))
        manager.send_message(fetch_logs=pb.FetchLogs(job_id="job", generation=1, rank=1, request_id="r"))

        def errors() -> list[str]:
            answers = [m.stack_dump.error or m.log_chunk.error for m in manager.received]
            found = [error for error in answers if error]
            return found if len(found) == 2 else []

        assert all("can't start new thread" in error for error in await manager.until(errors))
        assert not vm.task.done()


async def test_what_is_being_prepared_is_said_and_the_first_worker_starts_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna_agent.workers.warm_process._ANSWER_S", DEADLINE_S)
    script = "print(open(f'/proc/{os.getppid()}/cmdline').read().count('zygote.py'))"
    async with running(tmp_path) as (manager, _vm):
        command = launch(tmp_path, script)
        manager.send_message(prepare=pb.Prepare(job_id="job", command=command.command, workdir=command.workdir))
        await manager.until(lambda: any(list(beat.preparing_jobs) == ["job"] for beat in manager.heartbeats))
        await manager.until(lambda: not manager.heartbeats[-1].preparing_jobs)
        manager.send_message(launch=command)
        await manager.fact("worker_exited")
    assert log_of(tmp_path) == "1\n"


async def test_a_drained_agent_goes_when_its_workers_have_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, vm):
        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE))
        await manager.fact("worker_started")
        manager.send_message(drain=pb.Drain(reason="preempted"))
        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE, job_id="other"))
        refused = (await manager.fact("command_refused"))[0]
        assert "draining: preempted" in refused.reason
        assert not vm.task.done()
        manager.send_message(stop=pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S):
            assert await vm.task == 0
        assert manager.facts("worker_exited")[0].cause == pb.EXIT_CAUSE_GENERATION_ENDED


async def test_a_notice_is_acknowledged_when_nothing_runs_there_any_more(tmp_path: Path) -> None:
    async with running(tmp_path) as (manager, vm):
        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE))
        await manager.fact("worker_started")
        (tmp_path / "notice.json").write_text(json.dumps({"id": "n-1", "deadline_unix_s": time.time() + 60}))
        await manager.fact("preemption_notice")
        manager.send_message(drain=pb.Drain(reason="preempted"))
        beats = len(manager.heartbeats)
        await manager.until(lambda: len(manager.heartbeats) >= beats + 3)
        assert vm.notices.acknowledged == ()
        manager.send_message(stop=pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S):
            assert await vm.task == 0
        assert vm.notices.acknowledged == ("n-1",)


async def test_an_agent_that_a_signal_ends_acknowledges_no_notice(tmp_path: Path) -> None:
    """It may start again at once, and what it has kept in memory would go with the VM."""
    async with running(tmp_path) as (manager, vm):
        (tmp_path / "notice.json").write_text(json.dumps({"id": "n-1", "deadline_unix_s": time.time() + 900}))
        await manager.fact("preemption_notice")
        vm.runner.request_termination("SIGUSR2")
        async with asyncio.timeout(DEADLINE_S):
            assert await vm.task == 0
        assert vm.notices.acknowledged == ()


async def test_a_silent_manager_is_dialled_again(tmp_path: Path) -> None:
    manager = FakeManager(heartbeat_interval_s=0.02)
    await manager.start()
    settings = AgentSettings(
        manager=f"127.0.0.1:{manager.port}", vm_id="vm-1", vm_dir=tmp_path, timings=Timings(silence_s=0.1)
    )
    identity = Identity(vm_id="vm-1", incarnation="i", version="0", host="127.0.0.1", gpus=1)
    notices = FileNoticeSource(tmp_path / "notice.json", 1.0)
    host = WorkerHost(base_environ=os.environ)
    runner = AgentRunner(settings=settings, identity=identity, notice_source=notices, host=host)
    task = asyncio.create_task(runner.run())
    try:
        await manager.until(lambda: manager.heartbeats)
        manager.acks = False
        await manager.until(lambda: len(manager.hellos) >= 2)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await manager.stop()


# ---------------------------------------------------------------- the agent as a process of its own


FAMILY = """
child = subprocess.Popen(["sleep", "3600"])
session = subprocess.Popen(["sh", "-c", "sleep 3600 & wait"], start_new_session=True)
with open(f"pids-{env.rank}", "w") as file:
    file.write(f"{os.getpid()} {os.getppid()} {child.pid} {session.pid}")
send(ready=w.WorkerReady())
import time
while True: time.sleep(60)  # deaf: does not even notice that its agent has gone
"""


async def test_no_orphan_survives_a_kill_of_the_agents_process_group(
    tmp_path: Path, agents: list[asyncio.subprocess.Process]
) -> None:
    manager = FakeManager(heartbeat_interval_s=10.0)  # silence takes five of them
    await manager.start()
    agent = await start_agent(agents, f"127.0.0.1:{manager.port}", tmp_path)
    try:
        await manager.until(lambda: manager.heartbeats)
        command = "bash -c 'python worker-1.py; echo never'"
        manager.send_message(launch=launch(tmp_path, FAMILY, ranks=2, command=command))
        await manager.fact("worker_started", 2)
        family = psutil.Process(agent.pid).children(recursive=True)
        named = {int(pid) for rank in (1, 2) for pid in (tmp_path / f"pids-{rank}").read_text().split()}
        assert named < {process.pid for process in family}

        os.killpg(agent.pid, signal.SIGKILL)
        await until(lambda: not any(runs(process) for process in family))
        await agent.communicate()
    finally:
        await manager.stop()


async def test_sigterm_ends_the_workers_and_the_agent(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> None:
    manager = FakeManager(heartbeat_interval_s=10.0)  # silence takes five of them
    await manager.start()
    address, timings = f"127.0.0.1:{manager.port}", {"terminate_linger_s": DEADLINE_S}
    agent = await start_agent(agents, address, tmp_path, "--log-format", "json", timings=timings)
    try:
        await manager.until(lambda: manager.heartbeats)
        manager.send_message(launch=launch(tmp_path, READY_THEN_LEAVE))
        await manager.fact("worker_started")
        agent.terminate()
        exited = (await manager.fact("worker_exited"))[0]
        assert exited.cause == pb.EXIT_CAUSE_AGENT_ENDED
        code, errors = await ended(agent)
        assert code == 0
        assert all(json.loads(line)["vm"] == "vm-1" for line in errors.splitlines())
    finally:
        await manager.stop()


async def test_a_refused_agent_says_why_and_fails(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> None:
    manager = FakeManager()
    manager.refuse = "vm-1 is not of this fleet"
    await manager.start()
    try:
        agent = await start_agent(agents, f"127.0.0.1:{manager.port}", tmp_path)
        code, errors = await ended(agent)
        assert code == 1
        assert "vm-1 is not of this fleet" in errors
    finally:
        await manager.stop()


async def test_wrong_settings_give_one_line(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> None:
    elsewhere = await start_agent(agents, "10.1.2.3:7443", tmp_path)
    code, errors = await ended(elsewhere)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert "a manager that is not on a loopback address asks for a certificate" in errors


async def test_one_agent_per_folder(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> None:
    manager = FakeManager()
    await manager.start()
    try:
        await start_agent(agents, f"127.0.0.1:{manager.port}", tmp_path)
        await manager.until(lambda: manager.hellos)
        code, errors = await ended(await start_agent(agents, f"127.0.0.1:{manager.port}", tmp_path))
        assert code == 2
        assert "another agent runs in" in errors
        agents[0].terminate()
        assert (await ended(agents[0]))[0] == 0
    finally:
        await manager.stop()


async def test_prometheus_reads_an_agents_metrics(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> None:
    manager = FakeManager(heartbeat_interval_s=10.0)  # silence takes five of them
    await manager.start()
    held = hold_port("127.0.0.1")  # until the end: the agent's server may listen there, and nobody else is given it
    port = held.getsockname()[1]
    address = f"127.0.0.1:{manager.port}"
    agent = await start_agent(agents, address, tmp_path, "--metrics-port", str(port), "--reconnect-most-s", "0.2")

    def read() -> dict[str, float]:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=DEADLINE_S).text
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}

    async def shows(**wanted: float) -> None:
        """`connected` is varuna_agent_connected."""
        names = {f"varuna_agent_{name}": value for name, value in wanted.items()}
        await until(lambda: names.items() <= read().items())

    try:
        await manager.until(lambda: manager.heartbeats)
        await shows(connected=1, streams_total=1, notices_total=0)
        manager.send_message(launch=launch(tmp_path, "send(ready=w.WorkerReady())\nwait_for_leave()", ranks=2))
        await manager.fact("worker_started", 2)
        assert read()['varuna_agent_workers{phase="ready"}'] == 2
        (tmp_path / "notice.json").write_text(json.dumps({"id": "n-1", "deadline_unix_s": time.time() + 3600}))
        await shows(notices_total=1)
        manager.hang_up()
        await shows(connected=1, streams_total=2)
        agent.send_signal(signal.SIGTERM)
        assert (await ended(agent))[0] == 0
    finally:
        held.close()
        await manager.stop()


async def test_a_port_for_metrics_that_is_taken_is_told(
    tmp_path: Path, agents: list[asyncio.subprocess.Process]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = await start_agent(agents, "127.0.0.1:9", tmp_path, "--metrics-port", str(port))
        code, errors = await ended(agent)
    assert code == 1
    assert f"--metrics-port {port}" in errors
    assert "Traceback" not in errors
