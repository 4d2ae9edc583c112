"""What the seeds' API documentation promises: names, order and defaults of arguments, and single-process scripts."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varuna
from varuna import CutPoint, Profiler, Varuna, get_this_rank_config_varuna, get_varuna_config
from waiting import DEADLINE_S


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.cut_points = [CutPoint()]

    def forward(self, x: Tensor, y: Tensor, extra_norm: bool = False) -> Tensor:
        hidden = self.cut_points[0](self.first(x).tanh())
        return F.mse_loss(self.second(F.normalize(hidden) if extra_norm else hidden), y)


def batch(size: int, device: str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, 1, generator=generator)}


@pytest.mark.parametrize(
    ("function", "documented"),
    [
        (
            Varuna.__init__,
            "model, stage_to_rank_map, get_batch_fn, batch_size, chunk_size, fp16=False, local_rank=-1, device=-1, "
            "shared_weights=None, from_cache=True",
        ),
        (
            Varuna.set_optimizer,
            "optimizer, loss_scale='dynamic', init_loss_scale=1048576, min_loss_scale=1.0",
        ),
        (Varuna.step, "inputs, clip_grad_max_norm=None"),
        (Varuna.evaluate, "inputs, batch_size=None"),
        (Varuna.checkpoint, "global_store, step=None, tmpdir=None, shard=False, on_demand=False"),
        (Varuna.load_checkpoint, "global_store, iteration, check_complete=True"),
        (
            Profiler.__init__,
            "model, get_batch, device=-1, gpus_per_node=None, fp16=False, out_folder='profiles', "
            "pstages_to_profile=None, from_cache=True, add_to_existing=False",
        ),
        (
            Profiler.set_optimizer,
            "optimizer, amp_opt_level='O2', loss_scale='dynamic', init_loss_scale=1048576, min_loss_scale=None",
        ),
        (Profiler.profile_all, "microbatch_sizes"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_arguments_come_in_the_documented_order_with_the_documented_defaults(
    function: Callable[..., Any], documented: str
) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    promised = [name.partition("=") for name in documented.split(", ")]
    assert [one.name for one in positional] == [name for name, _, _ in promised]
    # An argument without a default there may have one here, because the launcher knows it.
    defaults = [repr(one.default) for one, (_, equals, _) in zip(positional, promised, strict=True) if equals]
    assert defaults == [default for _, equals, default in promised if equals]


@pytest.mark.processes
def test_everything_can_be_imported_from_varuna_before_there_is_a_process_group() -> None:
    code = (
        "from varuna import CutPoint, Varuna, Profiler, get_varuna_config, get_this_rank_config_varuna\n"
        "import torch, varuna.launcher, varuna.run_varuna\n"
        "assert not torch.distributed.is_initialized()\n"
        "x = torch.ones(2)\n"
        "assert CutPoint()(x) is x and not CutPoint().state_dict()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=DEADLINE_S)
    assert set(varuna.__all__) >= {"CutPoint", "Varuna", "Profiler", "get_varuna_config", "get_this_rank_config_varuna"}


def test_without_a_launcher_there_is_one_stage_and_one_replica() -> None:
    assert get_varuna_config(None) == get_varuna_config() == get_varuna_config("0") == (1, 1)
    assert get_this_rank_config_varuna(None, -1) == get_this_rank_config_varuna() == (0, 0)
    assert get_varuna_config("0,2;1,3") == (2, 2)
    assert get_this_rank_config_varuna("0,2;1,3", 3) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("device", [-1, 0, None, "cpu", torch.device("cpu")])
def test_one_batch_does_for_example_inputs_and_other_arguments_than_tensors_are_passed_on(device: Any) -> None:
    dry_run_input = {**batch(3), "extra_norm": True}
    model = Varuna(Scorer(), None, dry_run_input, 4, 2, False, local_rank=-1, device=device, shared_weights=None)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = {**batch(4), "extra_norm": True}
    expected = Scorer()(**inputs).item()
    loss, overflow, _ = model.step(inputs)
    assert (loss, overflow) == (pytest.approx(expected, rel=1e-6), False)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_the_scripts_own_optimizer_step_does_not_step_twice(scheduler_first: bool) -> None:
    def parameters_after(own_step: bool) -> list[Tensor]:
        model = Varuna(Scorer(), get_batch_fn=batch)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        stepped = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        if not scheduler_first:
            model.set_optimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if scheduler_first:
            model.set_optimizer(optimizer)
        model.set_optimizer(optimizer)  # calling it twice has no further effect
        for _ in range(3):
            _, overflow, _ = model.step(batch(4))
            if own_step and not overflow:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        assert len(stepped) == 3
        assert scheduler.get_last_lr() == [0.1 / 8]
        return list(model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that has not seen the optimizer step warns
        assert all(map(torch.equal, parameters_after(own_step=True), parameters_after(own_step=False)))


@pytest.mark.long
def test_the_profiler_gives_the_parameters_that_an_optimizer_is_made_of(tmp_path: Any) -> None:
    model = Scorer()
    profiler = Profiler(model, batch, device=torch.device("cpu"), out_folder=tmp_path)
    assert dict(profiler.named_parameters()) == dict(model.named_parameters())
    profiler.set_optimizer(torch.optim.SGD(profiler.parameters(), lr=0.1), min_loss_scale=None)
    profile = profiler.profile_all([1])
    assert [section.optimizer_bytes for section in profile.sections] == [0, 0]
    assert profiler.profile_all([2]).micro_batches == (2,)  # once more
