"""The Slurm provider over a real Slurm, for the suite that every provider must pass."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm_cluster import SlurmCluster
from varuna_manager.providers.base import Provider, RefusalKind
from varuna_manager.providers.conformance import ProviderBench
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.slurm.commands import SlurmCommands, make_tool_environment
from varuna_manager.providers.slurm.job_script import render_script
from varuna_manager.providers.slurm.jobs import QUEUE_FORMAT, JobPhase, SlurmJob, parse_jobs
from varuna_manager.providers.slurm.provider import SlurmProvider
from varuna_manager.providers.slurm.settings import SlurmSettings
from waiting import until

ORIGIN = Origin(managers="127.0.0.1:1", urls=("https://127.0.0.1:2",), ca_pem="PEM")
SLEEPER = ("/bin/sh", "-c", "exec sleep 3600", "agent")
"""An agent that does nothing."""


def make_settings(folder: Path, **changes: object) -> SlurmSettings:
    """Of a fleet whose jobs take a fourth of a node."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    given = {
        "partition": "plain",
        "device": "cpu",
        "cpus": 2,
        "time_limit": "2-00:00:00",
        "agent_command": SLEEPER,
        "scratch_dir": str(scratch),
        "log_dir": folder / "logs",
        "list_every_s": 0.2,
        "pending_s": 600.0,
    }
    return SlurmSettings.model_validate({**given, **changes})


def make_slurm_provider(environment: Mapping[str, str], settings: SlurmSettings) -> SlurmProvider:
    async def make_script(vm_id: str) -> str:
        return render_script(ORIGIN, settings, vm_id, f"vj1.{vm_id}.secret.pin")

    return SlurmProvider(settings, SlurmCommands(make_tool_environment(environment)), make_script)


_TOOL = """\
#!/bin/sh
fail() {{ echo "{name}: error: Unable to contact slurm controller (connect failure)" >&2; exit 1; }}
[ ! -e {folder}/cut ] || fail
if [ {name} = sbatch ] && mv {folder}/lose {folder}/cut 2>/dev/null; then {real} "$@" >/dev/null; fail; fi
exec {real} "$@"
"""
"""One of Slurm's tools, as long as the controller can be reached. The answer to a submission may be lost."""


class SlurmBench(ProviderBench):
    refusals = frozenset({RefusalKind.CAPACITY})
    gives_notices = True

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._fillers: list[int] = []
        self._fleet = f"bench-{secrets.token_hex(4)}"  # Slurm lists the jobs of earlier tests for a while
        self.settings = make_settings(folder, fleet=self._fleet, notice_s=4000, pending_s=4.0, list_every_s=0.001)
        tools = folder / "tools"
        tools.mkdir()
        for name in ("sbatch", "squeue", "scancel"):
            real = shutil.which(name)
            (tools / name).write_text(_TOOL.format(folder=folder, name=name, real=real))
            (tools / name).chmod(0o755)
        self._environment = {**cluster.environment, "PATH": f"{tools}:{os.environ['PATH']}"}
        self.provider: Provider = self._make_provider()

    def _make_provider(self) -> Provider:
        return make_slurm_provider(self._environment, self.settings)

    async def restart_provider(self) -> None:
        self.provider = self._make_provider()

    def _list_jobs(self) -> Sequence[SlurmJob]:
        text = self._cluster.run("env", "SLURM_TIME_FORMAT=%s", "squeue", "-h", "-tall", f"-o{QUEUE_FORMAT}")
        return [job for job in parse_jobs(text, self._fleet) if job.phase is not JobPhase.ENDED]

    async def list_real_vms(self) -> Collection[str]:
        return {job.mark.vm_id for job in self._list_jobs()}

    async def list_leftovers(self) -> Sequence[str]:
        return [str(job.id) for job in self._list_jobs()]

    async def lose_next_answer(self) -> None:
        (self._folder / "lose").touch()

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        """Other jobs take all cores but those of so many VMs."""
        cores = 8 * len(self._cluster.nodes) - 2 * len(self._list_jobs()) - 2 * granted
        self._fillers = [self._cluster.submit("--cpus-per-task=2") for _ in range(cores // 2)]
        await until(lambda: all(self._cluster.state(job) == "RUNNING" for job in self._fillers), "the fillers")

    async def end_refusals(self) -> None:
        if self._fillers:
            self._cluster.run("scancel", *map(str, self._fillers))
            await until(lambda: all(self._cluster.state(job) == "CANCELLED" for job in self._fillers), "their end")
        self._fillers = []

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        (job,) = [job.id for job in self._list_jobs() if job.mark.vm_id == vm_id]
        if notice_s:
            self._cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(notice_s / 60)}")
        else:
            self._cluster.run("scancel", str(job))

    async def cut_off(self) -> None:
        (self._folder / "cut").touch()

    async def reconnect(self) -> None:
        for name in ("lose", "cut"):
            (self._folder / name).unlink(missing_ok=True)

    async def add_stranger(self) -> str | None:
        """A job of another fleet of the same user."""
        comment = "varuna:other:request-1:0:other-vm"
        self._fillers.append(self._cluster.submit("--cpus-per-task=2", f"--comment={comment}"))
        return "other-vm"
