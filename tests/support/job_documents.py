"""Documents of jobs, as the manager answers."""

from __future__ import annotations

from varuna_proto.rest import JobDocument

__all__ = ["JOB"]


JOB = JobDocument(  # type: ignore[typeddict-item] # what is shown of a job
    id="j-1",
    name="gpt",
    state="failed",
    spec={"run": "python train.py", "workdir": "/w", "global_batch": 10},
    error='Traceback (most recent call last):\n  File "train.py", line 3\nRuntimeError: no such [file]\n',
    created_at="2026-01-01T00:00:01+00:00",
    started_at=None,
    finished_at=None,
    step=7,
    loss=2.5,
    generation=2,
    plan={"p": 2, "d": 2, "micro_batch": 1},
)
