"""How the agent of a new VM is started: its flags, and the cloud-init document that installs it from the manager.

The document contains the join token. A cloud's provider puts it where only root can read it on the VM. The token is for
this VM only, for a single use, and for an hour.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import yaml

from varuna_manager.providers.kind import Origin

__all__ = ["JOB_USER", "AgentMachine", "make_agent_flags", "render_cloud_init"]

JOB_USER = "varuna-jobs"
_TRUST_STORE = "/etc/ssl/certs/ca-certificates.crt"
_TOKEN_FILE = "/etc/varuna/join-token"


@dataclass(frozen=True, kw_only=True)
class AgentMachine:
    """What the agent of a new VM is told about its machine."""

    vm_id: str
    gpus: int
    device: str
    """The device of its workers: cuda or cpu."""
    notices: str
    """Where its notices of preemption come from: azure, aws, gcp or file."""
    device_memory_bytes: int | None = None
    """Memory of each GPU; None: not known."""
    pip_options: str = ""
    """Options of pip when it installs the agent."""


def make_agent_flags(origin: Origin, machine: AgentMachine, *, join_token_file: str | None = None) -> Mapping[str, str]:
    """Values of `varuna agent`'s options, by their names. `--vm-dir` is the caller's, and so is `--run-as`.

    `join_token_file`: a file on the VM with the join token, which only the agent's user can read; None: the caller adds
    the option.
    """
    flags = {
        "manager": origin.managers,
        "vm-id": machine.vm_id,
        "host": "auto",
        "gpus": str(machine.gpus),
        "device": machine.device,
        "notices": machine.notices,
        "join-url": ",".join(origin.urls),
        "log-format": "json",
    }
    if join_token_file is not None:
        flags["join-token-file"] = join_token_file
    if machine.device_memory_bytes is not None:
        flags["device-memory-bytes"] = str(machine.device_memory_bytes)
    if origin.ca_pem is None:
        flags["join-ca"] = _TRUST_STORE
    return flags


def render_cloud_init(origin: Origin, machine: AgentMachine, join_token: str) -> str:
    """The document: the agent's files, and the script that installs it."""
    files = [
        _file(_TOKEN_FILE, f"{join_token}\n", "0600"),
        _file("/etc/varuna/agent.env", _agent_env(origin, machine), "0600"),
        _file("/etc/varuna/install.env", _install_env(origin, machine), "0644"),
        _file("/etc/systemd/system/varuna-agent.service", _data("varuna-agent.service"), "0644"),
        _file("/usr/local/sbin/varuna-install-agent", _data("install-agent.sh"), "0755"),
    ]
    if origin.ca_pem is not None:
        files.append(_file("/etc/varuna/ca.pem", origin.ca_pem, "0644"))
    document = {"write_files": files, "runcmd": [["/usr/local/sbin/varuna-install-agent"]]}
    return "#cloud-config\n" + yaml.safe_dump(document, sort_keys=False)


def _agent_env(origin: Origin, machine: AgentMachine) -> str:
    flags = {**make_agent_flags(origin, machine, join_token_file=_TOKEN_FILE), "run-as": JOB_USER}
    return f"VARUNA_AGENT_FLAGS={' '.join(f'--{name}={value}' for name, value in flags.items())}\n"


def _install_env(origin: Origin, machine: AgentMachine) -> str:
    values = {
        "MANAGER_URLS": " ".join(origin.urls),
        "CA_FILE": "" if origin.ca_pem is None else "/etc/varuna/ca.pem",
        "PIP_OPTIONS": machine.pip_options,
        "JOB_USER": JOB_USER,
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _file(path: str, content: str, mode: str) -> Mapping[str, str]:
    return {"path": path, "content": content, "permissions": mode, "owner": "root:root"}


def _data(name: str) -> str:
    return (resources.files("varuna_manager") / "providers" / name).read_text()
