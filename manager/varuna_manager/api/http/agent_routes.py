"""What a new VM fetches before its agent is there. None of it is a secret."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from varuna_manager.services.agent_wheel import AgentWheel

_BINARY = {"type": "string", "format": "binary"}
_WHEEL: dict[int | str, dict[str, Any]] = {
    200: {"description": "a wheel", "content": {"application/octet-stream": {"schema": _BINARY}}}
}

_CONSTRAINTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "as pip reads it", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def agent_routes(agent_wheel: AgentWheel) -> APIRouter:
    router = APIRouter(prefix="/agent")

    @router.get("/wheel", response_class=FileResponse, responses=_WHEEL)
    async def wheel() -> FileResponse:
        """The wheel that agents are installed from; Content-Disposition has its name."""
        path = agent_wheel.wheel()
        return FileResponse(path, filename=path.name, media_type="application/octet-stream")

    @router.get("/constraints", response_class=Response, responses=_CONSTRAINTS)
    async def constraints() -> Response:
        """The versions of what it depends on, for `pip install --constraint`."""
        headers = {"Content-Disposition": 'attachment; filename="constraints.txt"'}
        return Response(agent_wheel.constraints(), media_type="text/plain; charset=utf-8", headers=headers)

    return router
