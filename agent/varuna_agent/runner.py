"""The asyncio shell around the agent's state: passes events in, carries instructions out."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

import structlog

from varuna_agent import logs
from varuna_agent.copies import CheckpointCopies
from varuna_agent.groups import JobGroups
from varuna_agent.isolation import JobUser, worker_environ
from varuna_agent.log_retention import LogSizes, keep_logs_small
from varuna_agent.manager_link import Backoff, ManagerLink
from varuna_agent.morph_spans import MorphSpans
from varuna_agent.notices import NoticeCancelled, NoticeSource, unix_now_s
from varuna_agent.processes import (
    ProcessEnd,
    ProcessNotStartedError,
    ProcessSpec,
    WorkerProcesses,
)
from varuna_agent.rendezvous import RendezvousSockets
from varuna_agent.seen import SeenGenerations
from varuna_agent.settings import AgentSettings
from varuna_agent.stacks import NoStacksError
from varuna_agent.state import AgentState, Event, Identity, Instruction, JobLimits, Workdir, WorkerKey, stack_dump
from varuna_agent.state import stimuli as st
from varuna_agent.workdirs import WorkdirError, Workdirs
from varuna_agent.worker_link import WorkerLink, socket_path
from varuna_proto.failpoints import failpoint
from varuna_proto.v1 import agent_pb2, worker_pb2

if TYPE_CHECKING:
    from varuna_agent.identity import AgentIdentity
    from varuna_agent.metrics import AgentMetrics

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_LOG_CHUNK_BYTES = 256 * 1024
_DEFAULT_LOG_BYTES = 64 * 1024
_MAX_LOG_BYTES = 4 * 1024 * 1024
_MAX_TIMER_S = 1.0
"""The loop's clock stands still while the VM is suspended, `_now` does not: look at it at least this often."""
_DRAIN_SOCKET_S = 2.0
_LOOK_AT_LOGS_S = 10.0
_REOPEN_S = 1.0
"""Between two attempts to get a port for the next rendezvous."""


