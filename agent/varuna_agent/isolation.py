"""What keeps workers from what is not theirs: their environment, their user, the modes of the agent's folders."""

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
        # What Azure's SDK signs in with: the manager's right to make and delete VMs.
        "AZURE_CLIENT_SECRET",
        "AZURE_CLIENT_CERTIFICATE_PATH",
        "AZURE_CLIENT_CERTIFICATE_PASSWORD",
        "AZURE_CLIENT_CERTIFICATE_SEND_CHAIN",
        "AZURE_USERNAME",
        "AZURE_PASSWORD",
        "AZURE_FEDERATED_TOKEN_FILE",
        # The store.
        "DATABASE_URL",
        "PGPASSWORD",
        "PGPASSFILE",
        "PGSERVICEFILE",
        # Keys for a receiver of traces; workers send theirs without.
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        # What a person's session or the service manager has given to the agent.
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
"""Of the agent's environment workers get all but these and VARUNA_*; a job that needs one of them names it itself."""

_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, kw_only=True)
class JobUser:
    """A user of this VM, with all groups that it is in."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @classmethod
    def named(cls, name: str) -> JobUser:
        """Raises ValueError when there is no such user, or when this process may not start others as it."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise ValueError(f"--run-as {name!r}: this VM has no user of that name (try: useradd {name})") from None
        if os.geteuid() != 0:
            raise ValueError(f"--run-as {name!r}: only an agent that runs as root can start workers as another user")
        if entry.pw_uid == 0:
            raise ValueError(f"--run-as {name!r}: that is root, whom nothing would be kept from: name another user")
        return cls(
            name=name,
            uid=entry.pw_uid,
            gid=entry.pw_gid,
            groups=tuple(os.getgrouplist(name, entry.pw_gid)),
            home=entry.pw_dir,
        )

    @property
    def for_guard(self) -> str:
        """As `guard.py` takes it."""
        return f"{self.uid}:{self.gid}:{','.join(map(str, self.groups))}"

    @property
    def environment(self) -> dict[str, str]:
        return {"USER": self.name, "LOGNAME": self.name, "HOME": self.home}

    def own(self, path: Path) -> None:
        """Makes the path this user's; nobody else's business."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def worker_environ(
    base: Mapping[str, str], extra: Mapping[str, str], *, on_cpu: bool, user: JobUser | None = None
) -> dict[str, str]:
    """What workers of a job have in common: the agent's environment without Varuna's own, then the job's own."""
    environ = {name: value for name, value in base.items() if not name.startswith("VARUNA_") and name not in _SECRETS}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    environ["PYTHONUNBUFFERED"] = "1"  # a log that is read while the worker runs, and after it was killed
    if on_cpu:
        environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    return {**environ, **({} if user is None else user.environment), **extra}


def keep_private(vm_dir: Path, user: JobUser | None) -> None:
    """Makes the agent's folder nobody else's; workers of another user may pass through it, and not look around.

    Raises OSError.
    """
    vm_dir.mkdir(parents=True, exist_ok=True)
    vm_dir.chmod(0o700 if user is None else 0o711)
    for name in ("jobs", "identity"):
        folder = vm_dir / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)


def hide_this_process() -> None:
    """From others of the same user: they can read neither its environment nor its memory, nor trace it (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
