"""The asyncio shell around the agent's state: passes events in, carries instructions out."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import structlog

from varuna_agent.folders.checkpoint_copies import CheckpointCopies
from varuna_agent.folders.workdirs import WorkdirError, Workdirs
from varuna_agent.link.backoff import Backoff
from varuna_agent.link.manager_link import ManagerLink
from varuna_agent.link.memory_link import MemoryLink
from varuna_agent.link.worker_link import WorkerLink, socket_path
from varuna_agent.logs.log_requests import read_log_chunks
from varuna_agent.logs.retention import LogSizes, keep_logs_small
from varuna_agent.notices.notices import NoticeCancellation, NoticeSource, unix_now_s
from varuna_agent.observability.machine_usage import SAMPLE_S, MachineUsage
from varuna_agent.observability.observers import Observers
from varuna_agent.seen_generations import SeenGenerations
from varuna_agent.settings import AgentSettings
from varuna_agent.state import AgentState, Event, Identity, Instruction, WorkerKey, make_stack_dump
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.workers.memory_files import KeptFile, MemoryFiles
from varuna_agent.workers.processes import ProcessEnd, ProcessNotStartedError, WorkerProcesses
from varuna_agent.workers.rendezvous_ports import RendezvousPorts
from varuna_agent.workers.worker_starter import WorkerHost, WorkerStarter
from varuna_proto.environment import memory_socket
from varuna_proto.failpoints import failpoint
from varuna_proto.v1 import agent_pb2, worker_pb2

if TYPE_CHECKING:
    from varuna_agent.identity.certificate import AgentIdentity

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_MAX_TIMER_S = 1.0
"""The longest wait of the timer. The loop's clock stops while the VM is suspended; `_now` does not."""
_DRAIN_SOCKET_S = 2.0
_LOG_CHECK_S = 10.0
_PORT_RETRY_S = 1.0
"""Between two attempts to hold a port for the next rank 0."""


class AgentMemory(NamedTuple):
    files: MemoryFiles
    adopted: Sequence[KeptFile] = ()
    """What an earlier process of this agent has kept, and is among `files`."""


