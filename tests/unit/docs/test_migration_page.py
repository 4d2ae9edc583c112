"""docs/from-other-trainers.md shows the scripts of examples/migrate."""

from __future__ import annotations

from migration_page import FRAMEWORKS, PAGE, SCRIPTS, list_diffs, renew_diffs


def test_the_page_has_the_diff_of_each_pair_of_scripts() -> None:
    page = PAGE.read_text()
    assert list_diffs(page) == list(FRAMEWORKS)
    assert page == renew_diffs(page), "run make docs"


def test_no_script_is_without_its_pair() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - {"task"}
    assert scripts == {f"{framework}_{when}" for framework in FRAMEWORKS for when in ("before", "after")}


def test_three_scripts_come_to_the_same() -> None:
    """Whatever their loop was: only the first line, which says how to submit them, differs."""
    loops = {(SCRIPTS / f"{name}_after.py").read_text().split("\n", 1)[1] for name in ("ddp", "fsdp", "accelerate")}
    assert len(loops) == 1
