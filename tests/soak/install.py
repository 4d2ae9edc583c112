"""A deployment from nothing: the wheel with its extras from the registry into empty environments, a secure manager, and
the agent put on a host over a real ssh; then a job trains there, and the host is upgraded.

    .venv/bin/python tests/soak/install.py [--dir test-artifacts/install] [--sshd /usr/sbin/sshd] [--pip FLAGS]

Needs the registry (PyTorch is large), ssh, ssh-keygen and sshd (Debian: openssh-server), so it is not part of
`make test`. Everything lies in --dir: the "host" is this machine with a --prefix of its own, and ends with the run.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from waiting import wait_until

SCRIPT = """
    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(8, 8), CutPoint(), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.cut(self.first(x).tanh())).square().mean()

    torch.manual_seed(0)
    data = [{"x": torch.full((8,), i / 64)} for i in range(64)]
    model = Varuna(Net(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=20):
        model.step(batch)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("test-artifacts/install"))
    parser.add_argument("--sshd", default=shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"))
    parser.add_argument("--pip", default="", help="flags for every pip, such as the index of PyTorch's wheels")
    options = parser.parse_args()
    if options.sshd is None:
        sys.exit("there is no sshd: install it (Debian: apt-get install openssh-server), or give --sshd PATH")
    work = options.dir.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that what was started ends
    began = time.monotonic()
    with ExitStack() as ends:
        deploy(work, options.sshd, options.pip, ends)
    print(f"installed, trained, upgraded: {time.monotonic() - began:.0f} s")
    return 0


def deploy(work: Path, sshd: str, pip_flags: str, ends: ExitStack) -> None:
    wheel = build(work)
    programs = new_environment(work / "manager", f"{wheel}[manager]", pip_flags)
    ssh = start_sshd(work, sshd, ends)
    inventory = work / "hosts.txt"
    inventory.write_text("# one host\nhost-1 127.0.0.1 --gpus 2 --host 127.0.0.1\n")
    install = str(ROOT / "deploy/hosts/install.sh")
    (work / "hosts.yaml").write_text(run([install, "--list", str(inventory)]))
    environment, grpc = start_manager(work, programs, ends)
    url = environment["VARUNA_MANAGER_URL"]
    ends.callback(end_agent, work / "host-1")
    command = [install, "--manager", grpc, "--join-url", url, "--wheel", str(wheel), "--start", "process", "--ssh", ssh]
    command += ["--prefix", str(work / "host-1"), "--python", sys.executable, "--pip", pip_flags, str(inventory)]
    print(run(command, environment), end="")
    first = agent_pid(work / "host-1")
    train(work, programs, environment)
    print(run(command, environment), end="")
    assert agent_pid(work / "host-1") != first, "the agent was not started again"
    made = [entry["action"] for entry in json.loads(run([f"{programs}/varuna", "audit", "--json"], environment))]
    assert made.count("POST /api/v1/tokens") == 1, f"an upgrade needs no other join token: {made}"


def build(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*command, "-w", str(work / "dist"), str(ROOT)])
    shutil.copy(ROOT / "constraints.txt", work / "dist")
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def new_environment(folder: Path, wanted: str, pip_flags: str) -> Path:
    run([sys.executable, "-m", "venv", str(folder)])
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run([f"{folder}/bin/pip", "install", "--quiet", *constraints, *pip_flags.split(), wanted])
    return folder / "bin"


def start_sshd(work: Path, sshd: str, ends: ExitStack) -> str:
    """A server of our own on a free port; the ssh command that reaches it."""
    folder = work / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)])
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\nPidFile none\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # the chroot of its unprivileged part
    log = (folder / "log").open("w")
    server = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "config")], stdout=log, stderr=log)
    ends.callback(end, server)
    host_key = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
    known = f"-o UserKnownHostsFile={folder}/known_hosts -o StrictHostKeyChecking=yes -o BatchMode=yes"
    ssh = f"ssh -F none -p {port} -i {folder}/user -l {getpass.getuser()} {known}"
    command = [*ssh.split(), "127.0.0.1", "true"]

    def answers() -> bool:
        if server.poll() is not None:
            raise SystemExit(f"sshd ended: {(folder / 'log').read_text()}")
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    wait_until(answers, "sshd")
    return ssh


def start_manager(work: Path, programs: Path, ends: ExitStack) -> tuple[dict[str, str], str]:
    """The environment of its admin, and the address for agents."""
    data = work / "data"
    command = [f"{programs}/varuna", "manager", "--data-dir", str(data), "--secure", "--http-port", "0"]
    command += ["--grpc-port", "0", "--provider", f"static:{work / 'hosts.yaml'}"]
    command += ["--default-checkpoint-url", str(work / "checkpoints")]
    log = (work / "manager.log").open("w")
    manager = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment())
    ends.callback(end, manager)

    def answers() -> bool:
        assert manager.poll() is None, (work / "manager.log").read_text()
        return (data / "manager.json").exists() and (data / "admin-token").exists()

    wait_until(answers, "the manager")
    document = json.loads((data / "manager.json").read_text())
    environment = clean_environment() | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VARUNA_MANAGER_URL": document["url"],
        "VARUNA_TOKEN_FILE": str(data / "admin-token"),
        "VARUNA_CA": str(data / "pki" / "ca.pem"),
    }
    return environment, str(document["grpc"])


def train(work: Path, programs: Path, environment: dict[str, str]) -> None:
    """A job on the host, to its end."""
    folder = work / "job"
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    (folder / "job.yaml").write_text("name: tiny\nrun: python train.py\nglobal_batch: 8\n")
    run([f"{programs}/varuna", "submit", str(folder / "job.yaml")], environment)

    def is_over() -> Any:
        (job,) = json.loads(run([f"{programs}/varuna", "ps", "--json"], environment))
        return job if job["state"] in ("succeeded", "failed") else None

    job = wait_until(is_over, "the job")
    assert job["state"] == "succeeded", job["error"]
    assert job["step"] == 20


def clean_environment() -> dict[str, str]:
    """Nothing of this project's own environment."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def agent_pid(prefix: Path) -> int:
    return int((prefix / "var/lib/varuna-agent/agent.pid").read_text())


def end_agent(prefix: Path) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(agent_pid(prefix), signal.SIGTERM)


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
