"""The checkpoints that a job's workers have reported."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy import String, cast, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import CheckpointRow, GenerationRow, JobRow


async def newest_committed(session: AsyncSession, job: JobRow) -> int | None:
    """The step of the newest checkpoint in the job's own store; None: none was reported, or the store is a path that
    differs between VMs. Checkpoints elsewhere do not count, because jobs do not resume from them by themselves."""
    store = store_url(job.checkpoint_url or "")
    if store is None:
        return None
    own = CheckpointRow.url == literal(f"{store}/varuna_ckpt_") + cast(CheckpointRow.step, String)
    newest = select(func.max(CheckpointRow.step)).where(CheckpointRow.job_id == job.id, own)
    step: int | None = await session.scalar(newest)
    return step


async def read_saved_step(session: AsyncSession, job_id: str) -> int:
    """The step of the newest checkpoint that the job's workers have reported, wherever it is, or with which the job
    began; 0: there is none."""
    saved = await session.scalar(select(func.max(CheckpointRow.step)).where(CheckpointRow.job_id == job_id))
    row = GenerationRow
    query = select(row.resumed_step).where(row.job_id == job_id, row.resumed_step.is_not(None))
    began = await session.scalar(query.order_by(row.number).limit(1))
    return max(saved or 0, began or 0)


def store_url(place: str) -> str | None:
    """The URL of a store that workers report; None for a path that is not the same everywhere."""
    parts = urlsplit(place)
    path = unquote(parts.path) if parts.scheme == "file" else place
    if "://" in path:
        return path.rstrip("/")
    return Path(path).as_uri() if path.startswith("/") else None
