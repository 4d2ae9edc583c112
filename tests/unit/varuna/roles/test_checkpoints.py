"""What a process keeps of its checkpoints when it goes on in another generation."""

from __future__ import annotations

from tiny_language_model import TinyLanguageModel, get_batch
from training_roles import training_role
from varuna import Varuna


def test_the_time_of_the_newest_save_outlives_its_generation() -> None:
    role = training_role(Varuna(TinyLanguageModel(), get_batch_fn=get_batch(4)))
    before = role.checkpoints.checkpointing.automatic
    role.checkpoints.follow_ranks(role.assembly.everyone, role._parts.model_map)
    after = role.checkpoints.checkpointing.automatic
    assert after is not before
    assert after._last_save_s == before._last_save_s
