"""The loop around a reconcile function: look when rung for, and periodically."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import structlog
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.world.bell import Bell, wait

_AFTER_ERROR_S = 1.0
_SHORT_S = 0.05
"""A look that takes no more processor time may be followed by another at once."""
_SHARE = 0.1
"""The fraction of the processor that longer looks may take. With ten thousand VMs a look takes long, and their Hellos
ring ten thousand times, but agents' heartbeats are answered by the same thread."""
_SHARE_AFTER_CHANGE = 0.5
"""The same, when a look has changed something, so that another follows at once."""


class Controller(Protocol):
    name: str

    async def reconcile_once(self) -> float:
        """Load, decide, apply. Returns seconds until the next look; 0: at once, because something was changed."""


def _unseen(controller: str) -> AbstractContextManager[None]:
    return nullcontext()


async def run_controller(
    controller: Controller, bell: Bell, look: Callable[[str], AbstractContextManager[None]] = _unseen
) -> None:
    """Run until cancelled, each look within `look` of the controller's name. An error is logged, and the next look
    comes a little later, because it observes the same.

    Raises NotLeaderError.
    """
    log = structlog.get_logger("varuna.controller").bind(controller=controller.name)
    rung = bell.add_listener()
    try:
        while True:
            rung.clear()
            began = time.thread_time()
            try:
                with look(controller.name):
                    delay_s = await controller.reconcile_once()
            except StaleDataError as error:
                log.info("another writer changed what was decided on: looking again", error=str(error))
                delay_s = 0.0
            except NotLeaderError:
                raise  # the term is over, and with it its controllers
            except StoreAwayError:
                await asyncio.sleep(_AFTER_ERROR_S)  # the store has logged it already, once
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
        bell.remove_listener(rung)


def _pause_s(took_s: float, share: float) -> float:
    """The pause after a look of `took_s` on the processor that keeps to the share; 0 for a short one."""
    return 0.0 if took_s < _SHORT_S else took_s * (1 / share - 1)
