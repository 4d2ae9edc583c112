"""The cloud-init document of a new VM, which installs the agent from the manager and starts it.

It contains the join token, as Azure's custom data: neither Azure's API nor its metadata service returns that, and only
root can read it on the VM. The token is for this VM only, for a single use, and for an hour.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import yaml

from varuna_manager.providers.azure_settings import AzureSettings, AzureSize

__all__ = ["JOB_USER", "Origin", "render_cloud_init"]

JOB_USER = "varuna-jobs"
_TRUST_STORE = "/etc/ssl/certs/ca-certificates.crt"
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where new VMs get their agent, and which managers it dials."""

    managers: str
    """host:port of each manager's agent port, separated by commas."""
    urls: tuple[str, ...]
    """URL of each manager's REST API."""
    ca_pem: str | None
    """The authority of the certificate at `urls`; None: one that the image trusts."""


def render_cloud_init(origin: Origin, settings: AzureSettings, vm_id: str, size: AzureSize, join_token: str) -> str:
    """The document: the agent's files, and the script that installs it."""
    files = [
        _file("/etc/varuna/join-token", f"{join_token}\n", "0600"),
        _file("/etc/varuna/agent.env", _agent_env(origin, settings, vm_id, size), "0600"),
        _file("/etc/varuna/install.env", _install_env(origin, settings), "0644"),
        _file("/etc/systemd/system/varuna-agent.service", _data("varuna-agent.service"), "0644"),
        _file("/usr/local/sbin/varuna-install-agent", _data("install-agent.sh"), "0755"),
    ]
    if origin.ca_pem is not None:
        files.append(_file("/etc/varuna/ca.pem", origin.ca_pem, "0644"))
    document = {"write_files": files, "runcmd": [["/usr/local/sbin/varuna-install-agent"]]}
    return "#cloud-config\n" + yaml.safe_dump(document, sort_keys=False)


def _agent_env(origin: Origin, settings: AzureSettings, vm_id: str, size: AzureSize) -> str:
    flags = {
        "manager": origin.managers,
        "vm-id": vm_id,
        "host": "auto",
        "gpus": str(size.gpus),
        "device": settings.device,
        "notices": "azure",
        "run-as": JOB_USER,
        "join-token-file": "/etc/varuna/join-token",
        "join-url": ",".join(origin.urls),
        "log-format": "json",
    }
    if size.device_memory_gib is not None:
        flags["device-memory-bytes"] = str(int(size.device_memory_gib * _GIB))
    if origin.ca_pem is None:
        flags["join-ca"] = _TRUST_STORE
    return f"VARUNA_AGENT_FLAGS={' '.join(f'--{name}={value}' for name, value in flags.items())}\n"


def _install_env(origin: Origin, settings: AzureSettings) -> str:
    values = {
        "MANAGER_URLS": " ".join(origin.urls),
        "CA_FILE": "" if origin.ca_pem is None else "/etc/varuna/ca.pem",
        "PIP_OPTIONS": settings.pip_options,
        "JOB_USER": JOB_USER,
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _file(path: str, content: str, mode: str) -> Mapping[str, str]:
    return {"path": path, "content": content, "permissions": mode, "owner": "root:root"}


def _data(name: str) -> str:
    return (resources.files("varuna_manager") / "providers" / name).read_text()