class AgentRunner:
    """One agent, from its start until it exits.

    Args:
        base_environ: what workers inherit, apart from Varuna's own settings and secrets.
        user: as whom workers run; None: as this process.
        manager_identity: this VM's certificate; None: the manager is an open one.
        spans: told of what traces tell; None: nobody traces.
        metrics: None: nobody asks for them.
        groups: the jobs' control groups; None: this VM has none.
    """

    def __init__(
        self,
        settings: AgentSettings,
        identity: Identity,
        notice_source: NoticeSource,
        base_environ: Mapping[str, str],
        chance: random.Random | None = None,
        user: JobUser | None = None,
        manager_identity: AgentIdentity | None = None,
        spans: MorphSpans | None = None,
        metrics: AgentMetrics | None = None,
        groups: JobGroups | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._spans = spans
        self._notice_source = notice_source
        self._noticed: set[str] = set()
        self._base_environ = base_environ
        self._user = user
        self._seen = SeenGenerations(settings.vm_dir)
        self._state = AgentState(identity, settings.timings, self._seen.read())
        backoff = Backoff(settings.reconnect_first_s, settings.reconnect_most_s, chance or random.Random())
        self._manager = ManagerLink(settings.manager, backoff, _FromManager(self), manager_identity)
        self._link = WorkerLink(socket_path(settings.vm_dir), _FromWorkers(self), user)
        workdirs = Workdirs(settings.vm_dir / "workdirs", self._fetch_archive)
        self._processes = WorkerProcesses(
            self._process_ended, workdirs, settings.keep_warm_s, user, self._preparing, self._prepared, groups
        )
        self._copies: CheckpointCopies | None = None
        self._rendezvous = RendezvousSockets(settings.host)
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """The exit code for the process. Workers have ended when this returns, however it does. Raises CopiesError."""
        self._finished = asyncio.get_running_loop().create_future()
        try:
            self._copies = CheckpointCopies.open(self._settings.checkpoint_dir or self._settings.vm_dir)
            await self._link.start()
            self.handle(st.RendezvousOpened(self._rendezvous.open()))
            self._spawn(self._manager.run(), "manager link")
            self._spawn(self._watch_notices(), "notices")
            self._spawn(self._keep_logs_small(), "log sizes")
            code = await self._finished
            if self._spans is not None:  # before the stream ends: then the manager may give this VM back at once
                await asyncio.to_thread(self._spans.close)
        finally:
            self._finished.cancel()
            await self._close()
        for notice_id in self._noticed if code == 0 else ():
            await self._notice_source.acknowledge(notice_id)
        return code

    def terminate(self, reason: str) -> None:
        """End the workers, then return from `run`."""
        self.handle(st.Terminate(reason))

    def handle(self, event: Event) -> None:
        """Let the state decide about the event, and do what it says. Events that arise meanwhile come after it."""
        self._events.append(event)
        if self._is_handling or self._finished is None or self._finished.done():
            return
        self._is_handling = True
        try:
            while self._events:
                for instruction in self._state.handle(self._events.popleft(), _now()):
                    self._carry_out(instruction)
            self._set_timer()
            self._measure()
        except Exception as error:
            self._fail(error)  # a defect: it must not pass silently in some callback
        finally:
            self._is_handling = False

    def stream_opened(self) -> None:
        if self._metrics is not None:
            self._metrics.stream_opened()
        self.handle(st.StreamOpened())

    def trace_told(self, message: agent_pb2.ManagerMessage) -> None:
        if self._spans is not None:
            self._spans.told(message)

    def trace_ready(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> None:
        if self._spans is not None and message.HasField("ready"):
            for worker in self._state.workers:
                if worker.key == key:
                    self._spans.ready(worker, message.ready)

    def expects(self, key: WorkerKey) -> bool:
        """Whether a worker that says it is `key` may connect."""
        return self._state.expects(key)

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: Instruction) -> None:
        failpoint(f"agent.{type(instruction).__name__}.before")
        match instruction:
            case st.Send(message):
                self._manager.send(message)
                if message.HasField("report"):
                    failpoint(f"agent.{message.report.WhichOneof('fact')}.sent")
                return
            case st.ReadLogs(request):
                self._spawn(self._send_logs(request), "logs")
                return
            case st.ReadStacks(request_id, key, pid):
                self._spawn(self._send_stacks(request_id, key, pid), "stacks")
            case st.Prepare(request):
                self._prepare(request)
                return
            case st.CancelPrepare(job_id):
                self._processes.cancel_prepare(job_id)
            case st.KeepFolders(job_ids):
                self._processes.keep_folders(job_ids)
                return
            case st.Remember(seen):
                self._seen.write(seen)
                return
            case st.StartWorker():
                try:
                    self._start_worker(instruction)
                except OSError as error:  # a full disk, no descriptor left, ...: it concerns this worker alone
                    self.handle(st.ProcessNotStarted(instruction.key, f"cannot start the worker: {error}"))
            case st.AdmitWorker(key, secret):
                self._link.admit(key, secret)
            case st.TellWorkerToLeave(key, mode, _):
                self._link.leave(key, mode)
            case st.KillWorker(key, _):
                self._processes.kill(key)
            case st.ClaimRendezvous(port):
                self._rendezvous.claim(port)
                self._open_rendezvous()
            case st.ReleaseRendezvous(port):
                self._rendezvous.release(port)
            case st.HangUp():
                self._manager.hang_up()
            case st.ExitAgent(code, _):
                if self._finished is not None and not self._finished.done():
                    self._finished.set_result(code)
            case _:
                assert_never(instruction)
        _log.info("agent acts", **_described(instruction))

    def _open_rendezvous(self) -> None:
        """The next one. While the VM has no port or descriptor left, other VMs have the ranks 0."""
        try:
            port = self._rendezvous.open()
        except OSError as error:
            _log.warning("no port for the next rendezvous: the agent tries again", error=str(error))
            self._reopening = asyncio.get_running_loop().call_later(_REOPEN_S, self._open_rendezvous)
            return
        self.handle(st.RendezvousOpened(port))

    def _start_worker(self, start: st.StartWorker) -> None:
        """Raises OSError."""
        assert self._copies is not None
        job_id = start.key.job_id
        rendezvous = self._rendezvous.take(start.rendezvous_port) if start.rendezvous_port else None
        try:
            jobs = {*self._processes.job_ids, job_id}
            self._spawn(asyncio.to_thread(self._copies.discard_other_jobs, jobs), "copies of checkpoints")
            if self._user is not None:
                self._copies.make_folder_for(job_id, self._user)
            environment = replace(
                start.environment,
                local_checkpoint_dir=str(self._copies.folder / job_id),
                agent_socket=str(self._link.path),
                secret="",
                secret_from_agent=bool(start.environment.secret),
                rendezvous_fd=rendezvous.fileno() if rendezvous is not None else -1,
            )
            self._processes.start(
                ProcessSpec(
                    key=start.key,
                    command=start.command,
                    workdir=start.workdir,
                    environment=self._environ_of(start.extra_environment),
                    contract={**start.secrets, **environment.to_environ()},
                    log=logs.log_path(self._settings.vm_dir, start.key),
                    limits=start.limits,
                    rendezvous=rendezvous,
                )
            )
        except OSError:
            if rendezvous is not None:
                rendezvous.close()
            raise

    def _prepare(self, request: agent_pb2.Prepare) -> None:
        log = logs.warm_log_path(self._settings.vm_dir, request.job_id)
        environment = self._environ_of(request.environment)
        workdir = Workdir(
            path=request.workdir, archive=request.archive, setup=request.setup, timeout_s=request.setup_timeout_s
        )
        limits = JobLimits.from_message(request.limits)
        self._processes.prepare(request.job_id, request.command, workdir, environment, log, limits)

    def _environ_of(self, extra: Mapping[str, str]) -> dict[str, str]:
        """What all workers of a job have in common."""
        on_cpu = self._settings.device == "cpu"
        return worker_environ(self._base_environ, extra, on_cpu=on_cpu, user=self._user)

    def _preparing(self, job_ids: frozenset[str], warm: frozenset[str]) -> None:
        self.handle(st.Preparing(job_ids, warm))

    def _prepared(self, job_id: str, error: WorkdirError | None) -> None:
        if error is None:
            self.handle(st.Prepared(job_id))
            return
        _log.warning("a job's workdir is not made ready", job=job_id, reason=str(error))
        self.handle(st.Prepared(job_id, str(error), error.exit_code))

    def _fetch_archive(self, sha256: str) -> AsyncIterator[bytes]:
        return self._manager.fetch_archive(self._settings.vm_id, sha256)

    async def _process_ended(self, key: WorkerKey, end: ProcessEnd | ProcessNotStartedError) -> None:
        if isinstance(end, ProcessNotStartedError):
            self.handle(st.ProcessNotStarted(key, str(end)))
            return
        if self._spans is not None:
            self._spans.ended(key)
        await self._link.drained(key, _DRAIN_SOCKET_S)  # its last words come before its end
        failpoint("agent.worker.ended")
        _log.info("worker ended", **key.fields(), exit_code=end.exit_code)
        self.handle(st.ProcessEnded(key, end.exit_code, end.log_tail))

    async def _send_logs(self, request: agent_pb2.FetchLogs) -> None:
        key = WorkerKey(request.job_id, request.generation, request.rank)
        path = logs.log_path(self._settings.vm_dir, key)
        wanted = min(request.max_bytes or _DEFAULT_LOG_BYTES, _MAX_LOG_BYTES)
        try:
            if not path.resolve().is_relative_to(self._settings.vm_dir.resolve()):
                raise ValueError(f"job id {request.job_id!r} does not name a folder of this VM")
            part = await logs.read_when_there(path, request.offset, wanted, request.wait_s)
        except (OSError, ValueError) as error:
            text = f"no log of {key} on VM {self._settings.vm_id}: {error}"
            self._send_chunk(agent_pb2.LogChunk(request_id=request.request_id, last=True, error=text))
            return
        for start in range(0, max(len(part.data), 1), _LOG_CHUNK_BYTES):
            end = start + _LOG_CHUNK_BYTES
            chunk = agent_pb2.LogChunk(
                request_id=request.request_id,
                data=part.data[start:end],
                last=end >= len(part.data),
                offset=part.offset + start,
                size=part.size,
            )
            self._send_chunk(chunk)

    async def _send_stacks(self, request_id: str, key: WorkerKey, pid: int) -> None:
        try:
            dump = stack_dump(request_id, key, text=await self._processes.stacks(key, pid))
        except NoStacksError as error:
            dump = stack_dump(request_id, key, error=str(error))
        self._manager.send(dump)

    def _send_chunk(self, chunk: agent_pb2.LogChunk) -> None:
        self._manager.send(agent_pb2.AgentMessage(log_chunk=chunk))

    # ------------------------------------------------------------ sources of events

    async def _watch_notices(self) -> None:
        async for notice in self._notice_source.notices():
            if isinstance(notice, NoticeCancelled):
                # The workers may have left by now. The VM leaves all the same, and the manager asks for another.
                _log.warning("the notice is withdrawn", notice=notice.notice_id)
                self._noticed.discard(notice.notice_id)
                continue
            self._noticed.add(notice.notice_id)
            if self._metrics is not None:
                self._metrics.notice_seen()
            seconds_left = notice.seconds_left(unix_now_s())
            _log.warning("this VM will be taken away", notice=notice.notice_id, seconds_left=round(seconds_left, 1))
            self.handle(st.NoticeSeen(notice.notice_id, seconds_left, notice.source))

    async def _keep_logs_small(self) -> None:
        sizes = LogSizes(each_bytes=self._settings.log_bytes, old_bytes=self._settings.old_logs_bytes)
        while True:
            running = {worker.key.generation_key for worker in self._state.workers}
            try:
                await asyncio.to_thread(keep_logs_small, self._settings.vm_dir, running, sizes)
            except OSError as error:
                _log.warning("logs stay as long as they are", error=str(error))
            await asyncio.sleep(_LOOK_AT_LOGS_S)

    def _measure(self) -> None:
        if self._metrics is not None:
            self._metrics.now(
                self._state.workers,
                warm_jobs=len(self._state.warm_jobs),
                unacknowledged=len(self._state.unacknowledged),
                connected=self._state.is_welcome,
            )

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._state.next_deadline()
        if deadline is not None:
            wait_s = min(max(0.0, deadline - _now()), _MAX_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.handle, st.Tick())

    # ------------------------------------------------------------ tasks

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)

    async def _close(self) -> None:
        for timer in (self._timer, self._reopening):
            if timer is not None:
                timer.cancel()
        await self._processes.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()
        self._rendezvous.close()
        if self._copies is not None:
            self._copies.close()


