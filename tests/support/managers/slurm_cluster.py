"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each node, as whoever runs the tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from own_ports import own_ports
from waiting import DEADLINE_S, wait_until

GRACE_S = 30
"""What partition `graceful` gives to a job that is preempted."""

_CONFIGURATION = """\
ClusterName=varuna-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmctldTimeout=60
SlurmdTimeout=10
InactiveLimit=0
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=8 RealMemory=4000 Gres=gpu:2 Feature=fast
PartitionName=plain Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=graceful Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


_PROGRAM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def has_slurm() -> bool:
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
    return all(shutil.which(program, path=_PROGRAM_PATH) for program in programs)


class SlurmCluster:
    """Made by `slurm_cluster`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.configuration = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        for number in range(2):
            (folder / f"gpu{number}").touch()  # Slurm only asks whether they are there
        (folder / "munge.key").write_bytes(secrets.token_bytes(64))
        (folder / "munge.key").chmod(0o600)
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\nIgnoreSystemd=yes\n")
        ctld_port, *ports = own_ports(1 + nodes)
        text = _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=folder,
            ctld_port=ctld_port,
            nodes=f"n[1-{nodes}]",
            ports=f"[{','.join(map(str, ports))}]",
            grace_s=GRACE_S,
        )
        self.configuration.write_text(text)

    def start(self) -> None:
        files = {"key": "munge.key", "pid": "munged.pid", "seed": "munge.seed", "log": "munged.log"}
        options = [f"--{name}-file={self.folder / file}" for name, file in files.items()]
        options += [f"--socket={self.folder}/munge.sock", "--num-threads=2"]
        self._start_process("munged", ["munged", "--foreground", "--force", *options])
        wait_until(lambda: (self.folder / "munge.sock").exists(), "munged")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Until every node takes jobs."""
        count = len(self.nodes)
        wait_until(lambda: self.run("sinfo", "-hN", "-pplain", "-o%t").split() == ["idle"] * count, "the nodes")

    def start_controller(self) -> None:
        self._start_process("slurmctld", ["slurmctld", "-D"])
        wait_until(lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld")

    def stop_controller(self) -> None:
        self._end_process("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        self._start_process(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """As when its power fails: nothing of it is left."""
        self._end_process(node, signal.SIGKILL)
        for shell in self._processes_with(f"SLURMD_NODENAME={node}"):
            with contextlib.suppress(psutil.Error):
                if shell.ppid() != 1 and "slurmstepd" in shell.parent().name():
                    shell.parent().kill()
            with contextlib.suppress(psutil.Error):
                shell.kill()

    def run(self, *command: str, text: str | None = None, check: bool = True) -> str:
        """A command's output. `text`: its standard input."""
        done = subprocess.run(
            command, env=self.environment, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *options: str, seconds: int = 3600) -> int:
        """A job of somebody else."""
        script = f"#!/bin/sh\nexec sleep {seconds}\n"
        return int(self.run("sbatch", "--parsable", "--output=/dev/null", *options, text=script))

    def state(self, job: int) -> str:
        return self.run("squeue", "-h", "-tall", f"-j{job}", "-o%T").strip()

    def forget_jobs(self) -> None:
        """As the controller does after MinJobAge, and when it has lost its state."""
        self.stop_controller()
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir()
        self.start_controller()
        self.wait_until_idle()

    def describe(self) -> str:
        """For a test that fails."""
        jobs = self.run("squeue", "-tall", "-o%A %T %r %P %N %k", check=False)
        return f"{jobs}\n{self.run('sinfo', '-N', check=False)}"

    def close(self) -> None:
        for name in [name for name in self._processes if name != "munged"]:
            self._end_process(name, signal.SIGKILL)
        self._end_process("munged", signal.SIGTERM)
        for process in self._processes_with(f"SLURM_CONF={self.configuration}"):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _start_process(self, name: str, command: Sequence[str]) -> None:
        program = shutil.which(command[0], path=_PROGRAM_PATH)
        assert program is not None, f"{command[0]} is not installed"
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program, *command[1:]], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _end_process(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.send_signal(number)
            process.wait(DEADLINE_S)

    def _processes_with(self, variable: str) -> list[psutil.Process]:
        """The processes of this cluster whose environment began with that, and all below them."""
        ours, found = f"SLURM_CONF={self.configuration}", []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                # psutil's own way stops at the title that slurmstepd has written over its arguments.
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if {ours.encode(), variable.encode()} <= set(environment):
                    found += [process, *process.children(recursive=True)]
        return [process for process in found if process.pid != os.getpid()]


@contextlib.contextmanager
def slurm_cluster(nodes: int = 4) -> Iterator[SlurmCluster]:
    """A cluster whose processes and jobs end with the block. Its paths must be short, for munge's socket."""
    with tempfile.TemporaryDirectory(prefix="varuna-slurm-", ignore_cleanup_errors=True) as folder:
        cluster = SlurmCluster(Path(folder), nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
