"""The name of one worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class WorkerKey:
    """One worker: a rank of a generation of a job."""

    job_id: str
    generation: int
    rank: int
    newcomer: int = 0
    """The number of a process that has no rank yet (`newcomers.py`): it is to be this one. 0: it has it."""

    @property
    def generation_key(self) -> tuple[str, int]:
        return self.job_id, self.generation

    @property
    def log_fields(self) -> dict[str, str | int]:
        return {"job": self.job_id, "generation": self.generation, "rank": self.rank}

    def __str__(self) -> str:
        place = f"newcomer{self.newcomer}" if self.newcomer else f"rank{self.rank}"
        return f"{self.job_id}/g{self.generation}/{place}"
