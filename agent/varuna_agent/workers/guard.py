"""Stands between the agent and one worker; run as

    python -I -S guard.py LIFE_FD STATUS_FD USER GROUP WORKDIR ENVIRONMENT_FD COMMAND...

The worker gets its own process group. LIFE_FD is the read end of a pipe. Only the agent has the write end: when that
closes, because the agent closes it or is gone (SIGKILL included), the guard kills the worker's group. The guard reaps
all orphans among the worker's descendants, so it also finds those that left the group. It ends as the worker ended:
with the same exit code or signal. To STATUS_FD it writes two lines: the number of the group, and at the end the exit
code (negative: the signal). USER is UID:GID:GROUP,GROUP... if the command runs as another user, or `-`; the guard
itself keeps the agent's user, so that the command cannot touch it. GROUP is the folder of the command's control group,
or `-`.

Nothing that a job chooses takes effect before the user has changed. The agent chooses the guard's own environment; the
command's arrives through ENVIRONMENT_FD as NAME=VALUE, separated by NULs. The child enters WORKDIR as the job's user,
who may lack the permission.

Standard library only, and little of it, because one guard starts with every worker. It imports no module of Varuna.
"""

import os
import resource
import select
import signal
import sys
import time

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2
"""At this signal a worker writes the stacks of its threads (see `stacks.py`); 0 or less: the system has none."""

OOM_SCORE = 500
"""The score of jobs: when memory runs out, the kernel ends them and not the agent, whose score may be below 0."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_PATIENCE_S = 10.0  # a process in uninterruptible sleep does not die; the exit must be reported all the same


def main(arguments: list[str]) -> None:
    life_fd, status_fd, user, group, workdir, environment_fd, *command = arguments
    with os.fdopen(int(environment_fd), "rb") as file:
        environment = file.read()
    fork_worker(int(life_fd), int(status_fd), user, group)
    _execute(command, workdir, environment)


def fork_worker(life_fd: int, status_fd: int, user: str = "-", group: str = "-") -> None:
    """Fork. Returns only in the child, which becomes the worker; this process is its guard from now on."""
    os.set_inheritable(life_fd, False)
    os.set_inheritable(status_fd, False)
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_fd = _wake_on_child()
    if _is_agent_gone(life_fd):
        _end_by_signal(signal.SIGKILL)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        _leave_guard(guard, (life_fd, status_fd, wake_fd, signal.set_wakeup_fd(-1)), user, group)
        return
    _set_group(worker)
    try:
        _report_number(status_fd, worker)
        status = _wait(worker, life_fd, wake_fd)
    finally:  # after a defect here, too: better no worker than one without a guard
        _kill(worker)
    if status is None:
        status = os.waitpid(worker, 0)[1]
    _kill_rest(worker)
    code = os.waitstatus_to_exitcode(status)
    _report_number(status_fd, code)
    if code < 0:
        _end_by_signal(-code)
    os._exit(code)


def _leave_guard(guard: int, guard_fds: "tuple[int, ...]", user: str, group: str) -> None:
    """In the child: enter its own groups, change to its own user if it has one, and drop the guard's descriptors."""
    os.setpgid(0, 0)
    _raise_oom_score()
    if group != "-":
        _join_control_group(group)
    if user != "-":
        uid, gid, groups = user.split(":")
        os.setgroups([int(each) for each in groups.split(",") if each])
        os.setgid(int(gid))
        os.setuid(int(uid))  # before the next line, because it would undo that
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
    if os.getppid() != guard:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in guard_fds:
        os.close(fd)


def _raise_oom_score() -> None:
    """Call this before the user changes: the job cannot lower a score that root raised with CAP_SYS_RESOURCE."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:  # noqa: PTH123 - pathlib would double the start-up time
            if int(file.read()) < OOM_SCORE:
                file.seek(0)
                file.write(str(OOM_SCORE))
    except OSError:
        return  # not Linux


def _join_control_group(folder: str) -> None:
    try:
        with open(os.path.join(folder, "cgroup.procs"), "w") as file:  # noqa: PTH118, PTH123 - as above
            file.write("0")
    except OSError as error:
        _give_up(f"cannot enter the job's control group {folder}: {error.strerror}")


def _execute(command: list[str], workdir: str, environment: bytes) -> None:
    """In the child: turn into the worker."""
    for changed in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(changed, signal.SIG_DFL)
    try:
        os.chdir(workdir)
    except OSError as error:
        _give_up(f"cannot enter the workdir {workdir}: {error.strerror}")
    variables = (variable.partition(b"=") for variable in environment.split(b"\0") if variable)
    try:
        os.execvpe(command[0], command, {name: value for name, _, value in variables})
    except OSError as error:
        _give_up(f"{command[0]}: {error.strerror}")


def _give_up(text: str) -> None:
    os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(127)


def _set_group(worker: int) -> None:
    """The child does the same; the first one counts. It may already have become the worker, or have ended."""
    try:
        os.setpgid(worker, worker)
    except (PermissionError, ProcessLookupError):
        return


def _report_number(status_fd: int, number: int) -> None:
    try:
        os.write(status_fd, b"%d\n" % number)
    except BrokenPipeError:
        return  # the agent is gone: the other pipe shows that, too


def _wake_on_child() -> int:
    wake_fd, write_fd = os.pipe()
    os.set_blocking(wake_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake_fd


def _is_agent_gone(life_fd: int) -> bool:
    return bool(select.select([life_fd], [], [], 0)[0])


def _wait(worker: int, life_fd: int, wake_fd: int) -> "int | None":
    """The worker's wait status; None if the agent closed the pipe first."""
    while True:
        status = _reap(worker)
        if status is not None:
            return status
        readable, _, _ = select.select([life_fd, wake_fd], [], [])
        if life_fd in readable:
            return None
        os.read(wake_fd, 4096)


def _reap(worker: int) -> "int | None":
    """Reap ended processes; returns the worker's wait status if it is one of them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == worker:
            return status


def _kill_rest(group: int) -> None:
    """Kill the remaining descendants of the worker until none is left."""
    give_up_at = time.monotonic() + _KILL_PATIENCE_S
    while time.monotonic() < give_up_at:
        _reap(0)
        descendants = _list_descendants()
        if not _kill(group) and not descendants:
            return
        for pid in descendants:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)  # time for the kernel to deliver their ends


def _kill(group: int) -> bool:
    """SIGKILL the group; returns whether it had any process."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _list_descendants() -> list[int]:
    """All descendants of this process; empty on systems without /proc, where the group must suffice."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():  # noqa: PTH208, PTH112
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - pathlib would double the start-up time
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_by_signal(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped its core; the guard's is useless
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
