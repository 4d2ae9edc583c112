"""Turns the instructions to start or to prepare workers into processes, with all that these need on this VM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from varuna_agent.folders.checkpoint_copies import CheckpointCopies
from varuna_agent.logs import log_files
from varuna_agent.logs.shared_logs import SharedLogs
from varuna_agent.state import ProcessLimits, Workdir
from varuna_agent.state.instructions import AskToGive, AssignWorker, StartWorker
from varuna_agent.workers.control_groups import JobGroups
from varuna_agent.workers.isolation import JobUser, make_worker_environ
from varuna_agent.workers.processes import PreparationSpec, ProcessSpec, WorkerProcesses
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.v1 import agent_pb2, worker_pb2

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class WorkerHost:
    """What workers on this VM run with."""

    base_environ: Mapping[str, str]
    """Workers inherit it, apart from Varuna's own settings and secrets."""
    user: JobUser | None = None
    """The user of the workers; None: the agent's own user."""
    groups: JobGroups | None = None
    """The jobs' control groups; None: this VM has none."""


class WorkerStarter:
    """Starts the processes of workers.

    Args:
        agent_socket: where workers connect to the agent.
        on_cpu: whether workers use the CPU as their device.
        gpu_type: of the VM; empty: not known.
    """

    def __init__(
        self,
        *,
        host: WorkerHost,
        processes: WorkerProcesses,
        copies: CheckpointCopies,
        vm_dir: Path,
        agent_socket: Path,
        on_cpu: bool,
        gpu_type: str,
    ) -> None:
        self._host = host
        self._processes = processes
        self._copies = copies
        self._vm_dir = vm_dir
        self._agent_socket = agent_socket
        self._on_cpu = on_cpu
        self._gpu_type = gpu_type
        self._logs = SharedLogs(vm_dir, host.user)

    def start_worker(self, start: StartWorker) -> None:
        """Raises OSError."""
        job_id = start.key.job_id
        if self._host.user is not None:
            self._copies.make_folder(job_id, self._host.user)
        environment = replace(
            self._make_environment(start.environment), secret_from_agent=bool(start.environment.secret)
        )
        self._processes.start_worker(
            ProcessSpec(
                key=start.key,
                command=start.command,
                workdir=start.workdir,
                environment=self._make_environ(start.extra_environment),
                contract={**start.secrets, **environment.to_environ()},
                log=log_files.log_path(self._vm_dir, start.key),
                limits=start.limits,
            )
        )

    def assign_worker(self, assign: AssignWorker) -> worker_pb2.Assigned | None:
        """Make a survivor the worker of another rank; returns the message to send to it, None if it has ended."""
        start = assign.start
        log = log_files.log_path(self._vm_dir, start.key)
        if not self._processes.reassign_worker(assign.survivor, start.key, log):
            return None
        try:
            path = self._logs.make_log(log)
        except OSError as error:  # a full disk, say: the process writes to its old log
            _log.warning("a survivor has no new log", **start.key.log_fields, error=str(error))
            path = log
        return worker_pb2.Assigned(
            environment=self._make_environment(start.environment).to_environ(),
            secret=start.environment.secret,
            log_path=str(path),
        )

    def make_give_state(self, ask: AskToGive) -> worker_pb2.GiveState:
        return worker_pb2.GiveState(
            environment=self._make_environment(ask.environment).to_environ(), secret=ask.environment.secret
        )

    def _make_environment(self, environment: WorkerEnvironment) -> WorkerEnvironment:
        """With what this VM is and has. Without the secret, which the worker gets over its socket."""
        return replace(
            environment,
            gpu_type=self._gpu_type,
            local_checkpoint_dir=str(self._copies.folder / environment.job_id),
            agent_socket=str(self._agent_socket),
            secret="",
        )

    def prepare_job(self, request: agent_pb2.Prepare) -> None:
        self._processes.prepare_job(
            PreparationSpec(
                job_id=request.job_id,
                command=request.command,
                workdir=Workdir(
                    path=request.workdir,
                    archive=request.archive,
                    setup=request.setup,
                    timeout_s=request.setup_timeout_s,
                ),
                environment=self._make_environ(request.environment),
                log=log_files.warm_log_path(self._vm_dir, request.job_id),
                limits=ProcessLimits.from_message(request.limits),
            )
        )

    def _make_environ(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The variables that all workers of a job share."""
        return make_worker_environ(self._host.base_environ, extra, on_cpu=self._on_cpu, user=self._host.user)
