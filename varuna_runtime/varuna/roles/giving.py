"""A process without a part in the next generation gives it the state that it holds, or leaves it in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from varuna.checkpoint import CheckpointError, ShapePosition, TrainingState
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import end_process
from varuna.holdings.giving import HolderSession
from varuna.holdings.inventory import HeldFiles, free_device_memory, make_inventory
from varuna.holdings.memory_files import MemoryRefusedError, store_in_memory
from varuna.worker.agent_link import AgentLink, GiveCommand, StoreCommand
from varuna_proto.environment import EXIT_GENERATION_ENDED, WorkerEnvironment

__all__ = ["give_until_taken", "hold_state", "leave_in_memory"]

_log = structlog.get_logger("varuna")

_RETRY_S = 0.5


def hold_state(state: TrainingState, step: int, *, own: WorkerEnvironment, published_as: int) -> HeldFiles:
    """What this process has to give after `step` steps, without a copy. Raises CheckpointError where that cannot be.

    `own`: of the rank with which it has trained last. `published_as`: the rank that it has now.
    """
    state = replace(state, position=ShapePosition(rank=own.rank, p=own.plan.p, d=own.plan.d))
    return make_inventory(state, step, generation=own.generation, rank=own.rank, published_as=published_as)


def give_until_taken(
    state: TrainingState,
    step: int,
    *,
    own: WorkerEnvironment,
    published_as: int,
    command: GiveCommand,
    link: AgentLink,
    held: HeldFiles | None = None,
    copies: Sequence[HeldFiles] = (),
) -> HeldFiles:
    """Gives the state after `step` steps to whatever generation the agent names, until one has taken it. The agent ends
    a process whose state nobody needs any longer. Returns only if the agent is about to end itself: then this process
    is to leave what it gave in memory.

    `own`, `published_as`: as for `hold_state`. `held`: what it gives, if that is not `state`. `copies`: what it keeps
    besides.
    """
    try:
        given = held or hold_state(state, step, own=own, published_as=published_as)
    except CheckpointError as error:
        _log.warning("this process cannot give its state: it ends", reason=str(error))
        end_process(EXIT_GENERATION_ENDED)
    free_device_memory(state)
    link.report_giving(given.bytes + sum(copy.bytes for copy in copies))
    _log.info("this process gives its state", step=step, bytes=given.bytes, generation=command.environment.generation)
    while True:
        session = HolderSession(given, command.environment, copies)
        link.notify_of_command(session.stop)
        if session.give_state().is_taken:
            end_process(EXIT_GENERATION_ENDED)
        if not link.has_command:  # rank 0 has not come yet, or was lost before all had the state
            time.sleep(_RETRY_S)
            continue
        following = link.wait_for_command()  # ranks were lost, and the next generation needs the state
        if isinstance(following, StoreCommand):
            return given
        if not isinstance(following, GiveCommand):
            end_process(EXIT_GENERATION_ENDED)
        else:
            command = following


def leave_in_memory(
    state: TrainingState,
    step: int,
    *,
    own: WorkerEnvironment,
    published_as: WorkerEnvironment,
    held: HeldFiles | None = None,
) -> None:
    """Puts the state after `step` steps into memory that the agent keeps. Never raises: the process ends in any case.

    `own`, `published_as`, `held`: as for `give_until_taken`; the second is of the present rank, with the secret.
    """
    began_s = time.monotonic()
    try:
        held = held or hold_state(state, step, own=own, published_as=published_as.rank)
        size = store_in_memory(held, published_as)
    except (CheckpointError, MemoryRefusedError, OSError, RuntimeError) as error:
        _log.warning("the state of this process ends with it", step=step, reason=first_line(error))
    else:
        seconds = round(time.monotonic() - began_s, 3)
        _log.info("the state of this process stays in the VM's memory", step=step, bytes=size, seconds=seconds)
