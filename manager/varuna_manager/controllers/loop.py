"""The loop around a reconcile function: look when rung for, and by itself now and then."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.services.bell import Bell, wait

_AFTER_ERROR_S = 1.0


class Controller(Protocol):
    name: str

    async def reconcile(self) -> float:
        """Load, decide, apply. Seconds until the next look; 0: at once, something was changed."""


async def run_controller(controller: Controller, bell: Bell) -> None:
    """Run until cancelled. An error is logged and the next look comes a little later: what is observed stays so."""
    log = structlog.get_logger("varuna.controller").bind(controller=controller.name)
    rung = bell.listen()
    try:
        while True:
            rung.clear()
            try:
                delay_s = await controller.reconcile()
            except StaleDataError as error:
                log.info("somebody else changed what was decided on: looking again", error=str(error))
                delay_s = 0.0
            except Exception:
                log.exception("the controller failed: it will look again", after_s=_AFTER_ERROR_S)
                await asyncio.sleep(_AFTER_ERROR_S)
                delay_s = 0.0
            if delay_s > 0:
                await wait(rung, delay_s)
            else:
                await asyncio.sleep(0)
    finally:
        bell.leave(rung)
