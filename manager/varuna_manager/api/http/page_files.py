"""The dashboard's files, and its chart library from the installed plotly package."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from varuna_manager.answers.errors import MissingError

_ASK_FIRST = {"Cache-Control": "no-cache"}
"""A browser checks its copy by ETag each time, so that it never mixes files of two versions."""


class PageFiles(StaticFiles):
    def __init__(self) -> None:
        super().__init__(directory=Path(str(resources.files("varuna_manager") / "dashboard")), html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_ASK_FIRST)
        return response


def library_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/static/plotly.min.js")
    async def plotly(request: Request) -> Response:
        """plotly.js, compressed."""
        library = await asyncio.to_thread(_load_plotly)
        headers = {**_ASK_FIRST, "ETag": library.etag, "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == library.etag:
            return Response(status_code=304, headers=headers)
        body = library.compressed
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            body = await asyncio.to_thread(gzip.decompress, body)
        return Response(body, media_type="text/javascript", headers=headers)

    return router


@dataclass(frozen=True)
class _Library:
    compressed: bytes
    etag: str


@cache
def _load_plotly() -> _Library:
    """Find the library without importing plotly, which takes a second. Raises MissingError."""
    package = find_spec("plotly")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    files = [Path(folder) / "package_data" / "plotly.min.js" for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise MissingError("plotly is not installed beside the manager: pip install 'varuna-spot[manager]'")
    source = file.read_bytes()
    return _Library(gzip.compress(source, 6, mtime=0), f'"{hashlib.sha256(source).hexdigest()[:32]}"')
