"""The BERT example's LAMB, whose norm spans all stages, does in any shape what it does in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bert_lamb_script import BOUND, make_lamb
from repository import TRAINING_SCRIPTS
from small_gpt import Examples, Task, make_model, states_of
from training_world import Ranks, Zygote
from varuna.data import Batches

pytestmark = pytest.mark.slow


SCRIPT = TRAINING_SCRIPTS / "bert_lamb_script.py"
TASK = Task(tied=True, steps=6, learning_rate=0.02)


def train_plainly(task: Task) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[float], list[float]]:
    """With the losses and the gradients' norms of each step."""
    model = make_model(task)
    optimizer = make_lamb(model.named_parameters(), task)
    losses, norms = [], []
    for _, batch in Batches(Examples(), global_batch=task.global_batch, last_step=task.steps, environ={}):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses, norms


@pytest.mark.parametrize(("p", "d"), [(3, 1), (2, 2)])
def test_every_stage_divides_by_the_norm_of_the_whole_models_gradient(
    zygote: Zygote, tmp_path: Path, p: int, d: int
) -> None:
    with Ranks(zygote, tmp_path, TASK, p, d, script=SCRIPT) as world:
        outcome = world.finish()
    model, optimizer, losses, norms = train_plainly(TASK)
    assert min(norms) > BOUND, "the norm matters in every step"
    torch.testing.assert_close(outcome.losses, losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(outcome.norms, norms, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(outcome.parameters, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
    for name, state in states_of(optimizer, model.named_parameters()).items():
        torch.testing.assert_close(outcome.states[name], state, rtol=1e-3, atol=1e-6)
