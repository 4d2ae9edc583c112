"""Hands a run over to a manager, which then starts it, and starts it anew in the best shape as machines come and go."""

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

__all__ = ["job_document", "manager_url", "submit"]

_DEFAULT_PORT = 8750
_TIMEOUT_S = 15.0


def manager_url(manager_ip: str) -> str:
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


def job_document(
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
    """The job as the manager takes it. Sizes that are not given are the manager's to choose, and to change."""
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


def submit(url: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The job as the manager has taken it. Raises LaunchError when it does not, or does not answer.

    A secure manager takes the token of VARUNA_TOKEN; VARUNA_CA says who signed its certificate.
    """
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    if token := os.environ.get("VARUNA_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    trust = ssl.create_default_context(cafile=os.environ.get("VARUNA_CA")) if url.startswith("https:") else False
    # The environment's proxies are for the outside; the manager is on this machine or network.
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False, verify=trust) as http:
        try:
            answer = http.post("/api/v1/jobs", json=document, headers=headers)
        except httpx.HTTPError as error:
            raise LaunchError(
                f"no manager answers at {url} ({str(error) or type(error).__name__}): start one with 'varuna manager', "
                "or run without it with --no_morphing"
            ) from error
    if answer.status_code >= 400:
        raise LaunchError(f"the manager at {url} refused the job: {_detail(answer)}")
    job: dict[str, Any] = answer.json()
    sys.stdout.write(f"job {job['name']} is {job['state']}: varuna show {job['name']} --manager-url {url}\n")
    return job


def _detail(answer: httpx.Response) -> str:
    try:
        said = answer.json()
    except ValueError:
        said = {}
    detail = said.get("detail") if isinstance(said, dict) else None
    return str(detail or f"HTTP status {answer.status_code}")
