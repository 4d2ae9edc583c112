"""The machines of a run, and the command that starts a launcher on each."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from pathlib import Path

from varuna.launching.layout import LaunchError

__all__ = ["is_this_machine", "make_launcher_command", "read_env_file", "read_machine_list"]

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-T")
"""Never asks for a password, and notices within 15 s (three intervals) that a machine is gone."""


def read_machine_list(path: Path) -> list[str]:
    """The hosts, one per line; blank lines and comments after `#` do not count. Raises LaunchError."""
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
    if is_this_machine(machines[0]) and not all(is_this_machine(machine) for machine in machines):
        raise LaunchError(
            f"machine_list {path} begins with {machines[0]}, where the other machines cannot reach rank 0: "
            "give this machine's address on the network"
        )
    return machines


def is_this_machine(machine: str) -> bool:
    """Whether this is a loopback address, so that no ssh is needed."""
    host = machine.rpartition("@")[2]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_env_file(path: Path) -> dict[str, str]:
    """Reads `NAME=value` lines as a shell does, `export` and quotes included. Raises LaunchError naming the line."""
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


def make_launcher_command(machine: str, python: str, flags: Sequence[str]) -> list[str]:
    """The command that starts `varuna.launcher` on `machine`: here, or through ssh, whose far end is a shell."""
    command = [python, "-u", "-m", "varuna.launcher", *flags]
    return command if is_this_machine(machine) else [*_SSH, machine, "exec " + shlex.join(command)]
