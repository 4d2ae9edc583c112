"""A checkpoint that the script asked for and one rank cannot write raises on all ranks, or ends the script badly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_gpt import Task
from training_world import World, Zygote
from varuna.checkpoint import newest_complete

SCRIPT = Path(__file__).with_name("failing_saves_script.py")


@pytest.mark.parametrize(("p", "d", "fails"), [(2, 1, 1), (1, 2, 0)])
def test_a_failed_save_is_known_to_all_ranks(zygote: Zygote, tmp_path: Path, p: int, d: int, fails: int) -> None:
    store = str(tmp_path / "store")
    wanted = {"url": store, "fails": fails, "ends_badly": True}
    with World(zygote, tmp_path, Task(), p, d, wanted=wanted, script=SCRIPT) as world:
        codes = world.exit_codes()
        log = world.logs()
    raised = [json.loads((world.out / f"rank{rank}.json").read_text()) for rank in range(p * d)]
    for texts in raised:
        assert [bool(text) for text in texts] == [True, False, False, True, False], log
        for text in (texts[0], texts[3]):
            assert "was not saved in" in text
            assert "callbacks/callback is a builtins.builtin_function_or_method" in text
    assert newest_complete(store) == 2
    assert codes[0] == 1, "rank 0 knows of every failure, and the script is over without a word of it"
    assert codes[fails] == 1
    assert log.count("CheckpointError: the checkpoint of step 3 was not saved") == codes.count(1)


def test_a_script_whose_saves_are_well_in_the_end_ends_well(zygote: Zygote, tmp_path: Path) -> None:
    wanted = {"url": str(tmp_path / "store"), "fails": 0, "ends_badly": False}
    with World(zygote, tmp_path, Task(), 1, 1, wanted=wanted, script=SCRIPT) as world:
        assert world.exit_codes() == [0], world.logs()
