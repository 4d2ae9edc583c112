"""What runs in a pod before its agent is stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from varuna_agent.notices.notices import Notice, parse_notice
from varuna_agent.notices.pre_stop import main, write_notice
from waiting import DEADLINE_S, wait_until


def test_the_agent_finds_the_notice_in_its_folder(tmp_path: Path) -> None:
    write_notice(tmp_path, 1_800_000_017.5)
    (file,) = tmp_path.iterdir()
    notice = parse_notice(file.read_text(), source="test")
    assert file.name == "notice.json"
    assert notice == Notice("pod-stop", 1_800_000_017.5, "test")


def test_the_hook_ends_after_the_time_that_it_is_given(tmp_path: Path) -> None:
    assert main([str(tmp_path), "0"]) == 0
    assert (tmp_path / "notice.json").exists()


@pytest.mark.processes
def test_the_hook_waits_so_that_the_agent_gets_no_sigterm_before_it_has_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "varuna_agent.notices.pre_stop", str(tmp_path), str(DEADLINE_S)]
    with subprocess.Popen(command) as hook:
        wait_until((tmp_path / "notice.json").exists, "the notice")
        assert hook.poll() is None
        hook.kill()


@pytest.mark.parametrize("arguments", [[], ["/data"], ["/data", "soon"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "VM_DIR SECONDS" in capsys.readouterr().err
