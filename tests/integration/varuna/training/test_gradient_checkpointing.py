"""Activation checkpointing in the user's model: gradients stay those of one process, and equal on all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import gradient_checkpointing_script as script
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.data import replica_indices

WAYS = ("sequential 2", "sequential 4", "each", "plain", "sequential 3 without dropout")
SCRIPT = Path(script.__file__)

Gradients = list[dict[str, Tensor]]
"""By step: by parameter."""


def started(zygote: Zygote, folder: Path, p: int, d: int, ways: tuple[str, ...], recompute: bool = False) -> Ranks:
    task = Task(global_batch=script.GLOBAL_BATCH)
    mask = (True,) * (p - 1) + (False,) if recompute else ()
    return Ranks(zygote, folder, task, p, d, recompute=mask, wanted={"ways": ways}, script=SCRIPT)


def gathered(world: Ranks) -> Gradients:
    """Of all stages. Where several ranks hold a parameter, its gradients must be equal to the last bit."""
    codes = world.exit_codes()
    assert codes == [0] * (world.p * world.d), world.logs()
    merged: Gradients = []
    for rank in range(world.p * world.d):
        for step, gradients in enumerate(torch.load(world.out / f"gradients{rank}.pt")):
            if rank == 0:
                merged.append({})
            for name, gradient in gradients.items():
                first = merged[step].setdefault(name, gradient)
                assert torch.equal(first, gradient), f"rank {rank}, {name}, step {step}"
    return merged


def test_checkpointed_gradients_are_those_of_one_process_on_all_ranks(zygote: Zygote, tmp_path: Path) -> None:
    """Checkpointed parts of several sections: whole in a stage of data-parallel replicas, and cut by a stage's ends."""
    plain = ("plain",) * (len(WAYS) - 1) + ("plain without dropout",)
    ways = (*WAYS, "reentrant 4")
    with (
        started(zygote, tmp_path / "plain", 1, 1, (*plain, "plain")) as alone,
        started(zygote, tmp_path / "replicas", 1, 2, ways) as replicas,
        started(zygote, tmp_path / "stages", 3, 1, WAYS, recompute=True) as stages,
    ):
        expected = gathered(alone)
        for world in (replicas, stages):
            for way, found, wanted in zip(ways, gathered(world), expected, strict=False):
                assert found.keys() == wanted.keys()
                for name, gradient in found.items():
                    torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=f"{way}: {name}")
    _is_of_the_whole_batch(expected, plain.index("plain without dropout"))


def _is_of_the_whole_batch(expected: Gradients, step: int) -> None:
    """The gradients of plain PyTorch on the whole global batch."""
    samples = script.examples()
    indices = replica_indices(
        step + 1,
        dataset_size=len(samples),
        global_batch=script.GLOBAL_BATCH,
        micro_batch=script.GLOBAL_BATCH,
        replica=0,
        replicas=1,
        seed=script.SEED,
    )
    model = script.make_model()
    before = script.Net.dropout
    script.Net.dropout = 0.0
    try:
        model(**torch.utils.data.default_collate([samples[index] for index in indices])).backward()
    finally:
        script.Net.dropout = before
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(expected[step][name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_stage_that_ends_in_a_reentrant_checkpoint_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    """Its gradients would be missing silently."""
    with started(zygote, tmp_path, 2, 1, ("reentrant 2",)) as world:
        assert world.ends()[0]["code"] != 0
        assert "in a reentrant checkpoint: use torch.utils.checkpoint with use_reentrant=False" in world.logs()
