"""What Slurm's tools print, the script of a job, and the settings."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.slurm.commands import make_tool_environment
from varuna_manager.providers.slurm.job_script import make_sbatch_options, render_script
from varuna_manager.providers.slurm.jobs import (
    JobMark,
    JobPhase,
    SlurmJob,
    describe_end,
    find_duplicates,
    find_notice,
    is_refused,
    make_pending_refusal,
    parse_accounting,
    parse_jobs,
    parse_submission_error,
)
from varuna_manager.providers.slurm.settings import SlurmSettings, parse_time_limit, read_slurm_settings
from waiting import DEADLINE_S, wait_until

MARK = JobMark(fleet="varuna", request="8f1d", slot=2, vm_id="varuna-8f1d-2-abcdef")
ORIGIN = Origin(managers="10.0.0.1:8751", urls=("https://10.0.0.1:8750",), ca_pem="PEM")
TOKEN = "vj1.id.secret.pin"


def job(**changes: object) -> SlurmJob:
    usual = SlurmJob(
        id=7,
        mark=MARK,
        state="RUNNING",
        reason="None",
        submitted_at=900.0,
        started_at=1000.0,
        ends_at=4600.0,
        limit_s=3600.0,
        node="n1",
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- squeue, sacct, sbatch


def test_the_jobs_of_the_fleet_are_found_among_those_of_a_user() -> None:
    text = "\n".join(
        [
            "8|PENDING|Resources|1795640000|1795640096|NONE|UNLIMITED|n/a|varuna:varuna:8f1d:1:varuna-8f1d-1-b",
            "7|RUNNING|None|1795639970|1795639976|1795640096|2:00|n1|varuna:varuna:8f1d:0:varuna-8f1d-0-a",
            "5|COMPLETED|None|1|2|3|UNLIMITED|n1|(null)",
            "4|RUNNING|None|1|2|3|1:00|n2|what|ever",
            "of several lines",
            "3|RUNNING|None|1|2|3|1:00|n2|varuna:other:8f1d:0:other-vm",
            "2|RUNNING|None|1|2|3|1:00|n2|varuna:varuna:8f1d:0:../../etc",
        ]
    )
    running, waiting = parse_jobs(text, "varuna")
    assert (running.id, running.mark.vm_id, running.mark.slot) == (7, "varuna-8f1d-0-a", 0)
    assert (running.started_at, running.ends_at, running.limit_s) == (1795639976.0, 1795640096.0, 120.0)
    assert running.had_node
    assert (waiting.phase, waiting.reason, waiting.ends_at) == (JobPhase.WAITING, "Resources", None)
    assert waiting.limit_s == float("inf")
    assert not waiting.had_node
    assert JobMark.parse_comment(str(MARK)) == MARK


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("PENDING", JobPhase.WAITING),
        ("REQUEUE_HOLD", JobPhase.WAITING),
        ("CONFIGURING", JobPhase.THERE),
        ("RUNNING", JobPhase.THERE),
        ("SUSPENDED", JobPhase.THERE),
        ("COMPLETING", JobPhase.COMPLETING),
        ("PREEMPTED", JobPhase.ENDED),
        ("NODE_FAIL", JobPhase.ENDED),
    ],
)
def test_a_state_has_a_phase(state: str, phase: JobPhase) -> None:
    assert job(state=state).phase is phase


def test_the_ends_of_a_job_are_told_apart() -> None:
    states = ["CANCELLED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "FAILED", "COMPLETED", "OUT_OF_MEMORY", "DEADLINE"]
    texts = [describe_end(job(state=state)) for state in states]
    assert len(set(texts)) == len(states)
    assert describe_end(job(state="NODE_FAIL")) == "its node failed (Slurm job 7 on n1)"
    # squeue has forgotten it: sacct knows why, or does not know yet that it is over
    assert describe_end(job(), "PREEMPTED") == "its job was preempted for another one (Slurm job 7 on n1)"
    assert "accounting does not say why" in describe_end(job(), "RUNNING")
    assert "accounting does not say why" in describe_end(job(), "")


def test_accounting_has_a_state_for_each_job() -> None:
    text = "7|CANCELLED by 1000\n8|TIMEOUT\n9|\n7.batch|CANCELLED\n"
    assert parse_accounting(text) == {7: "CANCELLED", 8: "TIMEOUT"}


def test_of_two_jobs_with_one_slot_the_later_is_too_many() -> None:
    twin, other = job(id=9), job(id=10, mark=replace(MARK, slot=3))
    assert find_duplicates([job(), twin, other]) == [twin]
    assert find_duplicates([job(state="CANCELLED"), twin]) == []


@pytest.mark.parametrize(
    ("changes", "now", "deadline"),
    [
        ({}, 4000.0, None),
        ({}, 4500.0, 4600.0),  # its time limit is near
        ({"ends_at": 2030.0}, 2000.0, 2030.0),  # Slurm has moved its end: the grace time of a preemption
        ({"ends_at": 3000.0}, 2000.0, 3000.0),
        ({"ends_at": 32_000_000.0, "limit_s": float("inf")}, 2000.0, 32_000_000.0),
        ({"ends_at": None, "limit_s": float("inf")}, 2000.0, None),
        ({"state": "COMPLETING", "ends_at": 2000.0}, 2000.0, None),
    ],
)
def test_a_notice_is_an_end_that_is_near_or_was_moved(
    changes: dict[str, object], now: float, deadline: float | None
) -> None:
    assert find_notice(job(**changes), now, 180.0) == deadline


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Resources", RefusalKind.CAPACITY),
        ("Priority", RefusalKind.CAPACITY),
        ("QOSMaxJobsPerUserLimit", RefusalKind.QUOTA),
        ("AssocGrpGRES", RefusalKind.QUOTA),
        ("BadConstraints", RefusalKind.FAILED),
    ],
)
def test_a_job_that_waits_for_too_long_is_refused_with_slurms_reason(reason: str, kind: RefusalKind) -> None:
    waiting = job(state="PENDING", reason=reason, started_at=None, ends_at=None)
    refusal = make_pending_refusal([waiting], 60.0)
    assert refusal.kind is kind
    assert reason in refusal.reason
    assert is_refused(waiting, 960.0, 60.0)
    assert is_refused(waiting, 950.0, 60.0) == (kind is RefusalKind.FAILED)
    assert not is_refused(job(), 960.0, 60.0)


def test_a_job_that_slurm_has_not_looked_at_waits_for_no_reason_yet() -> None:
    waiting = job(state="PENDING", reason="None", started_at=None, ends_at=None)
    refusal = make_pending_refusal([waiting], 60.0)
    assert refusal.kind is RefusalKind.CAPACITY
    assert refusal.reason == "Slurm has not started a job within 60 s (no reason given yet)"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Requested node configuration is not available", RefusalKind.FAILED),
        ("Invalid partition name specified", RefusalKind.FAILED),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", RefusalKind.QUOTA),
        ("Slurm temporarily unable to accept job, sleeping and retrying", RefusalKind.THROTTLED),
        ("Requested nodes are busy", RefusalKind.CAPACITY),
        ("", RefusalKind.FAILED),
    ],
)
def test_what_sbatch_says_is_a_kind_of_refusal(text: str, kind: RefusalKind) -> None:
    refusal = parse_submission_error(f"sbatch: error: Batch job submission failed: {text}\n" if text else "")
    assert refusal is not None
    assert refusal.kind is kind
    assert text in refusal.reason


def test_a_controller_that_cannot_be_reached_refuses_nothing() -> None:
    text = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    assert parse_submission_error(text) is None


# ---------------------------------------------------------------- the job


def test_the_token_is_in_the_script_and_in_no_option() -> None:
    settings = SlurmSettings(partition="spot", gpus=4, time_limit="1-00:00:00", sbatch_options=("--reservation=ml",))
    options = make_sbatch_options(settings, MARK, Path("/logs"))
    assert not any(TOKEN in option for option in options)
    assert {"--no-requeue", "--signal=B:USR1@180", "--gres=gpu:4", "--partition=spot", "--time=1-00:00:00"} <= {
        *options
    }
    assert f"--comment={MARK}" in options
    assert options[-1] == "--reservation=ml"
    script = render_script(ORIGIN, settings, MARK.vm_id, TOKEN)
    command = next(line for line in script.splitlines() if "varuna_agent.main" in line)
    assert script.count(TOKEN) == 1
    assert TOKEN not in command
    assert f"--join-token-file=/tmp/{MARK.vm_id}/join-token" in command
    assert "--notices=slurm" in command


AGENT = """
cat "$4" > {folder}/token; stat -c %a "$4" > {folder}/mode; env > {folder}/env
trap 'echo told >> {folder}/signals' USR1
echo $$ > {folder}/pid.part; mv {folder}/pid.part {folder}/pid
while [ ! -e {folder}/signals ]; do sleep 0.02; done
exit 3
"""


def run_script(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """With an agent that notes what it gets, waits for the signal, and then fails."""
    agent = folder / "agent.sh"
    agent.write_text(
        'for each; do case "$each" in --join-token-file=*) file=${each#*=};; esac; done\nset -- 1 2 3 "$file"'
    )
    agent.write_text(agent.read_text() + AGENT.format(folder=folder))
    scratch = folder / "scratch"
    scratch.mkdir()
    settings = SlurmSettings(
        agent_command=("/bin/bash", str(agent)), scratch_dir=str(scratch), before_agent="export X=1"
    )
    script = folder / "script"
    script.write_text(render_script(ORIGIN, settings, MARK.vm_id, TOKEN))
    given = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_CONF": "/etc/slurm.conf"}
    return subprocess.Popen(["/bin/bash", str(script)], env={**given, **environment}, stderr=subprocess.PIPE)


def catches(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.processes
def test_the_script_keeps_the_token_private_passes_the_signal_on_and_cleans_up(tmp_path: Path) -> None:
    running = run_script(tmp_path, {})
    wait_until((tmp_path / "pid").exists, "the agent")
    wait_until(lambda: catches(running.pid, signal.SIGUSR1), "the script's trap")
    running.send_signal(signal.SIGUSR1)  # as Slurm sends it, to the batch script alone
    _, errors = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 3, errors
    assert (tmp_path / "token").read_text().strip() == TOKEN
    assert (tmp_path / "mode").read_text().strip() == "600"
    environment = (tmp_path / "env").read_text()
    assert "VARUNA_SLURM_JOB=12\n" in environment
    assert "X=1\n" in environment
    assert "SLURM_CONF=" in environment
    assert "SLURM_PROCID" not in environment
    assert TOKEN not in environment
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.processes
def test_a_job_that_was_requeued_starts_no_agent(tmp_path: Path) -> None:
    running = run_script(tmp_path, {"SLURM_RESTART_COUNT": "1"})
    _, errors = running.communicate()
    assert running.returncode == 1
    assert b"requeued" in errors
    assert not (tmp_path / "token").exists()


def test_the_tools_get_neither_the_managers_secrets_nor_its_own_job() -> None:
    given = {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_JOB_ID": "3", "SBATCH_PARTITION": "x", "PGPASSWORD": "secret"}
    assert make_tool_environment({**given, "HF_HOME": "/hf"}, ["HF_HOME"]) == {
        "PATH": "/bin",
        "SLURM_CONF": "/c",
        "HF_HOME": "/hf",
        "SLURM_TIME_FORMAT": "%s",
    }


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0),
        ("2:30", 150.0),
        ("1:00:00", 3600.0),
        ("1-0", 86_400.0),
        ("1-2:30", 95_400.0),
        ("2-00:00:01", 172_801.0),
        ("UNLIMITED", float("inf")),
    ],
)
def test_a_time_limit_is_read_as_slurm_does(text: str, seconds: float) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"time_limit": "soon"}, "time_limit 'soon': expected Slurm's format"),
        ({"time_limit": "3"}, "time_limit '3': its VMs would leave at once"),
        ({"partition": "two words"}, "partition 'two words': expected a word"),
        ({"sbatch_options": ["--requeue"]}, "'--requeue': expected --NAME=VALUE of an option that varuna does not set"),
        ({"sbatch_options": ["-p spot"]}, "'-p spot': expected --NAME=VALUE"),
        ({"fleet": "A fleet"}, "fleet 'A fleet'"),
        ({"scratch_dir": "here"}, "scratch_dir 'here'"),
    ],
)
def test_wrong_settings_are_refused_with_the_field_and_the_value(
    tmp_path: Path, document: dict[str, object], message: str
) -> None:
    path = tmp_path / "slurm.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError) as raised:
        read_slurm_settings(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_fleet_on_cpus_asks_for_no_gpus() -> None:
    assert SlurmSettings(device="cpu").generic_resources is None
    assert SlurmSettings(device="cpu", gres="gpu:1").generic_resources == "gpu:1"
    assert SlurmSettings(gres="gpu:a100:8", gpus=8).generic_resources == "gpu:a100:8"