class AgentRunner:
    """One agent, from its start until it exits.

    Args:
        host: what workers on this VM run with.
        manager_identity: this VM's certificate; None: the manager uses no TLS.
        memory: what workers leave in memory, and what an earlier process of this agent has kept; None: nothing is.
        chance: source of random waiting times; None: a new one.
    """

    def __init__(
        self,
        *,
        settings: AgentSettings,
        identity: Identity,
        notice_source: NoticeSource,
        host: WorkerHost,
        observers: Observers | None = None,
        manager_identity: AgentIdentity | None = None,
        memory: AgentMemory | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._host = host
        self._observers = observers or Observers()
        self._notice_source = notice_source
        self._pending_notices: set[str] = set()
        self._seen = SeenGenerations(settings.vm_dir)
        self._memory = memory or AgentMemory(MemoryFiles(0))
        keep_memory_s = settings.timings.keep_memory_s if self._memory.files.limit_bytes else 0.0
        timings = replace(settings.timings, keep_survivors_s=settings.keep_warm_s, keep_memory_s=keep_memory_s)
        self._state = AgentState(identity, timings, self._seen.read())
        for kept in self._memory.adopted:
            self._state.adopt_memory(kept.key, kept.step, kept.bytes, _now())
        backoff = Backoff(settings.reconnect_first_s, settings.reconnect_most_s, chance or random.Random())
        self._manager = ManagerLink(settings.manager, backoff, self, manager_identity)
        self._link = WorkerLink(socket_path(settings.vm_dir), self, host.user)
        self._memory_link = MemoryLink(Path(memory_socket(str(self._link.path))), self._memory.files, self, host.user)
        self._processes = WorkerProcesses(
            on_end=self._handle_process_end,
            workdirs=Workdirs(settings.vm_dir / "workdirs", self._fetch_archive),
            keep_warm_s=settings.keep_warm_s,
            user=host.user,
            on_warm_change=self._handle_warm_change,
            on_prepared=self._handle_preparation_end,
            groups=host.groups,
        )
        self._copies: CheckpointCopies | None = None
        self._starter: WorkerStarter | None = None
        self._usage: agent_pb2.MachineUsage | None = None
        """The newest sample, until it is sent."""
        self._ports = RendezvousPorts(settings.host)
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._port_retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Run until the agent exits; returns its exit code. Leaves no worker behind, even when it raises."""
        self._finished = asyncio.get_running_loop().create_future()
        try:
            self._copies = CheckpointCopies.open_folder(self._settings.checkpoint_dir or self._settings.vm_dir)
            self._starter = WorkerStarter(
                host=self._host,
                processes=self._processes,
                copies=self._copies,
                vm_dir=self._settings.vm_dir,
                agent_socket=self._link.path,
                on_cpu=self._settings.device == "cpu",
                gpu_type=self._settings.gpu_type,
            )
            await self._link.start()
            if self._memory.files.limit_bytes:
                await self._memory_link.start()
            self.handle_event(ev.RendezvousPortOpened(self._ports.open_port()))
            self._start_task(self._manager.run(), "manager link")
            self._start_task(self._watch_notices(), "notices")
            self._start_task(self._keep_logs_small(), "log sizes")
            self._start_task(self._sample_usage(), "usage")
            code = await self._finished
            # Before the stream ends: then the manager may give this VM back at once.
            await asyncio.to_thread(self._observers.close)
        finally:
            self._finished.cancel()
            await self._close()
        # A signal may only replace this process: the VM stays for the next one, and for the memory that it gets.
        for notice_id in self._pending_notices if self._state.is_drained else ():
            await self._notice_source.acknowledge_notice(notice_id)
        return code

    def request_termination(self, reason: str, *, keeps_memory: bool = False) -> None:
        """End the workers, then return from `run`. `keeps_memory`: they leave their state in memory files."""
        self.handle_event(ev.TerminationRequested(reason, keeps_memory))

    def handle_event(self, event: Event) -> None:
        """Let the state decide about the event, and carry out its instructions. Events that arise meanwhile follow."""
        self._events.append(event)
        if self._is_handling or self._finished is None or self._finished.done():
            return
        self._is_handling = True
        try:
            while self._events:
                for instruction in self._state.handle_event(self._events.popleft(), _now()):
                    self._carry_out(instruction)
            self._set_timer()
            self._observers.measure_state(self._state)
        except Exception as error:
            self._fail_run(error)  # a defect: it must not pass silently in some callback
        finally:
            self._is_handling = False

    # ------------------------------------------------------------ the links' listener

    def handle_stream_open(self) -> None:
        self._observers.count_stream()
        self.handle_event(ev.StreamOpened())

    def receive_manager_message(self, message: agent_pb2.ManagerMessage) -> None:
        failpoint(f"agent.{message.WhichOneof('body')}.received")
        self._observers.record_command(message)
        self.handle_event(ev.ManagerMessageReceived(message))

    def handle_stream_close(self, reason: str) -> None:
        self.handle_event(ev.StreamClosed(reason))

    def accept_worker(self, key: WorkerKey, pid: int) -> bool:
        is_expected = self._state.is_expected(key)
        failpoint("agent.worker.connected")
        if is_expected:
            self.handle_event(ev.WorkerConnected(key, pid))
        return is_expected

    def receive_worker_message(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> None:
        self._observers.trace_start(self._state.workers, key, message)
        self.handle_event(ev.WorkerMessageReceived(key, message))
        if message.HasField("generation_left") and not self._state.has_worker(key):
            self._observers.trace_end(key)

    def handle_worker_disconnection(self, key: WorkerKey) -> None:
        self.handle_event(ev.WorkerDisconnected(key))

    # ------------------------------------------------------------ the memory link's listener

    def may_store(self, key: WorkerKey, secret: str) -> bool:
        return self._state.may_store(key, secret)

    def list_memories(self, key: WorkerKey, secret: str) -> list[WorkerKey]:
        return self._state.list_memories(key, secret)

    def handle_state_stored(self, key: WorkerKey, step: int, size: int) -> None:
        self.handle_event(ev.StateStored(key, step, size))

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: Instruction) -> None:  # noqa: C901 - a case for each instruction
        failpoint(f"agent.{type(instruction).__name__}.before")
        match instruction:
            case ins.SendMessage(message):
                if message.HasField("heartbeat") and self._usage is not None:
                    message.heartbeat.usage.CopyFrom(self._usage)
                    self._usage = None
                self._manager.send_message(message)
                if message.HasField("report"):
                    failpoint(f"agent.{message.report.WhichOneof('fact')}.sent")
                return
            case ins.ReadLogs(request):
                self._start_task(self._send_logs(request), "logs")
                return
            case ins.ReadStacks(request_id, key, pid):
                self._start_task(self._send_stacks(request_id, key, pid), "stacks")
            case ins.PrepareJob(request):
                assert self._starter is not None
                self._starter.prepare_job(request)
                return
            case ins.CancelPreparation(job_id):
                self._processes.cancel_preparation(job_id)
            case ins.KeepFolders(job_ids):
                self._processes.keep_folders(job_ids)
                return
            case ins.SaveSeenGenerations(seen):
                self._seen.write(seen)
                return
            case ins.StartWorker():
                self._start_worker(instruction)
            case ins.AssignWorker():
                self._assign_worker(instruction)
            case ins.AskToGive(key):
                assert self._starter is not None
                self._link.send_give_state(key, self._starter.make_give_state(instruction))
            case ins.AdmitWorker(key, secret):
                self._link.send_admission(key, secret)
            case ins.SendLeave(key, mode):
                self._link.send_leave(
                    key,
                    mode,
                    keep_state=instruction.keep_state,
                    in_place=instruction.in_place,
                    within_step=instruction.within_step,
                    spare=instruction.spare,
                    store_state=instruction.store_state,
                )
            case ins.SendAheadPart(key, part):
                self._link.send_ahead_part(key, part)
            case ins.SendStore(key):
                self._link.send_store_state(key)
            case ins.FreeMemory(key, _):
                self._memory.files.free_file(key)
            case ins.KillWorker(key, _):
                self._processes.kill_worker(key)
            case ins.ClaimRendezvousPort(port):
                self._ports.claim_port(port)
                self._open_rendezvous_port()
            case ins.ReleaseRendezvousPort(port):
                self._ports.release_port(port)
            case ins.HangUp():
                self._manager.hang_up()
            case ins.ExitAgent(code, _):
                if self._finished is not None and not self._finished.done():
                    self._finished.set_result(code)
            case _:
                assert_never(instruction)
        _log.info("agent acts", **_describe_instruction(instruction))

    def _open_rendezvous_port(self) -> None:
        """Hold a port for the next rank 0. While the VM has no port or descriptor left, rank 0 runs on other VMs."""
        try:
            port = self._ports.open_port()
        except OSError as error:
            _log.warning("no port for the next rank 0: the agent tries again", error=str(error))
            self._port_retry = asyncio.get_running_loop().call_later(_PORT_RETRY_S, self._open_rendezvous_port)
            return
        self.handle_event(ev.RendezvousPortOpened(port))

    def _start_worker(self, start: ins.StartWorker) -> None:
        assert self._copies is not None
        assert self._starter is not None
        if start.rendezvous_port:
            self._ports.assign_port(start.rendezvous_port, start.key)
        jobs = {*self._processes.job_ids, start.key.job_id}
        self._start_task(asyncio.to_thread(self._copies.discard_other_jobs, jobs), "copies of checkpoints")
        try:
            self._starter.start_worker(start)
        except OSError as error:  # a full disk, no descriptor left, ...: it concerns this worker alone
            self._ports.release_worker(start.key)
            self.handle_event(ev.ProcessNotStarted(start.key, f"cannot start the worker: {error}"))

    def _assign_worker(self, assign: ins.AssignWorker) -> None:
        assert self._starter is not None
        start = assign.start
        assigned = self._starter.assign_worker(assign)
        if assigned is None:
            if start.rendezvous_port:
                self._ports.release_port(start.rendezvous_port)
            self.handle_event(ev.ProcessNotStarted(start.key, f"the process of {assign.survivor} has ended"))
            return
        if start.rendezvous_port:
            self._ports.assign_port(start.rendezvous_port, start.key)
        self._link.send_assignment(assign.survivor, start.key, assigned)

    def _handle_warm_change(self, warming: frozenset[str], warm: frozenset[str]) -> None:
        self.handle_event(ev.WarmJobsChanged(warming, warm))

    def _handle_preparation_end(self, job_id: str, error: WorkdirError | None) -> None:
        if error is None:
            self.handle_event(ev.PreparationEnded(job_id))
            return
        _log.warning("a job's workdir is not ready", job=job_id, reason=str(error))
        self.handle_event(ev.PreparationEnded(job_id, str(error), error.exit_code))

    def _fetch_archive(self, sha256: str) -> AsyncIterator[bytes]:
        return self._manager.fetch_archive(self._settings.vm_id, sha256)

    async def _handle_process_end(self, key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        self._ports.release_worker(key)
        if isinstance(end, ProcessNotStartedError):
            self.handle_event(ev.ProcessNotStarted(key, str(end)))
            return
        if self._state.has_worker(key):
            self._observers.trace_end(key)
        if self._state.is_departing:  # the manager may give this VM back as soon as its last worker has ended
            await asyncio.to_thread(self._observers.flush)
        await self._link.wait_drained(key, _DRAIN_SOCKET_S)  # its last messages come before its end
        failpoint("agent.worker.ended")
        _log.info("worker ended", **key.log_fields, exit_code=end.exit_code)
        self.handle_event(ev.ProcessEnded(key, end.exit_code, end.log_tail))

    async def _send_logs(self, request: agent_pb2.FetchLogs) -> None:
        for chunk in await read_log_chunks(self._settings.vm_dir, self._settings.vm_id, request):
            self._manager.send_message(agent_pb2.AgentMessage(log_chunk=chunk))

    async def _send_stacks(self, request_id: str, key: WorkerKey, pid: int) -> None:
        try:
            dump = make_stack_dump(request_id, key, text=await self._processes.read_stacks(key, pid))
        except Exception as error:  # a worker that cannot be examined must not end the agent and all other workers
            dump = make_stack_dump(request_id, key, error=str(error) or repr(error))
        self._manager.send_message(dump)

    # ------------------------------------------------------------ sources of events

    async def _watch_notices(self) -> None:
        async for notice in self._notice_source.watch_notices():
            if isinstance(notice, NoticeCancellation):
                # The workers may have left by now. The VM leaves all the same, and the manager asks for another one.
                _log.warning("the notice is withdrawn", notice=notice.notice_id)
                self._pending_notices.discard(notice.notice_id)
                continue
            self._pending_notices.add(notice.notice_id)
            self._observers.count_notice()
            seconds_left = notice.seconds_left(unix_now_s())
            _log.warning("this VM will be taken away", notice=notice.notice_id, seconds_left=round(seconds_left, 1))
            self.handle_event(ev.NoticeReceived(notice.notice_id, seconds_left, notice.source))

    async def _sample_usage(self) -> None:
        """Measure how busy the machine is; the next heartbeat sends it."""
        machine: MachineUsage | None = None
        last_error = ""
        while True:
            try:
                if machine is None:
                    machine = await asyncio.to_thread(MachineUsage)  # a sample is of the time since then
                else:
                    self._usage = await asyncio.to_thread(machine.take_sample)
            except Exception as error:  # whatever this system does not tell, the agent goes on
                if str(error) != last_error:
                    _log.warning("the machine's usage cannot be measured", error=str(error))
                last_error = str(error)
            await asyncio.sleep(SAMPLE_S)

    async def _keep_logs_small(self) -> None:
        sizes = LogSizes(each_bytes=self._settings.log_bytes, old_bytes=self._settings.old_logs_bytes)
        while True:
            state = self._state
            keys = [each.key for each in state.workers] + [each.key for each in state.survivors]
            running = {key.generation_key for key in [*keys, *(each.key for each in state.newcomers)]}
            try:
                await asyncio.to_thread(keep_logs_small, self._settings.vm_dir, running, sizes)
            except OSError as error:
                _log.warning("the logs cannot be trimmed", error=str(error))
            await asyncio.sleep(_LOG_CHECK_S)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._state.next_deadline()
        if deadline is not None:
            wait_s = min(max(0.0, deadline - _now()), _MAX_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.handle_event, ev.Tick())

    # ------------------------------------------------------------ tasks

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_end)

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail_run(error)

    def _fail_run(self, error: BaseException) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)

    async def _close(self) -> None:
        for timer in (self._timer, self._port_retry):
            if timer is not None:
                timer.cancel()
        await self._processes.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._memory_link.close()
        await self._link.close()
        self._ports.close()
        if self._copies is not None:
            self._copies.close()


def _now() -> float:
    """Seconds on a clock that counts suspended time, where the system has one, because leases go on meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _describe_instruction(instruction: Instruction) -> dict[str, object]:
    """Fields for the log: the action, its object and its reason."""
    fields: dict[str, object] = {"action": type(instruction).__name__}
    key = getattr(instruction, "key", None)
    if isinstance(key, WorkerKey):
        fields |= key.log_fields
    for name in ("reason", "port", "code", "command"):
        if hasattr(instruction, name):
            fields[name] = str(getattr(instruction, name))
    return fields
