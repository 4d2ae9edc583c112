"""When a profile that was measured before will do, and for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna import CutPoint
from varuna.calibration.clock import ComputeClock
from varuna.calibration.fleet_network import device_name
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.profile_cache import CalibratedRank, KeptProfile, ProfileCache, find_misfit, make_fingerprint
from varuna.calibration.subject import CalibrationSubject
from varuna.optim.precision import TrainingPrecision
from varuna.partition import trace
from varuna_planner.profile.document import GpuTypeSpeeds, Measurement, Profile, SectionProfile

CPU = torch.device("cpu")


class Heads(nn.Module):
    """Two sections; `heads` shows in no parameter."""

    def __init__(self, width: int = 4, heads: int = 2, *, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.cut, self.second = nn.Linear(4, width), CutPoint(), nn.Linear(width, 1)
        self.heads = heads
        self.second.bias.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.cut(self.first(x))).square().mean()
        return result


def get_batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.ones(size, 4)}


def print_of(
    model: nn.Module,
    make_optimizer: Any = torch.optim.Adam,
    dtype: torch.dtype = torch.float32,
    hardware: tuple[str, ...] = ("cpu",),
    gpu_type: str = "",
    **optimizer_options: Any,
) -> str:
    optimizer = make_optimizer(model.parameters(), lr=0.1, **optimizer_options)
    subject = CalibrationSubject(model, trace(model, get_batch(2)), get_batch, CPU, TrainingPrecision(dtype, "cpu"))
    return make_fingerprint(subject, OptimizerSetup(optimizer), hardware, gpu_type)


def test_what_the_model_costs_makes_its_fingerprint_and_nothing_else() -> None:
    base = print_of(Heads())
    assert len(base) == 64
    assert print_of(Heads()) == base, "other values of the parameters cost the same"
    assert print_of(Heads(), hardware=("cpu", "cpu")) == base
    others = [
        print_of(Heads(width=5)),
        print_of(Heads(heads=3)),
        print_of(Heads(frozen=True)),
        print_of(Heads(), torch.optim.SGD),
        print_of(Heads(), amsgrad=True),
        print_of(Heads(), dtype=torch.bfloat16),
        print_of(Heads(), hardware=("cpu", "another")),
        print_of(Heads(), gpu_type="V100"),
    ]
    assert len({base, *others}) == len(others) + 1


NAMES = ["0", "1"]


def profile(hosts: str, *, ranks: int, global_batch: int = 4, largest: int = 4) -> Profile:
    costs = {"forward_us": 1, "backward_us": 2, "recompute_us": 1}
    costs |= {"output_bytes": 1, "input_bytes": 1, "activation_bytes": 1}
    measured = tuple(Measurement(micro_batch=m, **costs) for m in (1, 2, 4, 8) if m <= largest)
    state = {"parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 1}
    return Profile(
        environment={"ranks": str(ranks), "hosts": hosts, "global_batch": str(global_batch)},
        sections=tuple(
            SectionProfile(index=i, name=name, measurements=measured, **state) for i, name in enumerate(NAMES)
        ),
    )


def on(*hosts: str) -> list[CalibratedRank]:
    return [CalibratedRank(host) for host in hosts]


def test_a_profile_does_for_its_fleet_and_for_a_smaller_one() -> None:
    assert find_misfit(profile("a,b", ranks=4), NAMES, on("c", "c", "d", "d"), 4) is None
    assert find_misfit(profile("a,b", ranks=4), NAMES, on("c"), 4) is None
    assert find_misfit(profile(",".join(map(str, range(32))), ranks=32), NAMES, on(*map(str, range(900))), 4) is None
    assert find_misfit(profile("a", ranks=1), NAMES, on("a"), 2) is None


@pytest.mark.parametrize(
    ("known", "names", "hosts", "global_batch", "reason"),
    [
        (profile("a", ranks=1), ["0"], ["a"], 4, "this profile has 2 sections and the model has 1"),
        (profile("a", ranks=1), ["0", "x"], ["a"], 4, "section 1 is '1' in this profile and 'x' in the model"),
        (profile("a", ranks=1), NAMES, ["a", "a"], 4, "on 1 ranks, and there are 2"),
        (profile("a", ranks=2), NAMES, ["a", "b"], 4, "on one machine"),
        (profile("a,b", ranks=2), NAMES, ["a", "a"], 4, "one rank on each machine"),
        (profile("a", ranks=1), NAMES, ["a"], 8, "a global batch of 4, and this one is 8"),
    ],
)
def test_what_was_not_measured_is_told(
    known: Profile, names: list[str], hosts: list[str], global_batch: int, reason: str
) -> None:
    misfit = find_misfit(known, names, on(*hosts), global_batch)
    assert misfit is not None
    assert reason in misfit


def test_a_profile_that_lacks_a_type_of_the_fleet_is_not_enough() -> None:
    speeds = GpuTypeSpeeds(gpu_type="A100", section_speeds=(2.0, 2.0))
    known = profile("a,b", ranks=4).model_copy(update={"gpu_type": "V100", "other_gpu_types": (speeds,)})

    def misfit(*types: str) -> str | None:
        fleet = [CalibratedRank("ab"[number % 2], gpu_type=gpu_type) for number, gpu_type in enumerate(types)]
        return find_misfit(known, NAMES, fleet, 4)

    assert misfit("V100", "V100", "A100", "") is None
    assert misfit("A100", "A100") is None, "a type that is not there now does no harm"
    assert misfit("V100", "K80", "V100", "B200") == "it was measured without GPUs of type B200, K80"


def test_a_profile_of_one_zone_is_not_enough_for_neighbours_in_two() -> None:
    def misfit(known: Profile, *zones: str) -> str | None:
        fleet = [CalibratedRank("ab"[number % 2], zone=zone) for number, zone in enumerate(zones)]
        return find_misfit(known, NAMES, fleet, 4)

    known = profile("a,b", ranks=4)
    assert misfit(known, "north", "north", "north") is None
    assert misfit(known, "north", "", "south") is None, "no two neighbours are known to be in different zones"
    assert misfit(known, "north", "north", "south") == "it was measured in one zone, and there are several"
    between = known.links.model_copy(update={"other_zone": known.links.other_vm})
    assert misfit(known.model_copy(update={"links": between}), "north", "south") is None


def test_sizes_that_did_not_pay_are_not_measured_for_a_larger_batch() -> None:
    assert find_misfit(profile("a", ranks=1, global_batch=64), NAMES, on("a"), 512) is None


def test_a_document_that_does_not_say_where_it_is_from_is_not_enough() -> None:
    unknown = profile("a", ranks=1).model_copy(update={"environment": {}})
    assert find_misfit(unknown, NAMES, on("a"), 4) == "it does not name the fleet that it was measured on"


def test_the_cache_gives_what_it_was_given_and_never_fails(tmp_path: Path) -> None:
    known = profile("a", ranks=1)
    cache = ProfileCache(str(tmp_path / "profiles"))
    assert cache.find_profile("key") is None
    cache.put_profile("key", known)
    assert cache.find_profile("key") == known
    (tmp_path / "profiles" / "key.json").write_text("{}")
    assert cache.find_profile("key") is None
    for url in (str(tmp_path / "profiles" / "key.json"), "nonsense://x"):
        broken = ProfileCache(url)
        assert broken.find_profile("key") is None
        broken.put_profile("key", known)


def test_the_profile_beside_the_checkpoints_is_taken_for_what_it_was_measured_for(tmp_path: Path) -> None:
    known, kept = profile("a", ranks=1), KeptProfile(str(tmp_path))
    assert kept.find_profile("key") is None
    kept.put_profile("key", known)
    found = kept.find_profile("key")
    assert found is not None
    assert (found.sections, kept.find_profile("another")) == (known.sections, None)
    assert Profile.from_json((tmp_path / "profile.json").read_text()) == found, "an ordinary profile document"
    (tmp_path / "profile.json").write_text("{}")
    assert kept.find_profile("key") is None
    KeptProfile("nonsense://x").put_profile("key", known)


def test_without_an_optimizer_the_fingerprint_is_one_of_its_own() -> None:
    model = Heads()
    subject = CalibrationSubject(model, trace(model, get_batch(2)), get_batch, CPU, TrainingPrecision(None, "cpu"))
    prints = {
        make_fingerprint(subject, setup, ["cpu"])
        for setup in (
            OptimizerSetup(),
            OptimizerSetup(averaged=True),
            OptimizerSetup(on_device=False),
            OptimizerSetup(torch.optim.Adam(model.parameters())),
        )
    }
    assert len(prints) == 4


def test_an_optimizer_that_is_not_known_yet_keeps_what_adam_does() -> None:
    parameters = list(Heads().parameters())
    costs = OptimizerSetup().measure_costs(CPU, ComputeClock(CPU))
    assert costs.bytes_for(parameters) == 8 * sum(parameter.numel() for parameter in parameters)
    assert costs.us_for(parameters) == 0.0
    averaged = OptimizerSetup(averaged=True).measure_costs(CPU, ComputeClock(CPU))
    assert averaged.bytes_for(parameters) == costs.bytes_for(parameters) * 12 // 8
    assert OptimizerSetup(on_device=False).measure_costs(CPU, ComputeClock(CPU)).bytes_for(parameters) == 0


def test_a_device_is_named_with_its_kind() -> None:
    kind, _, name = device_name(CPU).partition(": ")
    assert kind == "cpu"
    assert name
