"""Fitting finds the hardware entry behind the observations, invents nothing beyond them, and ignores odd ones."""

from __future__ import annotations

import json

import pytest

from repository import ROOT
from varuna_planner.fitting.fitting import Fit, fit, predict_observation_s
from varuna_planner.fitting.observations import RateObservation, parse_observations
from varuna_planner.hardware.table import GpuSpec, NetworkSpec, built_in
from varuna_planner.profile.synthesis import synthesise

TABLE_7 = ROOT / "examples" / "planning" / "observations-table7.json"
SHAPES = ((9, 2, 4), (18, 1, 4), (6, 3, 2), (3, 6, 4), (27, 1, 2), (2, 4, 8))


def row(p: int, d: int, m: int, minibatch_s: float = 1.0, **more: object) -> RateObservation:
    model = {"model": "gpt2", "layers": 54, "hidden": 1920, "seq": 1024, "global_batch": 512}
    return RateObservation.model_validate(
        {**model, "p": p, "d": d, "micro_batch": m, "minibatch_s": minibatch_s, **more}
    )


def observed(gpu: GpuSpec, network: NetworkSpec) -> list[RateObservation]:
    """Rows as a cluster with these entries would give them."""
    rows = [row(*shape) for shape in SHAPES]
    return [
        one.model_copy(update={"minibatch_s": predict_observation_s(one, gpu, network, built_in())}) for one in rows
    ]


def v100(**factors: float) -> GpuSpec:
    gpu = built_in().find_gpu("v100-16gb")
    return gpu.model_copy(update={name: getattr(gpu, name) * factor for name, factor in factors.items()})


def ethernet(**factors: float) -> NetworkSpec:
    network = built_in().find_network("ethernet-10g")
    return network.model_copy(update={name: getattr(network, name) * factor for name, factor in factors.items()})


def fitted(rows: list[RateObservation]) -> Fit:
    return fit(rows, built_in(), gpu="v100-16gb", network="ethernet-10g")


@pytest.mark.long
def test_the_table_itself_is_left_as_it_is() -> None:
    found = fitted(observed(v100(), ethernet()))
    assert all(scale.factor == pytest.approx(1, abs=0.02) for scale in found.scales)
    assert max(found.errors) < 0.001


@pytest.mark.long
def test_a_slower_gpu_and_network_are_found_from_their_times() -> None:
    gpu = v100(compute_efficiency=0.7, head_efficiency=0.7)
    network = ethernet(bandwidth_efficiency=0.3, all_reduce_efficiency=0.3)
    found = fitted(observed(gpu, network))
    factors = {scale.name: scale.factor for scale in found.scales}
    assert factors["compute_efficiency"] == pytest.approx(0.7, rel=0.03)
    assert factors["bandwidth"] == pytest.approx(0.3, rel=0.15)
    assert max(found.errors) < 0.01
    assert max(found.left_out_errors) < 0.05
    # The document has what was fitted; everything else is unchanged.
    entry = found.hardware.find_gpu("v100-16gb")
    assert entry.compute_efficiency == pytest.approx(gpu.compute_efficiency, rel=0.03)
    assert found.hardware.find_gpu("t4") == built_in().find_gpu("t4")


def test_what_the_rows_do_not_tell_keeps_its_prior_and_says_so() -> None:
    found = fitted([row(1, 1, 1, 300.0)])  # one stage, one replica: no message is ever sent
    scales = {scale.name: scale for scale in found.scales}
    for name in ("latency", "bandwidth", "jitter"):
        assert scales[name].factor == pytest.approx(1, abs=0.02)
        assert scales[name].verdict.startswith("next to nothing")
    assert scales["compute_efficiency"].verdict != scales["jitter"].verdict
    assert found.left_out_errors == ()
    assert "nothing shows" in found.confidence


@pytest.mark.long
def test_one_row_that_went_wrong_does_not_decide() -> None:
    rows = observed(v100(), ethernet())
    rows[2] = rows[2].model_copy(update={"minibatch_s": rows[2].minibatch_s * 2})
    found = fitted(rows)
    others = [abs(one.error) for index, one in enumerate(found.observations) if index != 2]
    assert max(others) < 0.05
    assert found.observations[2].error < -0.4


@pytest.mark.long
def test_intervals_hold_the_factor_and_narrow_with_what_is_learned() -> None:
    for scale in fitted(observed(v100(), ethernet())).scales:
        low, high = scale.interval
        assert low < scale.factor < high
        assert 0 <= scale.learned <= 1


def test_a_measured_profile_stands_in_the_place_of_the_model() -> None:
    profile = synthesise(row(1, 1, 1).model_shape(), built_in(), "a100-80gb", "ethernet-10g")
    text = json.dumps([{"profile": "P.json", "p": 4, "d": 2, "micro_batch": 4, "global_batch": 512, "minibatch_s": 9}])
    (one,) = parse_observations(text, {"P.json": profile.to_json()}.__getitem__)
    fast = predict_observation_s(one, v100(), ethernet(), built_in())
    # Its compute times are as measured, whatever GPU is fitted; the network is the entry's.
    assert predict_observation_s(one, v100(compute_efficiency=0.1), ethernet(), built_in()) == fast
    assert predict_observation_s(one, v100(), ethernet(all_reduce_efficiency=0.1), built_in()) > fast * 1.05


@pytest.mark.slow
@pytest.mark.long
def test_table_7_of_the_paper_is_predicted_from_shapes_alone() -> None:
    found = fitted(list(parse_observations(TABLE_7.read_text(), lambda name: name)))
    assert len(found.errors) == 5
    assert sum(found.errors) / 5 <= 0.04
    assert max(found.errors) <= 0.08
    assert max(found.left_out_errors) <= 0.11


def test_no_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="no observations"):
        fitted([])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "no JSON"),
        ("{}", "expected a JSON list"),
        ('[{"p": 1}]', "row 0: d: Field required"),
        (
            '[{"p": 1, "d": 1, "micro_batch": 1, "global_batch": 1, "minibatch_s": 1, "model": "gpt2"}]',
            'row 0: give "model", "layers", "hidden" and "seq", or a measured "profile"',
        ),
        (
            '[{"p": 2, "d": 2, "micro_batch": 1, "global_batch": 1, "minibatch_s": 1, "profile": "p.json"}]',
            "row 0: 2×2 GPUs and only 1 example",
        ),
        (
            '[{"p": 1, "d": 1, "micro_batch": 1, "global_batch": 1, "minibatch_s": 1, "profile": "p.json"}]',
            "row 0: p.json: profile: sections: Field required",
        ),
    ],
)
def test_bad_observations_are_told_by_row_and_field(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_observations(text, lambda name: "{}")


def test_a_shape_that_cannot_run_is_told_by_row() -> None:
    with pytest.raises(ValueError, match=r"gpt2 54×1920 55×1 m=1: p=55: 54 layers make 1 to 54 stages"):
        fitted([row(55, 1, 1)])
