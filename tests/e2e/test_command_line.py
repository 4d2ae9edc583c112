"""The command as a user has it, with a real manager: a terminal of 80 columns, pipes, JSON, Ctrl-C, exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manager_world import PROGRAMS, RunningManager
from repository import WORKERS
from scripted_manager import profile_json
from varuna_client.text.render import STATE_SIGNS
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("e2e")

WORKER = WORKERS / "counting_worker.py"
COLUMNS = 80
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, manager: RunningManager, *arguments: str, **environ: str) -> None:
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        self._process = subprocess.Popen(
            [str(PROGRAMS / "varuna"), *arguments],
            stdin=its,
            stdout=its,
            stderr=its,
            env={**kept, "TERM": "xterm-256color", "VARUNA_MANAGER_URL": manager.url, **environ},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(its)
        self._ours = ours
        self.raw = ""

    def read(self) -> bool:
        """Reads what it has written by now; False at the end."""
        if not select.select([self._ours], [], [], 0.1)[0]:
            return True
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # Linux's error when the other end is closed
            return False
        self.raw += piece.decode(errors="replace")
        return bool(piece)

    def until(self, text: str) -> None:
        wait_until(lambda: (self.read(), text in self.text)[1], f"{text!r} in the terminal")

    def end(self) -> int:
        """Its exit code."""
        wait_until(lambda: not self.read(), "the command's end")
        return self._process.wait(DEADLINE_S)

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def press_q(self) -> None:
        os.write(self._ours, b"q")

    @property
    def text(self) -> str:
        return _ESCAPE.sub("", self.raw).replace("\r\n", "\n")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def take_terminal() -> None:
    """Have Ctrl-C reach this process, also where the tests themselves run in the background and ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(manager: RunningManager, *arguments: str) -> subprocess.Popen[str]:
    """A command with pipes."""
    command = [str(PROGRAMS / "varuna"), *arguments, "--manager-url", manager.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


@pytest.fixture
def piped() -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def free_gpus(running_manager: RunningManager) -> Iterator[None]:
    """After each test: what it left running is ended."""
    yield
    with running_manager.client() as client:
        for job in client.jobs(state=["queued", "running"]):
            client.cancel(job["id"])


def write_job(folder: Path, **spec: object) -> Path:
    folder.mkdir()
    shutil.copy(WORKER, folder / "train.py")
    (folder / "profile.json").write_text(profile_json())
    run = "echo hello from rank $RANK; exec python train.py profile.json"
    job = {"run": run, "global_batch": 8, "copy_workdir": False, "steps": 100_000, **spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def end_at(folder: Path, step: int) -> None:
    (folder / "end.part").write_text(str(step))
    (folder / "end.part").rename(folder / "end")


def test_a_job_is_watched_left_followed_and_shown(
    running_manager: RunningManager,
    tmp_path: Path,
    terminals: list[Terminal],
    piped: list[subprocess.Popen[str]],
) -> None:
    folder = tmp_path / "counting"
    job = write_job(folder)
    document = json.loads(running_manager.varuna("submit", str(job), "--dry-run", "--json").stdout)
    assert (document["free_gpus"], document["all_gpus"], document["plan"]) == (2, 2, None)
    assert "about a minute" in document["why_no_plan"]

    # In a terminal, Ctrl-C leaves the job running and prints how to come back.
    watching = Terminal(running_manager, "submit", str(job), "--watch")
    terminals.append(watching)
    watching.until("not profiled yet")
    watching.until("▶ running")
    watching.until(" left")
    watching.press_ctrl_c()
    assert watching.end() == 130
    assert "varuna watch counting" in watching.text
    assert "generation_started" in watching.text
    assert "/100000" in watching.text
    with running_manager.client() as client:
        assert client.job("counting")["state"] == "running"

        # Followers in pipes: every rank's log, lines; events of one kind, JSON lines; the job, plain lines.
        logs = start(running_manager, "logs", "counting", "-f", "--rank", "all", "--all")
        events = start(running_manager, "events", "counting", "-f", "--kind", "first_step", "--json")
        watch = start(running_manager, "watch", "counting")
        piped += [logs, events, watch]
        wait_until(lambda: all(vm["workers"] for vm in client.vms()), "the workers of the training generation")
        planned = running_manager.varuna("submit", str(job), "--dry-run").stdout
        assert "0 of 2 free" in planned
        assert "no GPU is free" in planned
        running = running_manager.varuna("ps").stdout
        assert re.search(r"counting +▶ running +[0-9]×[0-9] +[0-9] +[0-9]+/100000", running)
        assert "local-1" in running_manager.varuna("vms", "--job", "counting").stdout
        assert watch.stdout is not None
        assert any("/100000  loss" in line for line in watch.stdout), "progress, though the job goes on"
        end_at(folder, client.job("counting")["step"] + 5)
        lines, errors = watch.communicate(timeout=DEADLINE_S)
        assert (watch.returncode, errors) == (0, "")
        assert "\x1b" not in lines
        assert "✔ succeeded counting: step" in lines.splitlines()[-1]

        output, _ = logs.communicate(timeout=DEADLINE_S)
        assert logs.returncode == 0
        ranks = len(client.generation("counting", 2)["placement"])
        assert {line for line in output.splitlines() if line.startswith("g2 ")} == {
            f"g2 r{rank} | hello from rank {rank}" for rank in range(ranks)
        }
        assert events.stdout is not None
        first = json.loads(events.stdout.readline())
        assert (first["kind"], first["generation"]) == ("first_step", 2)

    # The final state, for people and for programs.
    shown = running_manager.varuna("show", "counting")
    for part in ("GENERATIONS", "PLAN OF GENERATION 2", "the fastest", "WHERE THE TIME WENT", "goodput", "GPU-hours"):
        assert part in shown.stdout
    document = json.loads(running_manager.varuna("show", "counting", "--json").stdout)
    assert document["time"]["total_s"] > 0
    assert [generation["kind"] for generation in document["generations"]] == ["calibration", "training"]
    narrow = Terminal(running_manager, "show", "counting")
    coloured = Terminal(running_manager, "ps")
    plain = Terminal(running_manager, "ps", NO_COLOR="1")
    terminals += [narrow, coloured, plain]
    assert [terminal.end() for terminal in (narrow, coloured, plain)] == [0, 0, 0]
    assert max(len(line) for line in narrow.text.splitlines()) <= COLUMNS
    assert f"\x1b[32m{STATE_SIGNS['succeeded'][0]} succeeded" in coloured.raw
    assert "\x1b[32m" not in plain.raw
    assert running_manager.varuna("watch", "counting").returncode == 0, "of a job that is over: how it ended"
    planned = running_manager.varuna("submit", str(job), "--dry-run").stdout
    assert re.search(r"plan +[0-9]×[0-9], micro-batch [0-9]: .* examples/s predicted", planned)


def test_a_followed_jobs_failure_is_the_commands(running_manager: RunningManager, tmp_path: Path) -> None:
    job = write_job(tmp_path / "dies", run="echo last words; exit 7")
    assert running_manager.varuna("submit", str(job)).returncode == 0
    followed = running_manager.varuna("logs", "dies", "-f", timeout_s=DEADLINE_S)
    assert (followed.returncode, followed.stdout) == (7, "last words\n")
    watched = running_manager.varuna("watch", "dies", "--json", timeout_s=DEADLINE_S)
    assert watched.returncode == 7
    assert [json.loads(line)["state"] for line in watched.stdout.splitlines()] == ["failed"]
    assert running_manager.varuna("show", "nobody").returncode == 1
    assert running_manager.varuna("events", "--since", "yesterday").returncode == 1
    assert running_manager.varuna("events", "--last", "-1").returncode == 2


def test_top_is_redrawn_until_q_or_ctrl_c(running_manager: RunningManager, terminals: list[Terminal]) -> None:
    for press in (Terminal.press_q, Terminal.press_ctrl_c):
        terminal = Terminal(running_manager, "top")
        terminals.append(terminal)
        terminal.until("2 of 2 VMs ready")
        seen = terminal.text.count(running_manager.url)
        wait_until(lambda t=terminal, n=seen: (t.read(), t.text.count(running_manager.url) > n)[1], "the next screen")
        press(terminal)
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text
    assert "2 of 2 VMs ready" in running_manager.varuna("top").stdout


@pytest.mark.slow
def test_a_manager_in_a_terminal_says_what_to_do_and_ends_with_its_vms(
    running_manager: RunningManager, tmp_path: Path, terminals: list[Terminal]
) -> None:
    options = ("--data-dir", str(tmp_path), "--http-port", "0", "--grpc-port", "0", "--vms", "1")
    terminal = Terminal(running_manager, "manager", *options)
    terminals.append(terminal)
    terminal.until("dashboard: http://127.0.0.1:")
    terminal.until("varuna submit JOB.yaml")
    terminal.until("vm_ready")
    process = psutil.Process(json.loads((tmp_path / "vms" / "local-1" / "vm.json").read_text())["pid"])
    terminal.press_ctrl_c()
    assert terminal.end() == 0
    assert "local ones ended too" in terminal.text
    assert "{" not in terminal.text, "text, not JSON"
    assert not process.is_running()


def test_the_shell_completes_jobs_and_vms(running_manager: RunningManager) -> None:
    def complete(line: str) -> list[str]:
        words = line.split(" ")
        environ = {
            **os.environ,
            "VARUNA_MANAGER_URL": running_manager.url,
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_VARUNA_COMPLETE": "complete_bash",
        }
        done = subprocess.run(
            [str(PROGRAMS / "varuna")], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        return done.stdout.split()

    # While a busy manager is slow to answer, the shell completes nothing rather than wait.
    wait_until(lambda: complete("varuna drain loc") == ["local-1", "local-2"], "the VMs' names")
    assert "--follow" in complete("varuna logs --fo")
    assert "ps" in complete("varuna p")
    environ = {**os.environ, "VARUNA_MANAGER_URL": "http://127.0.0.1:1"}
    for shell in ("bash", "zsh", "fish"):
        script = running_manager.varuna("completion", shell).stdout
        assert "_VARUNA_COMPLETE" in script
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=DEADLINE_S, env=environ)
