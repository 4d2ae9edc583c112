"""A script may change modes and `requires_grad` between steps: then every rank trains as plain PyTorch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from changing_model_script import BATCH, STEPS, Model, change, examples
from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote

SCRIPT = TRAINING_SCRIPTS / "changing_model_script.py"
SHARES = [[0, 6], [6, 10]]
"""For two replicas with micro-batches of two: three of them and two."""


class Plain:
    """Training in one process by the rule for buffers: replicas start from equal ones, and replica 0's are kept."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.losses: list[float] = []

    def step(self, step: int, replicas: int) -> None:
        change(step, self.model, self.model.train, self.model)
        self.optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        kept: dict[str, torch.Tensor] = {}
        total = 0.0
        for first, end in SHARES if replicas == 2 else [[0, BATCH]]:
            self.model.load_state_dict(before, strict=False)
            for start in range(first, end, 2):
                loss = self.model(examples(step)[start : start + 2])
                (loss * 2 / BATCH).backward()
                total += loss.item() * 2 / BATCH
            kept = kept or {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.load_state_dict(kept, strict=False)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(total)


@pytest.mark.parametrize(
    ("through", "offload", "shapes"),
    [
        ("users", False, [(2, 1), (1, 2), (1, 1)]),
        pytest.param("varuna", True, [(2, 2), (2, 1), (1, 2)], marks=pytest.mark.slow),
    ],
)
def test_changes_between_steps_train_as_plain_pytorch_does_in_every_shape(
    through: str, offload: bool, shapes: list[tuple[int, int]], zygote: Zygote, tmp_path: Path
) -> None:
    plain = Plain()
    for generation, (p, d) in enumerate(shapes, start=1):
        steps = range(STEPS // 3 * (generation - 1) + 1, STEPS // 3 * generation + 1)
        for step in steps:
            plain.step(step, d)
        wanted = {
            "steps": steps[-1],
            "p": p,
            "shares": SHARES if d == 2 else [[0, BATCH]],
            "through": through,
            "offload": offload,
        }
        with Ranks(
            zygote,
            tmp_path,
            Task(global_batch=BATCH),
            p,
            d,
            generation=generation,
            recompute=(True,) * (p - 1) + (False,),
            checkpoint_url=str(tmp_path / "store"),
            wanted=wanted,
            script=SCRIPT,
        ) as world:
            codes = world.exit_codes()
            assert codes == [0] * (p * d), world.logs()
            found = [torch.load(world.out / f"rank{rank}.pt") for rank in range(p * d)]
        expected = {**dict(plain.model.named_buffers()), **dict(plain.model.named_parameters())}
        trains = {name: parameter.requires_grad for name, parameter in plain.model.named_parameters()}
        for rank in found:
            assert rank["losses"] == pytest.approx(plain.losses[steps[0] - 1 :], rel=1e-4), f"generation {generation}"
            assert rank["shown"] == trains
            for name, tensor in {**rank["buffers"], **rank["parameters"]}.items():
                torch.testing.assert_close(
                    tensor,
                    expected[name].detach(),
                    rtol=1e-4,
                    atol=1e-5,
                    msg=lambda found, where=f"{name} in generation {generation}": f"{where}: {found}",
                )
