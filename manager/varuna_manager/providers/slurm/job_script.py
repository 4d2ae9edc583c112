"""The job of one VM: sbatch's options, and the script, which it reads from its standard input. Pure.

The script contains the join token. It stands on no command line and in no environment: Slurm keeps scripts where only
their owner and Slurm's operators can read them, and here the token goes from the script into a file of mode 0600. Each
VM is a job of its own and no task of an array, because an array has one script, which would have the tokens of all.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from varuna_manager.providers.boot import AgentMachine, make_agent_flags
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.slurm.jobs import JobMark
from varuna_manager.providers.slurm.settings import SlurmSettings

__all__ = ["make_sbatch_options", "render_script"]

_GIB = 1 << 30

_SCRIPT = """\
#!/bin/bash
# A VM of the Varuna fleet {fleet}.
umask 077
if [ "${{SLURM_RESTART_COUNT:-0}}" != 0 ]; then
    echo "this job has been requeued, and its token is used up: the manager submits another one" >&2
    exit 1
fi
folder={folder}
mkdir "$folder" || exit 1
printf '%s\\n' {token} > "$folder/join-token"
export VARUNA_SLURM_JOB=$SLURM_JOB_ID
for name in ${{!SLURM_@}}; do  # for Slurm's own tools, and not for what trains here
    [ "$name" = SLURM_CONF ] || unset "$name"
done
{before_agent}
{command} &
agent=$!
trap 'kill -USR1 "$agent"' USR1
trap : TERM  # Slurm has sent it to the agent, too
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do  # a signal ended the wait
    wait "$agent"
    code=$?
done
rm -rf "$folder"
exit "$code"
"""


def make_sbatch_options(settings: SlurmSettings, mark: JobMark, log_dir: Path) -> list[str]:
    """What the settings leave open is left to the defaults of the cluster."""
    optional = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "gres": settings.generic_resources,
        "cpus-per-task": settings.cpus,
        "mem": settings.memory,
        "time": settings.time_limit,
    }
    return [
        "--parsable",
        f"--job-name={mark.vm_id}",
        f"--comment={mark}",
        "--nodes=1",
        "--ntasks=1",
        "--no-requeue",  # a VM that comes back has lost its certificate and its workers
        f"--signal=B:USR1@{settings.notice_s}",
        "--export=ALL",  # of the environment that sbatch has, which is not the manager's
        f"--chdir={settings.scratch_dir}",
        f"--output={log_dir}/%j.log",
        *(f"--{name}={value}" for name, value in optional.items() if value is not None),
        *(["--exclusive"] if settings.exclusive else []),
        *settings.sbatch_options,
    ]


def render_script(origin: Origin, settings: SlurmSettings, vm_id: str, join_token: str) -> str:
    folder = f"{settings.scratch_dir.rstrip('/')}/{vm_id}"
    memory_gib = settings.device_memory_gib
    machine = AgentMachine(
        vm_id=vm_id,
        gpus=settings.gpus,
        device=settings.device,
        notices="slurm",
        device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
    )
    flags = make_agent_flags(origin, machine, join_token_file=f"{folder}/join-token")
    options = [f"--{name}={value}" for name, value in {**flags, "vm-dir": f"{folder}/vm"}.items()]
    return _SCRIPT.format(
        fleet=settings.fleet,
        folder=shlex.quote(folder),
        token=shlex.quote(join_token),
        before_agent=settings.before_agent,
        command=shlex.join([*settings.agent_command, *options]),
    )
