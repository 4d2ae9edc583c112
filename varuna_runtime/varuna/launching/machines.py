"""The machines of a run, and the command that starts a launcher on each."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from pathlib import Path

from varuna.launching.layout import LaunchError

__all__ = ["is_here", "launcher_command", "read_env_file", "read_machine_list"]

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-T")
"""Never asks for a password; a machine that is gone is noticed within 15 s (three intervals)."""


def read_machine_list(path: Path) -> list[str]:
    """One host per line; blank lines and what follows `#` do not count. Raises LaunchError."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(
            f"machine_list {path}: {why}; write the machines' addresses there, one per line (127.0.0.1: this one)"
        ) from error
    machines = [line for line in lines if line]
    for machine in machines:
        if machine.startswith("-") or len(machine.split()) != 1:
            raise LaunchError(f"machine_list {path}: {machine!r} is not an address")
    if not machines:
        raise LaunchError(f"machine_list {path} is empty: write the machines' addresses there, one per line")
    if is_here(machines[0]) and not all(is_here(machine) for machine in machines):
        raise LaunchError(
            f"machine_list {path} begins with {machines[0]}, at which the others cannot reach rank 0: "
            "give this machine's address on the network"
        )
    return machines


def is_here(machine: str) -> bool:
    """Whether this is a loopback address, so that no ssh is needed."""
    host = machine.rpartition("@")[2]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_env_file(path: Path) -> dict[str, str]:
    """`NAME=value` lines, as of a shell: `export` and quotes are taken off. Raises LaunchError naming the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"env_file {path}: {why}") from error
    variables = {}
    for number, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise LaunchError(f"env_file {path}, line {number}: {error}") from error
        if words[:1] == ["export"]:
            words = words[1:]
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                raise LaunchError(f"env_file {path}, line {number}: expected NAME=value, found {word!r}")
            variables[name] = value
    return variables


def launcher_command(machine: str, python: str, flags: Sequence[str]) -> list[str]:
    """Starts `varuna.launcher` with `flags` on `machine`: here, or through ssh, whose far end is a shell."""
    command = [python, "-u", "-m", "varuna.launcher", *flags]
    return command if is_here(machine) else [*_SSH, machine, "exec " + shlex.join(command)]
