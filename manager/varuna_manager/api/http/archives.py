"""Packed workdirs: uploaded by their SHA-256 before the jobs that name them."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from pathlib import Path as File
from typing import Annotated

from fastapi import APIRouter, Path, Request

from varuna_manager.services.archives import ArchiveService
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import InvalidError, NotFoundError

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
        digest, total_bytes = hashlib.sha256(), 0
        with tempfile.NamedTemporaryFile(prefix="varuna-archive-") as file:
            async for chunk in request.stream():
                digest.update(chunk)
                total_bytes += len(chunk)
                await asyncio.to_thread(file.write, chunk)
            if digest.hexdigest() != sha256:
                raise InvalidError(f"the body's SHA-256 is {digest.hexdigest()}, not {sha256}: send the whole archive")
            file.flush()
            await archives.store(sha256, File(file.name))
        return {"sha256": sha256, "total_bytes": total_bytes}

    return router
