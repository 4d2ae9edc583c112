"""A checkpoint that the script asked for and one rank cannot write raises on all ranks, or ends the script badly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.checkpoint import newest_complete

SCRIPT = TRAINING_SCRIPTS / "failing_saves_script.py"


@pytest.mark.parametrize(("p", "d", "fails"), [(2, 1, 1), pytest.param(1, 2, 0, marks=pytest.mark.slow)])
def test_a_failed_save_is_known_to_all_ranks(zygote: Zygote, tmp_path: Path, p: int, d: int, fails: int) -> None:
    """A failure that was raised in the script does not make it end badly; one that the script has never seen does."""
    ends_badly = p == 2
    store = str(tmp_path / "store")
    wanted = {"url": store, "fails": fails, "ends_badly": ends_badly}
    with Ranks(zygote, tmp_path, Task(), p, d, wanted=wanted, script=SCRIPT) as world:
        codes = world.exit_codes()
        log = world.logs()
    raised = [json.loads((world.out / f"rank{rank}.json").read_text()) for rank in range(p * d)]
    for texts in raised:
        assert [bool(text) for text in texts] == [True, False, False, True, False], log
        for text in (texts[0], texts[3]):
            assert "was not saved in" in text
            assert "callbacks/callback is a builtins.builtin_function_or_method" in text
    assert newest_complete(store) == 2
    # Rank 0 and the rank that failed know of it.
    assert codes == ([1, 1] if ends_badly else [0, 0])
    assert log.count("CheckpointError: the checkpoint of step 3 was not saved") == codes.count(1)
