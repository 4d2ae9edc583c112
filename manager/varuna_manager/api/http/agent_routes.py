"""What a new VM fetches to install its agent. None of it is a secret."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from varuna_manager.agents.agent_wheel import AgentWheel

_BINARY = {"type": "string", "format": "binary"}
_WHEEL: dict[int | str, dict[str, Any]] = {
    200: {"description": "a wheel", "content": {"application/octet-stream": {"schema": _BINARY}}}
}

_CONSTRAINTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "a constraints file of pip", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def agent_routes(agent_wheel: AgentWheel) -> APIRouter:
    router = APIRouter(prefix="/agent")

    @router.get("/wheel", response_class=FileResponse, responses=_WHEEL)
    async def get_agent_wheel() -> FileResponse:
        """The wheel that new VMs install; Content-Disposition has its file name."""
        path = agent_wheel.find_wheel()
        return FileResponse(path, filename=path.name, media_type="application/octet-stream")

    @router.get("/constraints", response_class=Response, responses=_CONSTRAINTS)
    async def get_agent_constraints() -> Response:
        """The versions of the wheel's dependencies, for `pip install --constraint`."""
        headers = {"Content-Disposition": 'attachment; filename="constraints.txt"'}
        return Response(agent_wheel.read_constraints(), media_type="text/plain; charset=utf-8", headers=headers)

    return router
