"""Control groups of jobs, on a folder that stands for /sys/fs/cgroup: its files are there before they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from varuna_agent.state import NO_LIMITS, ProcessLimits
from varuna_agent.state.admission import make_worker
from varuna_agent.workers.control_groups import JobGroups, NoGroupsError
from varuna_manager.controllers.messages import _limits
from varuna_manager.domain.spec import VmLimits
from varuna_proto.v1 import agent_pb2 as pb

UNIT = "system.slice/varuna-agent.service"
LIMITS = ProcessLimits(memory_bytes=2**30, cpus=1.5, processes=100)


class CgroupFs:
    """The kernel's folder for a unit with `Delegate=`: a new group's folder has its files at once."""

    def __init__(self, folder: Path, *, controllers: str = "cpuset cpu io memory pids", own: str = UNIT) -> None:
        self.root = folder / "cgroup"
        self.unit = self.root / own
        self.membership = folder / "self-cgroup"
        self.membership.write_text(f"1:name=systemd:/elsewhere\n0::/{own}\n")
        self.make(self.unit, procs="77\n")
        (self.unit / "cgroup.controllers").write_text(controllers)
        (self.root / "cgroup.controllers").write_text(controllers)
        self.make(self.unit / "agent")

    def make(self, group: Path, procs: str = "") -> Path:
        group.mkdir(parents=True, exist_ok=True)
        for name in ("cgroup.subtree_control", "cpu.max", "memory.max", "pids.max", "cgroup.type"):
            (group / name).write_text("")
        (group / "cgroup.procs").write_text(procs)
        return group

    def open(self) -> JobGroups:
        return JobGroups.open_groups(self.root, self.membership, 77)


def test_the_agent_moves_to_a_group_of_its_own_and_hands_on_what_it_can_limit(tmp_path: Path) -> None:
    fs = CgroupFs(tmp_path)
    fs.open()
    assert (fs.unit / "agent" / "cgroup.procs").read_text() == "77"
    assert (fs.unit / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


@pytest.mark.parametrize(
    ("limits", "settings"),
    [
        (LIMITS, ["150000 100000", str(2**30), "100"]),
        (NO_LIMITS, ["max", "max", "32768"]),
        (ProcessLimits(cpus=0.001), ["1000 100000", "max", "32768"]),
        (ProcessLimits(cpus=float("nan")), ["max", "max", "32768"]),
    ],
)
def test_limits_are_written_as_the_kernel_takes_them(
    tmp_path: Path, limits: ProcessLimits, settings: Sequence[str]
) -> None:
    fs = CgroupFs(tmp_path)
    group = fs.make(fs.unit / "job-bert")
    assert fs.open().make_group("bert", limits) == group
    assert [(group / name).read_text() for name in ("cpu.max", "memory.max", "pids.max")] == settings


def test_a_limit_whose_controller_is_not_there_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs = CgroupFs(tmp_path, controllers="pids")
    group = fs.make(fs.unit / "job-bert")
    fs.open().make_group("bert", LIMITS)
    assert [(group / name).read_text() for name in ("cpu.max", "memory.max", "pids.max")] == ["", "", "100"]
    assert "a limit is not set" in capsys.readouterr().out


def test_groups_without_a_process_are_removed_when_their_job_needs_them_no_more(tmp_path: Path) -> None:
    fs = CgroupFs(tmp_path)
    groups = fs.open()
    for name in ("job-over", "job-here", "other"):
        (fs.unit / name).mkdir()
    fs.make(fs.unit / "job-busy")  # its files keep the folder, as its processes do the kernel's
    groups.remove_unused(["here"])
    left = sorted(path.name for path in fs.unit.iterdir() if path.is_dir())
    assert left == ["agent", "job-busy", "job-here", "other"]


def test_kills_at_the_limit_of_memory_are_counted(tmp_path: Path) -> None:
    fs = CgroupFs(tmp_path)
    groups = fs.open()
    assert groups.count_memory_kills("bert") == 0
    group = fs.make(fs.unit / "job-bert")
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 812\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert groups.count_memory_kills("bert") == 2


def without_v2(fs: CgroupFs) -> None:
    (fs.root / "cgroup.controllers").unlink()


def without_controllers(fs: CgroupFs) -> None:
    (fs.unit / "cgroup.controllers").write_text("hugetlb\n")


def with_others(fs: CgroupFs) -> None:
    (fs.unit / "cgroup.procs").write_text("77\n78\n")


def outside(fs: CgroupFs) -> None:
    fs.membership.write_text("0::/../another\n")


def of_v1_alone(fs: CgroupFs) -> None:
    fs.membership.write_text("4:memory:/system.slice\n")


def not_delegated(fs: CgroupFs) -> None:
    (fs.unit / "cgroup.procs").write_text("")  # as it is when the agent has moved
    (fs.unit / "cgroup.subtree_control").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_v2, "is not a cgroup v2"),
        (without_controllers, "controls none of cpu, memory, pids"),
        (with_others, "has other processes"),
        (outside, "names no group"),
        (of_v1_alone, "names no group"),
        (not_delegated, "No such file"),
    ],
)
def test_where_there_is_nothing_to_be_had_the_agent_stays_where_it_is(
    tmp_path: Path, change: object, reason: str
) -> None:
    fs = CgroupFs(tmp_path)
    assert callable(change)
    change(fs)
    with pytest.raises(NoGroupsError, match=reason):
        fs.open()
    if change is not_delegated:
        assert (fs.unit / "cgroup.procs").read_text() == "77", "it has moved back"
    else:
        assert (fs.unit / "agent" / "cgroup.procs").read_text() == ""


def test_the_root_of_all_groups_may_have_other_processes(tmp_path: Path) -> None:
    fs = CgroupFs(tmp_path, own="")
    (fs.unit / "cgroup.type").unlink()
    (fs.unit / "cgroup.procs").write_text("1\n77\n")
    fs.open()
    assert (fs.unit / "agent" / "cgroup.procs").read_text() == "77"


def test_a_worker_has_the_limits_of_its_job_file() -> None:
    limits = _limits(VmLimits(memory_gib=1, cpus=1.5, processes=100))
    assert _limits(VmLimits()) == pb.JobLimits()
    launch = pb.Launch(job_id="job", generation=1, kind=pb.GENERATION_KIND_TRAINING, world_size=1, limits=limits)
    worker = make_worker(launch, pb.WorkerAssignment(), "cpu", reports_steps=True)
    assert worker.start.limits == LIMITS
