"""Calibration generations one after the other: an earlier measurement on the same hardware is not repeated."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from agent_end import AgentEnd
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_planner.profile.document import Profile
from varuna_proto.v1.worker_pb2 import ProfileDone

SCRIPT = """
    import os
    import torch
    from torch import nn
    from varuna import CutPoint, Varuna

    class Small(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(4, width), CutPoint(), nn.Linear(width, 1)

        def forward(self, x):
            return self.second(self.cut(self.first(x))).square().mean()

    def get_batch(size, device=None):
        return {"x": torch.ones(size, 4)}

    anew = os.environ.get("ANEW") == "1"
    model = Varuna(Small(int(os.environ["WIDTH"])), get_batch_fn=get_batch, from_cache=not anew)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.mark.slow
def test_what_was_measured_before_is_not_measured_again(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "calibrate.py"
    script.write_text(dedent(SCRIPT))
    cache = tmp_path / "profiles"
    generation = 0

    def calibrate(ranks: int = 1, *, global_batch: int = 2, width: int = 4, anew: bool = False) -> ProfileDone:
        nonlocal generation
        generation += 1
        environ = {
            "VARUNA_MODE": "calibrate",
            "VARUNA_PROFILE_CACHE_URL": cache.as_uri(),
            "WIDTH": str(width),
            "ANEW": str(int(anew)),
        }
        task = Task(global_batch=global_batch)
        with (
            AgentEnd() as agent,
            Ranks(
                zygote,
                tmp_path,
                task,
                1,
                ranks,
                generation=generation,
                agent_socket=lambda rank: "" if rank else agent.path,
                script=script,
                environ=environ,
            ) as world,
        ):
            assert world.exit_codes() == [0] * ranks, world.logs()
            done = agent.wait_for(lambda message: message.HasField("profile_done")).profile_done
        assert Profile.from_json(done.profile_json)
        return done

    measured = calibrate()
    assert not measured.from_cache
    [kept] = cache.glob("*.json")
    assert kept.read_text() == measured.profile_json
    assert calibrate() == ProfileDone(profile_json=measured.profile_json, from_cache=True)

    two_ranks = calibrate(2)
    assert not two_ranks.from_cache, "one rank measured no links"
    assert calibrate() == ProfileDone(profile_json=two_ranks.profile_json, from_cache=True)
    assert calibrate(2).from_cache

    larger_batch = calibrate(global_batch=5)
    assert not larger_batch.from_cache, "micro-batches of 4 were not measured"
    assert Profile.from_json(larger_batch.profile_json).micro_batches == (1, 2, 4)
    assert calibrate(2, global_batch=5).from_cache, "the links between two ranks are still known"
    assert not calibrate(width=5).from_cache
    assert len(list(cache.glob("*.json"))) == 2

    again = calibrate(anew=True)
    assert not again.from_cache
    assert kept.read_text() == again.profile_json

    kept.write_text('{"schema": "varuna.profile/0"}')
    assert not calibrate().from_cache
    assert calibrate().from_cache
