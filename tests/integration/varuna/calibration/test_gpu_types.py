"""Calibrations whose ranks have several types of GPU, which are processors of one kind that are given more work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from agent_end import AgentEnd
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_planner.profile.document import Profile

SCRIPT = """
    import os
    import time
    import torch
    from torch import nn
    from varuna import CutPoint, Varuna

    SECOND_MS = {"K80": 9.0, "P100": 6.0}.get(os.environ.get("VARUNA_GPU_TYPE", ""), 3.0)

    class Busy(nn.Linear):
        def __init__(self, milliseconds):
            super().__init__(4, 4)
            self.work = [milliseconds]  # no setting of the model, which would be another model on each type

        def forward(self, x):
            end_s = time.thread_time() + self.work[0] / 1e3
            while time.thread_time() < end_s:
                pass
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = Busy(3.0), CutPoint(), Busy(SECOND_MS)

        def forward(self, x):
            return self.second(self.cut(self.first(x))).square().mean()

    def get_batch(size, device=None):
        return {"x": torch.ones(size, 4)}

    model = Varuna(Model(), get_batch_fn=get_batch)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
"""

Calibrate = Callable[..., tuple[Profile, bool]]


@pytest.fixture
def calibrate(zygote: Zygote, tmp_path: Path) -> Calibrate:
    """The profile of a fleet with these types and zones, by rank, and whether it comes from the cache."""
    script = tmp_path / "calibrate.py"
    script.write_text(dedent(SCRIPT))
    environ = {"VARUNA_MODE": "calibrate", "VARUNA_PROFILE_CACHE_URL": (tmp_path / "profiles").as_uri()}
    generations = iter(range(1, 100))

    def run(types: Sequence[str], zones: Sequence[str] = ()) -> tuple[Profile, bool]:
        with (
            AgentEnd() as agent,
            Ranks(
                zygote,
                tmp_path,
                Task(global_batch=2),
                1,
                len(types),
                generation=next(generations),
                agent_socket=lambda rank: "" if rank else agent.path,
                gpu_type=lambda rank: types[rank],
                zone=lambda rank: zones[rank] if zones else "",
                script=script,
                environ=environ,
            ) as world,
        ):
            assert world.exit_codes() == [0] * len(types), world.logs()
            done = agent.wait_for(lambda message: message.HasField("profile_done")).profile_done
        return Profile.from_json(done.profile_json), done.from_cache

    return run


def relative_speed_of_second(profile: Profile) -> dict[str, float]:
    """By type, without what other work on this machine does to all sections of a type."""
    return {other.gpu_type: other.section_speeds[1] / other.section_speeds[0] for other in profile.other_gpu_types}


@pytest.mark.slow
def test_each_type_measures_all_sections_and_earlier_types_are_kept(calibrate: Calibrate) -> None:
    measured, _ = calibrate(["K80", "V100", "V100"])
    assert measured.gpu_type == "V100", "that of most ranks, though not of rank 0"
    assert relative_speed_of_second(measured) == {"K80": pytest.approx(1 / 3, rel=0.3)}
    first, second = (section.measurements[0] for section in measured.sections)
    assert second.forward_us / first.forward_us == pytest.approx(1, rel=0.3)
    assert calibrate(["V100", "V100"]) == (measured, True), "it need not have all types that the profile knows"

    extended, from_cache = calibrate(["V100", "P100"])
    assert not from_cache
    assert extended.gpu_type == "V100", "of as many ranks as the other, and of the lowest"
    assert relative_speed_of_second(extended) == {
        "K80": relative_speed_of_second(measured)["K80"],
        "P100": pytest.approx(1 / 2, rel=0.3),
    }
    assert calibrate(["V100", "K80"]) == (extended, True)
    other, from_cache = calibrate(["K80"])
    assert (other.gpu_type, other.other_gpu_types, from_cache) == ("K80", (), False)


@pytest.mark.slow
def test_ranks_without_a_type_make_the_profile_that_they_always_made(calibrate: Calibrate) -> None:
    measured, _ = calibrate(["", ""])
    assert (measured.gpu_type, measured.other_gpu_types, measured.links.other_zone) == ("", (), None)
    named, from_cache = calibrate(["V100", "V100"])
    assert (named.gpu_type, named.other_gpu_types, from_cache) == ("V100", (), False)
