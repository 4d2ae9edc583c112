"""The memory that control groups leave to a process."""

from __future__ import annotations

from pathlib import Path

from varuna_proto.group_memory import GroupMemory, read_group_memory


def make_group(folder: Path, limit: str, used: int = 0, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\nactive_file 3\n")


def test_the_group_with_the_least_memory_left_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("9:name=systemd:/\n0::/pod/agent/job\n")
    make_group(root / "pod" / "agent" / "job", "max", 50)
    assert read_group_memory(root, membership) is None, "no group has a limit"
    make_group(root / "pod", "100", 70, cached=20)
    assert read_group_memory(root, membership) == GroupMemory(100, 50), "the kernel gives cached files up"
    make_group(root / "pod" / "agent" / "job", "60", 50)
    assert read_group_memory(root, membership) == GroupMemory(60, 10)
    make_group(root / "pod" / "agent" / "job", "60", 90)
    assert read_group_memory(root, membership) == GroupMemory(60, 0)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    make_group(tmp_path / "cgroup", "100", 30)
    assert read_group_memory(tmp_path / "cgroup", membership) == GroupMemory(100, 70)


def test_other_systems_have_no_groups(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    assert read_group_memory(tmp_path, membership) is None
    for text in ("4:memory:/pod\n", "0::/../../other\n", ""):
        membership.write_text(text)
        assert read_group_memory(tmp_path, membership) is None
