"""The command itself: wrong input ends in one line and a non-zero exit code."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import DEADLINE_S

pytestmark = pytest.mark.processes

VARUNA = [sys.executable, "-m", "varuna_client.cli"]


def run(*arguments: str, url: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*VARUNA, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={"VARUNA_MANAGER_URL": url, "PATH": "/usr/bin:/bin"},
    )


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address on this machine at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", [["ps"], ["vms"], ["show", "gpt"], ["logs", "gpt"], ["events"], ["cancel", "gpt"]])
def test_without_a_manager_each_command_says_in_one_line_how_to_start_one(command: list[str], nobody: str) -> None:
    result = run(*command, url=nobody)
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"varuna: no manager answers at {nobody}")


def test_a_job_file_that_is_not_there_is_named(nobody: str, tmp_path: Path) -> None:
    result = run("submit", str(tmp_path / "nothing.yaml"), url=nobody)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"varuna: cannot read job file {tmp_path / 'nothing.yaml'}: No such file or directory"
    ]


def test_a_wrong_option_is_a_usage_error() -> None:
    result = run("ps", "--colour")
    assert result.returncode == 2
    assert "No such option: --colour" in result.stderr


def test_the_demo_leaves_a_folder_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = run("demo", "--dir", str(tmp_path))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "not a demo's" in result.stderr


def test_the_demo_begins_only_where_its_report_can_be_written(tmp_path: Path) -> None:
    result = run("demo", "--dir", str(tmp_path / "demo"), "--out", str(tmp_path / "no" / "report.json"))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"there is no folder {tmp_path / 'no'}" in result.stderr
    assert not (tmp_path / "demo").exists()


def test_the_client_needs_no_torch() -> None:
    code = (
        "import sys, varuna_client.cli, varuna_client.demo.director; "
        "sys.exit(bool({'torch', 'varuna', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0
