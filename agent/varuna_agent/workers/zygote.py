"""Does the imports of a job's workers once, and forks workers on request; run by the job's own Python as

    PYTHON zygote.py SOCKET_FD SCRIPT ARGUMENTS...      or      PYTHON zygote.py SOCKET_FD -m MODULE ARGUMENTS...

It writes a line to the socket when it is ready. A request is eight bytes of length, sent with the file descriptors
(life, status, log, stacks, go), then a JSON object: the worker's whole environment. For each request it forks a guard
and answers with a byte: a line feed, or, if it cannot fork, the number of the system's error. The guard forks the
worker once the agent has written a byte to `go`, and ends if the agent closes that instead, because it no longer waits
for the answer; the worker runs the script as `python SCRIPT ARGUMENTS...` does. The process ends when the agent closes
the socket.

Nothing here may start a thread or touch a device, because neither survives a fork. Standard library only, like the
guard.
"""

import errno
import faulthandler
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
from types import ModuleType

_PRELOADED = "varuna.worker.preload"
_FDS = 5


def main() -> None:
    agent_fd, arguments = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(agent_fd, False)
    guard = _load_guard()
    _set_arguments(arguments)
    try:
        importlib.import_module(_PRELOADED)
    except ImportError as error:  # a script without Varuna: forking saves less, but works
        sys.stderr.write(f"not preloaded: {error}\n")
    if threading.active_count() > 1:
        sys.stderr.write(f"cannot fork workers: something imported started threads: {threading.enumerate()}\n")
        return
    gc.collect()
    gc.freeze()  # so that a worker's collector does not copy the pages that it shares with this process
    with socket.socket(fileno=agent_fd) as agent:
        is_worker = _serve(agent, guard)
    if is_worker:
        _run(arguments)


def _serve(agent: socket.socket, guard: ModuleType) -> bool:
    """True in a worker; False at the end of requests."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards need not be waited for
    agent.sendall(b"ready\n")
    while True:
        head, fds, _, _ = socket.recv_fds(agent, 8, _FDS)
        if len(head) < 8:
            return False
        environment = json.loads(_read(agent, int.from_bytes(head, "big")))
        answer = b"\n"
        try:
            is_child = os.fork() == 0
        except OSError as error:  # no process or memory left: the workers that train would end with this process
            is_child, answer = False, bytes([error.errno or errno.EAGAIN])
        if is_child:
            agent.close()
            _become_worker(environment, fds, guard)
            return True
        for fd in fds:
            os.close(fd)
        agent.sendall(answer)


def _read(agent: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = agent.recv(size - len(data))
        if not part:
            raise EOFError("the agent is gone")
        data += part
    return bytes(data)


def _become_worker(environment: "dict[str, str]", fds: "list[int]", guard: ModuleType) -> None:
    """In the fork: become the guard, and return only in the worker."""
    life_fd, status_fd, log_fd, stacks_fd, go_fd = fds
    if not os.read(go_fd, 1):
        os._exit(1)  # the agent has given this request up, and started the worker in another way
    os.close(go_fd)
    os.setsid()
    guard.fork_worker(life_fd, status_fd)
    # As Python sets them when it starts.
    for number, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        signal.signal(number, action)
    for output in (1, 2):
        os.dup2(log_fd, output)
    os.close(log_fd)
    if guard.STACKS_SIGNAL > 0:
        faulthandler.register(guard.STACKS_SIGNAL, stacks_fd)
    os.environ.clear()
    os.environ.update(environment, PWD=os.getcwd())  # noqa: PTH109 - the shell, which starts the others, sets it
    random.seed()  # otherwise all workers would draw the same numbers
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    begin_worker = getattr(sys.modules.get(_PRELOADED), "begin_worker", None)  # older versions of Varuna have none
    if begin_worker is not None:
        begin_worker()


def _set_arguments(arguments: "list[str]") -> None:
    """Set argv and the path as Python does for these arguments."""
    is_module = arguments[0] == "-m"
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0]))  # noqa: PTH109, PTH120
    sys.argv[:] = arguments[1:] if is_module else arguments


def _run(arguments: "list[str]") -> None:
    if arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        _run_script(os.path.join(os.getcwd(), arguments[0]))  # noqa: PTH109, PTH118


def _run_script(path: str) -> None:
    """Run the script in the module `__main__` itself, because the script may define classes that are pickled."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names = sys.modules["__main__"].__dict__
    kept = {name: names[name] for name in ("__name__", "__builtins__", "__doc__", "__package__", "__spec__")}
    names.clear()
    names.update(kept, __doc__=None, __file__=path, __loader__=loader, __cached__=None)
    exec(code, names)


def _load_guard() -> ModuleType:
    """Load it by its path, because the agent's modules are not on the worker's import path."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")  # noqa: PTH100, PTH118, PTH120
    spec = importlib.util.spec_from_file_location("_varuna_guard", path)
    assert spec is not None
    assert spec.loader is not None
    guard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guard)
    return guard


if __name__ == "__main__":
    main()
