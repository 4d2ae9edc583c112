"""Packed workdirs: uploaded by their SHA-256 before the jobs that name them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from varuna_manager.services.archives import ArchiveService
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import NotFoundError

Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the archive, in hexadecimal")]
_BODY = {"requestBody": {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}}


def archive_routes(archives: ArchiveService) -> APIRouter:
    router = APIRouter()

    @router.get("/archives/{sha256}")
    async def known(sha256: Sha256) -> Document:
        """Whether it is here, and its size: one that is need not be uploaded."""
        total_bytes = await archives.size(sha256)
        if total_bytes is None:
            raise NotFoundError(f"archive {sha256} is not here: upload it")
        return {"sha256": sha256, "total_bytes": total_bytes}

    @router.put("/archives/{sha256}", status_code=201, openapi_extra=_BODY)
    async def upload(sha256: Sha256, request: Request) -> Document:
        """A workdir as .tar.gz, at most 256 MiB. Uploading it again changes nothing."""
        return {"sha256": sha256, "total_bytes": await archives.receive(sha256, request.stream())}

    return router
