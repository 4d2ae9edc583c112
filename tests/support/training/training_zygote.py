"""Imports torch, Varuna and the modules in its arguments once, then forks the ranks of one world after the other.

Importing takes longer than a test.

In a world that is "fresh" each rank imports for itself.

Each line on standard input is the path of a world's `world.json`. For it a supervisor is forked, in a process group of
its own, which forks the ranks and notes in `events.jsonl` beside the file when each starts and ends. Nothing here
starts a thread before forking. The ranks come back to this module's top level and so begin and end as scripts do.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import NoReturn

import pytest  # noqa: F401 - for the scripts: most of them import it
import torch

import varuna
from small_gpt import Task, example_batch, make_model
from varuna.partition import trace


def serve() -> dict[str, str] | None:
    """Returns, in each rank, what to run; None at the end of input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    for line in sys.stdin:
        if os.fork() == 0:
            return supervise(Path(line.strip()))
    return None


def supervise(spec: Path) -> dict[str, str]:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    world = json.loads(spec.read_text())
    with spec.with_name("events.jsonl").open("a", buffering=1) as events, socket.socket() as held:
        # The port is held from here, as an agent does it: on all addresses, because torch's store listens on all, and a
        # connection from another address may have the port.
        held.bind(("", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for an init_process_group of the script
        events.write(json.dumps({"supervisor": os.getpid(), "port": held.getsockname()[1]}) + "\n")
        ranks: dict[int, int] = {}
        for rank, environ in enumerate(world["environ"]):
            environ["MASTER_PORT"] = str(held.getsockname()[1])
            pid = os.fork()
            if pid == 0:
                become_rank(spec.with_name(f"rank{rank}.log"), environ)
                if world["fresh"]:
                    start_fresh(world["script"], world["job"])
                return {"script": world["script"], "job": world["job"]}
            ranks[pid] = rank
            events.write(json.dumps({"rank": rank, "pid": pid}) + "\n")
        while ranks:
            pid, status = os.wait()
            end = {"rank": ranks.pop(pid), "code": os.waitstatus_to_exitcode(status), "at": time.monotonic()}
            events.write(json.dumps(end) + "\n")
    os._exit(0)


def become_rank(log: Path, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.close(0)


def start_fresh(script: str, job: str) -> NoReturn:
    """Replaces this process by one that has imported nothing. It finds the same modules."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.execv(sys.executable, [sys.executable, script, job])


def leave_libraries() -> None:
    """Takes from ranks the last thing that torch would have them do: to forget its own operators one by one, 45 ms."""
    for finalizer, called in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if called.func is torch.library._del_library:
            finalizer.atexit = False


if __name__ == "__main__":
    torch.set_num_threads(1)
    trace(make_model(Task()), example_batch(2))  # imports what torch imports at the first use of fake tensors
    varuna.Varuna.__name__  # noqa: B018 - imports it
    sys.path.append(str(Path(__file__).parents[1]))  # of scripts that wait as tests do
    for name in sys.argv[1:]:
        importlib.import_module(name)
    leave_libraries()
    gc.freeze()  # no garbage collection of a rank, not even the last, touches the pages that it shares
    world = serve()
    if world is not None:
        sys.argv = [world["script"], world["job"]]
        runpy.run_path(world["script"], run_name="__main__")
