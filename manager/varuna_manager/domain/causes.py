"""Why workers stopped, and which stop explains the others."""

from __future__ import annotations

from varuna_manager.domain.observed import GenerationView, WorkerView
from varuna_manager.domain.states import EndCause, ExitCause

_ROOT_CAUSES = frozenset(
    {
        ExitCause.SCRIPT_FAILED,
        ExitCause.OUT_OF_MEMORY,
        ExitCause.KILLED,
        ExitCause.LAUNCH_FAILED,
        ExitCause.LAUNCH_REFUSED,
    }
)
_OF_THE_SCRIPT = frozenset({ExitCause.SCRIPT_FAILED, ExitCause.OUT_OF_MEMORY})
"""Exits that explain others at the same time."""
_BY_AGENTS = {ExitCause.LEASE_OVER: EndCause.MANAGER_AWAY, ExitCause.AGENT_ENDED: EndCause.AGENT_ENDED}
"""Workers that their agents ended, whatever the script did. An agent reports them late, when it is back."""
CONSEQUENCE_OF = frozenset(
    {
        EndCause.VM_LOST,
        EndCause.MANAGER_AWAY,
        EndCause.AGENT_ENDED,
        EndCause.UNREACHABLE,
        EndCause.HANG,
        EndCause.WORKER_FAILED,
    }
)
"""Stops that make healthy scripts raise (their peers vanish): a script failure after one of these shows nothing."""


def find_root_cause(generation: GenerationView) -> WorkerView | None:
    """The worker whose stop explains the others'.

    It is one that was lost with its VM, else one that its agent ended, else the first that failed by itself.
    """
    for explains in (is_gone, is_taken_away):
        for worker in generation.workers:
            if explains(worker):
                return worker
    failed = [worker for worker in generation.workers if worker.cause in _ROOT_CAUSES]
    if not failed:
        return None
    return min(failed, key=lambda w: (w.stopped_at or 0.0, w.cause not in _OF_THE_SCRIPT, w.rank))


def is_gone(worker: WorkerView) -> bool:
    """Whether it was lost with its VM."""
    return worker.cause is ExitCause.VM_GONE or (worker.lease_over and worker.cause is None)


def is_taken_away(worker: WorkerView) -> bool:
    """Whether it was lost with its VM, or its agent ended it: neither it nor its peers caused that."""
    return is_gone(worker) or worker.cause in _BY_AGENTS


def find_failed_script(generation: GenerationView) -> WorkerView | None:
    """The first rank whose script failed."""
    failed = [worker for worker in generation.workers if worker.cause is ExitCause.SCRIPT_FAILED]
    return min(failed, key=lambda worker: (worker.stopped_at or 0.0, worker.rank), default=None)


def choose_end_cause(worker: WorkerView) -> EndCause:
    if is_gone(worker):
        return EndCause.VM_LOST
    if worker.cause in _BY_AGENTS:
        return _BY_AGENTS[worker.cause]
    causes = {
        ExitCause.SCRIPT_FAILED: EndCause.SCRIPT_FAILED,
        ExitCause.OUT_OF_MEMORY: EndCause.OUT_OF_MEMORY,
        ExitCause.LAUNCH_REFUSED: EndCause.LAUNCH_REFUSED,
    }
    return EndCause.WORKER_FAILED if worker.cause is None else causes.get(worker.cause, EndCause.WORKER_FAILED)


def describe_handover(generation: GenerationView) -> str:
    """Why workers have left a generation in place by themselves, with their state for new processes; empty: they have
    not."""
    if not generation.in_place or generation.holders is not None:
        return ""
    if not any(worker.cause is ExitCause.GENERATION_ENDED and worker.gives_only for worker in generation.workers):
        return ""
    if generation.last_step is None:
        return "its workers could not end the step under way in another shape: new processes run all of it"
    return f"its workers have ended step {generation.last_step}, and their script cannot follow the shape"


def render_worker_exit(worker: WorkerView) -> str:
    where = f"rank {worker.rank} on VM {worker.device.vm_id}"
    if worker.cause is ExitCause.VM_GONE:
        return worker.error or f"VM {worker.device.vm_id} is gone"
    if worker.lease_over and worker.cause is None:
        return f"VM {worker.device.vm_id} was out of reach for a whole lease"
    if worker.shortage is not None:
        return f"{where} ran out of memory: {worker.shortage.render()}"
    texts = {
        ExitCause.OUT_OF_MEMORY: "ran out of memory",
        ExitCause.KILLED: "was killed",
        ExitCause.LAUNCH_FAILED: "never came up",
        ExitCause.LAUNCH_REFUSED: "was not started",
        ExitCause.LEASE_OVER: "was ended by its agent",
        ExitCause.AGENT_ENDED: "ended with its agent",
        ExitCause.PEER_LOST: "lost a peer",
        ExitCause.GENERATION_ENDED: "left early",
        ExitCause.SCRIPT_FAILED: "failed",
        ExitCause.FINISHED: "finished before the others",
    }
    text = texts[worker.cause] if worker.cause is not None else "stopped"
    detail = extract_last_line(worker.error)
    return f"{where} {text}" + (f": {detail}" if detail else "")


def extract_last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def find_exit_code(generation: GenerationView) -> int | None:
    """The exit code of the worker whose stop explains the others'."""
    root = find_root_cause(generation)
    return None if root is None else root.exit_code
