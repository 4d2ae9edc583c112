"""The loop around a reconcile function: look when rung for, and by itself now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import structlog
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.services.bell import Bell, wait

_AFTER_ERROR_S = 1.0
_SHORT_S = 0.05
"""A look that takes no more of the processor may be followed by another at once."""
_SHARE = 0.1
"""Of the processor that a loop may spend in longer looks: those at ten thousand VMs take long, and a fleet that says
Hello rings ten thousand times. Agents' heartbeats are answered by the same thread."""
_SHARE_AFTER_CHANGE = 0.5
"""The same, when a look has changed something and so is to be followed by another at once."""


class Controller(Protocol):
    name: str

    async def reconcile(self) -> float:
        """Load, decide, apply. Seconds until the next look; 0: at once, something was changed."""


def _unseen(controller: str) -> AbstractContextManager[None]:
    return nullcontext()


async def run_controller(
    controller: Controller, bell: Bell, look: Callable[[str], AbstractContextManager[None]] = _unseen
) -> None:
    """Run until cancelled, each look within `look` of the controller's name. An error is logged and the next look comes
    a little later: what is observed stays so.

    Raises NotLeaderError.
    """
    log = structlog.get_logger("varuna.controller").bind(controller=controller.name)
    rung = bell.listen()
    try:
        while True:
            rung.clear()
            began = time.thread_time()
            try:
                with look(controller.name):
                    delay_s = await controller.reconcile()
            except StaleDataError as error:
                log.info("somebody else changed what was decided on: looking again", error=str(error))
                delay_s = 0.0
            except NotLeaderError:
                raise  # the term is over, and with it every controller of it
            except StoreAwayError:
                await asyncio.sleep(_AFTER_ERROR_S)  # the store has told of it already, once
                delay_s = 0.0
            except Exception:
                log.exception("the controller failed: it will look again", after_s=_AFTER_ERROR_S)
                await asyncio.sleep(_AFTER_ERROR_S)
                delay_s = 0.0
            took_s = time.thread_time() - began
            if delay_s > 0:
                pause_s = _pause_s(took_s, _SHARE)
                await asyncio.sleep(pause_s)
                await wait(rung, max(delay_s - pause_s, 0.0))
            else:
                await asyncio.sleep(_pause_s(took_s, _SHARE_AFTER_CHANGE))
    finally:
        bell.leave(rung)


def _pause_s(took_s: float, share: float) -> float:
    """After a look of `took_s` on the processor, so that looks take no more than the share of it. 0 for a short one."""
    return 0.0 if took_s < _SHORT_S else took_s * (1 / share - 1)