class _FromManager:
    """The manager's words as events."""

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner

    def opened(self) -> None:
        self._runner.stream_opened()

    def received(self, message: agent_pb2.ManagerMessage) -> None:
        failpoint(f"agent.{message.WhichOneof('body')}.received")
        self._runner.trace_told(message)
        self._runner.handle(st.ManagerSaid(message))

    def closed(self, reason: str) -> None:
        self._runner.handle(st.StreamClosed(reason))


class _FromWorkers:
    """The workers' words as events."""

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner

    def connected(self, key: WorkerKey, pid: int) -> bool:
        is_ours = self._runner.expects(key)
        failpoint("agent.worker.connected")
        if is_ours:
            self._runner.handle(st.WorkerConnected(key, pid))
        return is_ours

    def said(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> None:
        self._runner.trace_ready(key, message)
        self._runner.handle(st.WorkerSaid(key, message))

    def disconnected(self, key: WorkerKey) -> None:
        self._runner.handle(st.WorkerDisconnected(key))


def _now() -> float:
    """Seconds; counts the time for which the VM was suspended, where the system can tell: leases run on meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _described(instruction: Instruction) -> dict[str, object]:
    """For the log: what is done, to whom, why."""
    fields: dict[str, object] = {"action": type(instruction).__name__}
    key = getattr(instruction, "key", None)
    if isinstance(key, WorkerKey):
        fields |= key.fields()
    for name in ("reason", "port", "code", "command"):
        if hasattr(instruction, name):
            fields[name] = str(getattr(instruction, name))
    return fields
