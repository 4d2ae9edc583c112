"""What a new VM fetches before its agent is there. None of it is a secret."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from varuna_manager.services.agent_wheel import AgentWheel


def agent_routes(agent_wheel: AgentWheel) -> APIRouter:
    router = APIRouter(prefix="/agent")

    @router.get("/wheel", response_class=FileResponse)
    async def wheel() -> FileResponse:
        """The wheel that agents are installed from; Content-Disposition has its name."""
        path = agent_wheel.wheel()
        return FileResponse(path, filename=path.name, media_type="application/octet-stream")

    @router.get("/constraints", response_class=Response)
    async def constraints() -> Response:
        """The versions of what it depends on, for `pip install --constraint`."""
        headers = {"Content-Disposition": 'attachment; filename="constraints.txt"'}
        return Response(agent_wheel.constraints(), media_type="text/plain; charset=utf-8", headers=headers)

    return router
