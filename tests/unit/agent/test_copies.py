"""The folder for copies of checkpoints: what is not the agent's stays, whatever its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from varuna_agent.errors import CopiesError
from varuna_agent.folders.checkpoint_copies import FOLDER, MARK, CheckpointCopies


@contextmanager
def opened(base: Path) -> Iterator[CheckpointCopies]:
    copies = CheckpointCopies.open_folder(base)
    try:
        yield copies
    finally:
        copies.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_other_jobs_copies_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "home" / "ann").mkdir(parents=True)
    with opened(tmp_path) as copies:
        for job in ("one", "two", "three"):
            (copies.folder / job / "varuna_ckpt_1").mkdir(parents=True)
        copies.discard_other_jobs({"two"})
        assert names(copies.folder) == [MARK, "two"]
    with opened(tmp_path) as copies:  # the next agent takes them over
        copies.discard_other_jobs(())
        assert names(copies.folder) == [MARK]
    assert names(tmp_path) == ["home", FOLDER]


def test_a_folder_of_that_name_that_no_agent_has_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "data-set").mkdir(parents=True)
    with pytest.raises(CopiesError, match="was not made by a Varuna agent: move it away"):
        CheckpointCopies.open_folder(tmp_path)
    assert names(tmp_path / FOLDER) == ["data-set"]


@pytest.mark.long
def test_an_agent_that_was_killed_while_it_made_its_folder_makes_it_the_next_time(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    with opened(tmp_path) as copies:
        assert names(copies.folder) == [MARK]


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    """As anybody can make one in /dev/shm."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / MARK).touch()
    shared = tmp_path / "shm"
    shared.mkdir()
    (shared / FOLDER).symlink_to(elsewhere)
    with pytest.raises(CopiesError, match="is not a folder of the agent's user"):
        CheckpointCopies.open_folder(shared)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can give a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / MARK).touch()
    os.chown(tmp_path / FOLDER, 65534, 65534)
    with pytest.raises(CopiesError, match="is not a folder of the agent's user"):
        CheckpointCopies.open_folder(tmp_path)


def test_nothing_is_deleted_when_the_folder_is_not_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as copies:
        (copies.folder / "one").mkdir()
        (copies.folder / MARK).unlink()
        copies.discard_other_jobs(())
        assert names(copies.folder) == ["one"]
        assert "copies of checkpoints cannot be deleted" in capsys.readouterr().out


def test_two_agents_do_not_delete_each_others_copies(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(CopiesError, match="another agent keeps its copies there"):
        CheckpointCopies.open_folder(tmp_path)
    with opened(tmp_path):
        pass
