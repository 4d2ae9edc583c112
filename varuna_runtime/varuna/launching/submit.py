"""Submits a run to a manager, which starts it, and restarts it in the best shape as machines come and go."""

from __future__ import annotations

import os
import re
import shlex
import ssl
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from varuna.launching.layout import LaunchError

__all__ = ["make_job_document", "parse_manager_address", "submit_job"]

_DEFAULT_PORT = 8750
_TIMEOUT_S = 15.0


def parse_manager_address(manager_ip: str) -> str:
    """The REST address of `HOST`, `HOST:PORT` or a URL. Raises LaunchError."""
    text = manager_ip if "://" in manager_ip else f"http://{manager_ip}"
    try:
        parts = urlsplit(text)
        port = parts.port or _DEFAULT_PORT
    except ValueError as error:
        raise LaunchError(f"manager_ip {manager_ip!r}: {error}; give HOST or HOST:PORT") from error
    if parts.hostname is None:
        raise LaunchError(f"manager_ip {manager_ip!r}: give HOST or HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def make_job_document(  # noqa: PLR0913 - the fields of the document
    *,
    script: str,
    arguments: Sequence[str],
    workdir: Path,
    global_batch: int,
    p: int | None,
    micro_batch: int | None,
    checkpoint_url: str,
    env: Mapping[str, str],
    pass_arguments: bool,
) -> dict[str, Any]:
    """The job's document for the manager, which chooses, and may change, the sizes that are None."""
    words = ["python", "-u"]
    if pass_arguments:
        words += ["-m", "varuna.launching.script"]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._")[:40] or "run"
    return {
        "name": f"{name}-{uuid.uuid4().hex[:6]}",
        "workdir": str(workdir),
        "run": shlex.join([*words, script, *arguments]),
        "global_batch": global_batch,
        "checkpoint": {"url": checkpoint_url or None},
        "env": dict(env),
        "plan": {"p": p, "d": None, "micro_batch": micro_batch},
    }


def submit_job(url: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Submits the job and returns the manager's document of it. Raises LaunchError when it refuses or does not answer.

    VARUNA_TOKEN is the token for a secure manager, VARUNA_CA the file with the authority of its certificate.
    """
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    if token := os.environ.get("VARUNA_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    trust = ssl.create_default_context(cafile=os.environ.get("VARUNA_CA")) if url.startswith("https:") else False
    # Proxies of the environment lead outside; the manager is on this machine or network.
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False, verify=trust) as http:
        try:
            answer = http.post("/api/v1/jobs", json=document, headers=headers)
        except httpx.HTTPError as error:
            raise LaunchError(
                f"no manager answers at {url} ({str(error) or type(error).__name__}): start one with 'varuna manager', "
                "or run without it with --no_morphing"
            ) from error
    if answer.status_code >= 400:
        raise LaunchError(f"the manager at {url} refused the job: {_read_detail(answer)}")
    job: dict[str, Any] = answer.json()
    sys.stdout.write(f"job {job['name']} is {job['state']}: varuna show {job['name']} --manager-url {url}\n")
    return job


def _read_detail(answer: httpx.Response) -> str:
    try:
        document = answer.json()
    except ValueError:
        document = {}
    detail = document.get("detail") if isinstance(document, dict) else None
    return str(detail or f"HTTP status {answer.status_code}")
