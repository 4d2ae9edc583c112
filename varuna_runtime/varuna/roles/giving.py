"""A process that takes no part in the next generation gives it the state that it holds, and ends."""

from __future__ import annotations

import time
from typing import NoReturn

import structlog

from varuna.checkpoint import CheckpointError, TrainingState
from varuna.distributed.departure import end_process
from varuna.holdings.giving import HolderSession
from varuna.holdings.inventory import free_device_memory, make_inventory
from varuna.worker.agent_link import AgentLink, Assignment, GiveCommand
from varuna_proto.environment import EXIT_GENERATION_ENDED, WorkerEnvironment

__all__ = ["end_as_holder"]

_log = structlog.get_logger("varuna")

_RETRY_S = 0.5


def end_as_holder(
    state: TrainingState,
    step: int,
    *,
    own: WorkerEnvironment,
    command: GiveCommand,
    link: AgentLink,
) -> NoReturn:
    """Gives the state after `step` steps to whatever generation the agent names, until one has taken it. The agent ends
    a process whose state nobody needs any longer.

    `own`: of the rank that this process was.
    """
    try:
        held = make_inventory(state, step, generation=own.generation, rank=own.rank)
    except CheckpointError as error:
        _log.warning("this process cannot give its state: it ends", reason=str(error))
        end_process(EXIT_GENERATION_ENDED)
    free_device_memory(state)
    link.report_giving(held.bytes)
    _log.info("this process gives its state", step=step, bytes=held.bytes, generation=command.environment.generation)
    while True:
        session = HolderSession(held, command.environment)
        link.notify_of_command(session.stop)
        if session.give_state().is_taken:
            end_process(EXIT_GENERATION_ENDED)
        if not link.has_command:  # rank 0 has not come yet, or was lost before all had the state
            time.sleep(_RETRY_S)
            continue
        following = link.wait_for_command()  # ranks were lost, and the next generation needs the state
        if isinstance(following, Assignment):
            end_process(EXIT_GENERATION_ENDED)
        else:
            command = following
