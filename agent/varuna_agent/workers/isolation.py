"""Keeps workers from what belongs to others: by their environment, their user and the modes of the agent's folders."""

from __future__ import annotations

import ctypes
import os
import pwd
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SECRETS = frozenset(
    {
        # Azure credentials: the manager's right to make and delete VMs.
        "AZURE_CLIENT_SECRET",
        "AZURE_CLIENT_CERTIFICATE_PATH",
        "AZURE_CLIENT_CERTIFICATE_PASSWORD",
        "AZURE_CLIENT_CERTIFICATE_SEND_CHAIN",
        "AZURE_USERNAME",
        "AZURE_PASSWORD",
        "AZURE_FEDERATED_TOKEN_FILE",
        # The manager's store.
        "DATABASE_URL",
        "PGPASSWORD",
        "PGPASSFILE",
        "PGSERVICEFILE",
        # Keys for a receiver of traces; workers send theirs without.
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        # Sockets and folders that a login session or the service manager gave to the agent.
        "SSH_AUTH_SOCK",
        "GPG_AGENT_INFO",
        "SUDO_ASKPASS",
        "CREDENTIALS_DIRECTORY",
        "NOTIFY_SOCKET",
        "LISTEN_FDS",
        "LISTEN_PID",
        "LISTEN_FDNAMES",
    }
)
"""Workers get the agent's environment without these and VARUNA_*; a job that needs one names it itself."""

_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, kw_only=True)
class JobUser:
    """A user of this VM, with all its groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @classmethod
    def find_user(cls, name: str) -> JobUser:
        """Raises ValueError if there is no such user, or if this process may not start others as that user."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise ValueError(f"--run-as {name!r}: this VM has no user of that name (try: useradd {name})") from None
        if os.geteuid() != 0:
            raise ValueError(f"--run-as {name!r}: only an agent that runs as root can start workers as another user")
        if entry.pw_uid == 0:
            raise ValueError(f"--run-as {name!r}: that is root, from whom nothing can be kept: name another user")
        return cls(
            name=name,
            uid=entry.pw_uid,
            gid=entry.pw_gid,
            groups=tuple(os.getgrouplist(name, entry.pw_gid)),
            home=entry.pw_dir,
        )

    @property
    def guard_argument(self) -> str:
        """The form in which `guard.py` takes it."""
        return f"{self.uid}:{self.gid}:{','.join(map(str, self.groups))}"

    @property
    def environment(self) -> dict[str, str]:
        return {"USER": self.name, "LOGNAME": self.name, "HOME": self.home}

    def take_path(self, path: Path) -> None:
        """Make this user the owner of the path."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def make_worker_environ(
    base: Mapping[str, str], extra: Mapping[str, str], *, on_cpu: bool, user: JobUser | None = None
) -> dict[str, str]:
    """The environment that a job's workers share: the agent's without Varuna's own variables, then the job's."""
    environ = {name: value for name, value in base.items() if not name.startswith("VARUNA_") and name not in _SECRETS}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    environ["PYTHONUNBUFFERED"] = "1"  # a log that is read while the worker runs, and after it was killed
    if on_cpu:
        environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    return {**environ, **({} if user is None else user.environment), **extra}


def keep_private(vm_dir: Path, user: JobUser | None) -> None:
    """Make the agent's folder private. Workers of another user may pass through it, but not list it.

    Raises OSError.
    """
    vm_dir.mkdir(parents=True, exist_ok=True)
    vm_dir.chmod(0o700 if user is None else 0o711)
    for name in ("jobs", "identity"):
        folder = vm_dir / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)


def hide_this_process() -> None:
    """Keep other processes of the same user from reading its environment and memory and from tracing it (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
