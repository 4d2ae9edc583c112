"""`python -m varuna_agent.notices.pre_stop VM_DIR SECONDS`: what Kubernetes runs in a pod before it stops the agent.

It writes the agent's notice and then waits, because SIGTERM follows when it ends. The agent leaves as after any notice,
and its container ends, and this process with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "write_notice"]


def main(arguments: Sequence[str]) -> int:
    """Returns an exit code: 2 for wrong arguments."""
    try:
        folder, seconds = arguments
        notice_s = float(seconds)
    except ValueError:
        sys.stderr.write("usage: python -m varuna_agent.notices.pre_stop VM_DIR SECONDS\n")
        return 2
    write_notice(Path(folder), time.time() + notice_s)
    time.sleep(notice_s)
    return 0


def write_notice(vm_dir: Path, deadline_unix_s: float) -> None:
    """Leave the notice where the agent with this folder looks for it. Raises OSError."""
    part = vm_dir / "notice.json.part"
    part.write_text(json.dumps({"id": "pod-stop", "deadline_unix_s": deadline_unix_s}))
    part.replace(vm_dir / "notice.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
