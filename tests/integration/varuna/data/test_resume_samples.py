"""A run that goes on with another global batch: same samples, none skipped, none seen twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_gpt import Examples, Task, make_model, make_optimizer, make_scheduler
from training_world import Ranks, Zygote
from varuna.checkpoint import SampleCursor, read_manifest
from varuna.data import Batches

TASK = Task(global_batch=10, steps=2)
SEGMENTS = [(10, 2, (2, 1)), (6, 4, (1, 2)), (7, 6, (2, 2))]
"""Global batch, last step, shape."""


def test_each_segment_begins_with_the_first_unseen_sample(zygote: Zygote, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    losses: list[float] = []
    for generation, (global_batch, last, (p, d)) in enumerate(SEGMENTS, start=1):
        task = replace(TASK, global_batch=global_batch, steps=last)
        saving = {"save": {"step": last, "url": url}}
        with Ranks(zygote, tmp_path, task, p, d, generation=generation, checkpoint_url=url, wanted=saving) as world:
            outcome = world.finish()
            warned = "the global batch has changed" in world.logs()
        assert warned == (generation > 1)
        losses += outcome.losses
    assert read_manifest(url, 6).cursor == SampleCursor(samples=2 * 10 + 2 * 6 + 2 * 7, global_batch=7)

    model = make_model(TASK)
    optimizer = make_optimizer(model.parameters(), TASK)
    scheduler = make_scheduler(optimizer)
    stream = Batches(Examples(), global_batch=1, environ={})
    used, expected = 0, []
    for global_batch in (10, 10, 6, 6, 7, 7):
        indices = [index for step in range(used + 1, used + global_batch + 1) for index in stream.indices(step)]
        used += global_batch
        batch = torch.utils.data.default_collate([Examples()[index] for index in indices])
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in model.named_parameters():
        torch.testing.assert_close(outcome.parameters[name], value.detach(), rtol=1e-4, atol=2e-5)
