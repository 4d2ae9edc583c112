"""The demo ends all that it starts: children, their children, and those in sessions of their own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from varuna_client import UserError
from varuna_client.demo.processes import MARK, DemoProcesses, fresh_folder, kill_group
from waiting import DEADLINE_S, wait_until

SLEEPER = "import time; time.sleep(600)"
FAMILY = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
environment = {{}} if "without-mark" in sys.argv else None
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True, env=environment)
open(sys.argv[1] + ".part", "w").write(str(child.pid))
import os; os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def wait_for(path: Path) -> str:
    wait_until(path.exists, f"{path}")
    return path.read_text()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.processes
@pytest.mark.parametrize("mark", ["with-mark", "without-mark"])
def test_everything_with_the_mark_ends_also_what_ignores_the_request_and_left_the_session(
    tmp_path: Path, mark: str
) -> None:
    with DemoProcesses(tmp_path) as processes:
        parent = processes.start(["-c", FAMILY, str(tmp_path / "pid"), mark], tmp_path / "log")
        child = int(wait_for(tmp_path / "pid"))
        assert {process.pid for process in processes.list_marked()} == {parent.pid, child}
        processes.end_all(grace_s=0.2)
        assert gone(parent.pid)
        assert gone(child)


@pytest.mark.processes
def test_an_error_in_between_ends_them_too(tmp_path: Path) -> None:
    pids = []

    def fail_in_between() -> None:
        with DemoProcesses(tmp_path) as processes:
            pids.append(processes.start(["-c", SLEEPER], tmp_path / "log").pid)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_in_between()
    assert gone(pids[0])


@pytest.mark.processes
def test_a_group_is_killed_as_one_and_a_missing_one_is_no_error(tmp_path: Path) -> None:
    with DemoProcesses(tmp_path) as processes:
        started = processes.start(["-c", SLEEPER], tmp_path / "log")
        kill_group(started.pid)
        assert started.wait(DEADLINE_S) == -9
        kill_group(started.pid)


@pytest.mark.processes
def test_our_interpreters_programs_come_first_on_the_path(tmp_path: Path) -> None:
    with DemoProcesses(tmp_path) as processes:
        code = f"import os; print(os.environ['PATH'].split(os.pathsep)[0], os.environ[{MARK!r}])"
        processes.start(["-c", code], tmp_path / "log").wait(DEADLINE_S)
        folder, mark = (tmp_path / "log").read_text().split()
    assert (Path(folder) / "python").exists()
    assert mark == processes.mark


def test_only_a_demos_own_folder_is_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    fresh_folder(folder)
    (folder / "old").write_text("from the last demo")
    fresh_folder(folder)
    assert not (folder / "old").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a demo's"):
        fresh_folder(mine)
    assert (mine / "thesis.txt").exists()


@pytest.mark.processes
def test_a_folder_in_which_a_demo_runs_is_left_alone(tmp_path: Path) -> None:
    fresh_folder(tmp_path / "out")
    with DemoProcesses(tmp_path) as processes:
        script = f"open({str(tmp_path / 'up')!r}, 'w').close(); {SLEEPER}"
        other = processes.start(["-c", script, "demo"], tmp_path / "log")
        wait_for(tmp_path / "up")  # for a moment after its start, its command line is empty
        (tmp_path / "out" / ".varuna-demo").write_text(str(other.pid))
        with pytest.raises(UserError, match=f"pid {other.pid}"):
            fresh_folder(tmp_path / "out")
    assert (tmp_path / "out").is_dir()
