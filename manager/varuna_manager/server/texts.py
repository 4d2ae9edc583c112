"""What the manager's log says to a person who has started it in a terminal."""

from __future__ import annotations

from pathlib import Path

from varuna_manager.server.security import ADMIN_TOKEN_FILE
from varuna_manager.settings import ManagerSettings

ENDED_VMS = "local ones ended too (--keep-vms keeps them)"
KEPT_VMS = "left running: a manager on the same data_dir takes them over (--no-keep-vms ends local ones)"


def render_welcome(settings: ManagerSettings, url: str, data_dir: Path, *, ends_vms: bool) -> str:
    """Where the dashboard is, what to do next, and how to stop. `ends_vms`: whether Ctrl-C ends the local VMs."""
    stop = "its local VMs" if ends_vms else "leaves its VMs running"
    end = f"Ctrl-C ends this manager and {stop}"
    defaults = type(settings).model_fields
    if settings.is_secure:
        ca = (settings.pki_dir or data_dir / "pki") / "ca.pem"
        token = data_dir / ADMIN_TOKEN_FILE
        setup = f"export VARUNA_MANAGER_URL={url} VARUNA_CA={ca} VARUNA_TOKEN_FILE={token}; "
    elif url == f"http://{defaults['host'].default}:{defaults['http_port'].default}":
        setup = ""  # where the client looks by itself
    else:
        setup = f"export VARUNA_MANAGER_URL={url}; "
    return f"dashboard: {url}/ - next, in another terminal: {setup}varuna submit JOB.yaml - {end}"
