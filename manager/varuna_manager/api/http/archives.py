"""Packed workdirs, which are uploaded under their SHA-256 before the jobs that name them are submitted."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from varuna_manager.answers.errors import MissingError
from varuna_manager.jobs.archives import ArchiveService
from varuna_proto.rest import ArchiveDocument

Sha256 = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the archive, in hexadecimal")]
_BODY = {"requestBody": {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}}


def archive_routes(archives: ArchiveService) -> APIRouter:
    router = APIRouter()

    @router.get("/archives/{sha256}")
    async def get_archive(sha256: Sha256) -> ArchiveDocument:
        """The size of an archive that the manager has; 404 if it has to be uploaded."""
        total_bytes = await archives.read_size(sha256)
        if total_bytes is None:
            raise MissingError(f"the manager does not have archive {sha256}: upload it")
        return {"sha256": sha256, "total_bytes": total_bytes}

    @router.put("/archives/{sha256}", status_code=201, openapi_extra=_BODY)
    async def upload_archive(sha256: Sha256, request: Request) -> ArchiveDocument:
        """Upload a workdir as .tar.gz, at most 256 MiB. Uploading it again changes nothing."""
        return {"sha256": sha256, "total_bytes": await archives.receive_archive(sha256, request.stream())}

    return router
