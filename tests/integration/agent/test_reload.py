"""An agent whose place another version takes: `systemctl reload` after `deploy/hosts` has switched the link."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from waiting import DEADLINE_S, wait_until

_PROGRAM = """#!{python}
import os, sys
print("{version}", os.getpid(), flush=True)
from varuna_client.cli import main
main()
"""


def install(folder: Path, version: str) -> Path:
    program = folder / version / "bin" / "varuna"
    program.parent.mkdir(parents=True)
    program.write_text(_PROGRAM.format(python=sys.executable, version=version))
    program.chmod(0o755)
    return folder / version


def test_the_version_that_is_installed_now_takes_the_agents_place(tmp_path: Path) -> None:
    older, newer = install(tmp_path, "older"), install(tmp_path, "newer")
    current, log = tmp_path / "current", tmp_path / "log"
    current.symlink_to(older)
    command = [str(current / "bin" / "varuna"), "agent", "--manager", "127.0.0.1:1", "--vm-id", "vm"]
    with log.open("w") as output:
        agent = subprocess.Popen([*command, "--vm-dir", str(tmp_path / "vm")], stdout=output, stderr=output)
    try:
        wait_until(lambda: log.read_text().count("incarnation=") == 1, "the agent")
        current.unlink()
        current.symlink_to(newer)
        agent.send_signal(signal.SIGUSR2)
        wait_until(lambda: log.read_text().count("incarnation=") == 2, "the agent that takes its place")
    finally:
        agent.terminate()
        agent.wait(DEADLINE_S)
    versions = [line.split() for line in log.read_text().splitlines() if line.startswith(("older", "newer"))]
    assert versions == [["older", str(agent.pid)], ["newer", str(agent.pid)]]
    assert agent.returncode == 0
