"""Shapes and synthesised profiles: the known figures of published models, and what physics requires."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_planner.hardware.table import built_in
from varuna_planner.profile.document import Profile
from varuna_planner.profile.shapes import ModelFamily, ModelShape, NumberFormat
from varuna_planner.profile.synthesis import synthesise
from varuna_planner.schedule.policies import Policy
from varuna_planner.search.auto_config import choose_plan
from varuna_planner.simulator.prediction import PipelineShape, even_starts, predict_s

GPT_2_5B = ModelShape(family=ModelFamily.GPT2, layers=54, hidden=1920, seq=1024)


def profile(shape: ModelShape = GPT_2_5B, gpu: str = "v100-16gb", network: str = "ethernet-10g") -> Profile:
    return synthesise(shape, built_in(), gpu, network)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (ModelShape(family=ModelFamily.GPT2, layers=12, hidden=768, seq=1024), 0.124),
        (ModelShape(family=ModelFamily.GPT2, layers=48, hidden=1600, seq=1024), 1.558),
        (GPT_2_5B, 2.5),
        (ModelShape(family=ModelFamily.GPT2, layers=72, hidden=3072, seq=1024), 8.3),
        (ModelShape(family=ModelFamily.BERT, layers=24, hidden=1024, seq=512), 0.335),
        (ModelShape(family=ModelFamily.T5, layers=12, hidden=768, seq=512), 0.223),
        (ModelShape(family=ModelFamily.T5, layers=24, hidden=1024, seq=512), 0.738),
        (ModelShape(family=ModelFamily.LLAMA, layers=32, hidden=4096, seq=2048), 6.74),
        (
            ModelShape(family=ModelFamily.LLAMA, layers=80, hidden=8192, seq=4096, heads=64, kv_heads=8, mlp=28672),
            68.98,
        ),
    ],
)
def test_published_models_have_their_published_numbers_of_parameters(shape: ModelShape, billions: float) -> None:
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_a_training_step_takes_six_flops_per_parameter_and_token_and_attention() -> None:
    products = 6 * (GPT_2_5B.parameters - 1024 * 1920) * 1024
    attention = 54 * 12 * 1024**2 * 1920
    assert GPT_2_5B.flops == pytest.approx(products + attention, rel=0.01)


def test_the_activation_that_crosses_a_cut_is_what_the_paper_says() -> None:
    layer = profile().measurements_at(1)[10]
    assert layer.output_bytes == layer.input_bytes == 3.75 * 2**20  # paper, section 3.1: 3.75 MB per example


def test_a_layer_keeps_34_bytes_per_token_and_width() -> None:
    assert profile().measurements_at(1)[10].activation_bytes == pytest.approx(34 * 1024 * 1920, rel=0.01)


def test_scores_that_are_kept_cost_5_bytes_each() -> None:
    kept = ModelShape(family=ModelFamily.GPT2, layers=54, hidden=1920, seq=1024, heads=20, fused_attention=False)
    extra = profile(kept).measurements_at(1)[10].activation_bytes - profile().measurements_at(1)[10].activation_bytes
    assert extra == 5 * 20 * 1024**2


def test_tied_weights_are_shared_by_the_first_and_the_last_section() -> None:
    (shared,) = profile().shared_parameters
    assert shared.sections == (0, 55)
    assert shared.bytes == 50257 * 1920 * 4
    untied = ModelShape(family=ModelFamily.LLAMA, layers=2, hidden=256, seq=64)
    assert profile(untied).shared_parameters == ()


def test_a_decoder_relays_the_encoders_output_over_its_cuts() -> None:
    made = profile(ModelShape(family=ModelFamily.T5, layers=3, hidden=512, seq=128))
    one = 128 * 512 * 2
    assert [section.name for section in made.sections][:5] == [
        "embedding",
        "encoder layer 0",
        "encoder layer 1",
        "encoder layer 2",
        "decoder layer 0",
    ]
    # After the last layer of the decoder nothing uses the encoder's output.
    assert [each.output_bytes for each in made.measurements_at(1)] == [one] * 4 + [2 * one] * 2 + [one, 2]
    assert [each.input_bytes for each in made.measurements_at(1)][1:] == [one] * 4 + [2 * one] * 2 + [one]
    (shared,) = made.shared_parameters
    assert shared.sections == (0, 4, 7)


def test_an_encoder_and_decoder_take_six_flops_per_parameter_and_token_and_three_attentions() -> None:
    shape = ModelShape(family=ModelFamily.T5, layers=12, hidden=768, seq=512)
    products = 6 * shape.parameters * 512  # the embedding's only as the head's
    attention = 3 * 12 * 12 * 512**2 * 768
    assert shape.flops == pytest.approx(products + attention, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 8),
    seq=st.integers(1, 300),
    family=st.sampled_from(ModelFamily),
    precision=st.sampled_from([NumberFormat.FP16, NumberFormat.FP32]),
)
def test_larger_micro_batches_take_longer_but_less_per_example(
    layers: int, heads: int, seq: int, family: ModelFamily, precision: NumberFormat
) -> None:
    shape = ModelShape(
        family=family, layers=layers, hidden=64 * heads, heads=heads, seq=seq, vocab=1000, precision=precision
    )
    for section in profile(shape).sections:
        times = [(m.micro_batch, m.forward_us, m.backward_us) for m in section.measurements]
        for (m, forward, backward), (larger, longer, longer_back) in itertools.pairwise(times):
            assert forward <= longer <= forward * larger / m * (1 + 1e-9)
            assert backward <= longer_back <= backward * larger / m * (1 + 1e-9)
            assert backward >= forward


@pytest.mark.parametrize(
    ("slow", "fast"), [("t4", "v100-16gb"), ("v100-16gb", "a100-40gb"), ("a100-80gb", "h100-80gb")]
)
def test_a_faster_gpu_is_faster_in_every_section(slow: str, fast: str) -> None:
    for before, after in zip(profile(gpu=slow).measurements_at(4), profile(gpu=fast).measurements_at(4), strict=True):
        assert after.forward_us < before.forward_us
        assert after.backward_us < before.backward_us


def test_a_precision_that_the_gpu_does_not_know_is_refused() -> None:
    shape = ModelShape(family=ModelFamily.GPT2, layers=2, hidden=128, seq=64, precision=NumberFormat.BF16)
    with pytest.raises(ValueError, match=r"v100-16gb does not compute in bf16: use one of fp32, fp16"):
        profile(shape)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [({"hidden": 100, "heads": 3}, "heads=3 must divide hidden=100"), ({"layers": 0}, "layers is 0")],
)
def test_a_shape_that_cannot_be_is_refused(fields: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelShape(**{"family": ModelFamily.GPT2, "layers": 2, "hidden": 128, "seq": 64, **fields})


def test_a_synthesised_profile_reads_back_and_can_be_planned_with() -> None:
    made = Profile.from_json(profile().to_json())
    assert made == profile()
    choice = choose_plan(made, gpus=64, global_batch=2400, device_memory_bytes=16 * 2**30)
    assert choice.best is not None, choice.reason
    assert max(choice.best.memory_bytes) < 16 * 2**30
    # The paper needs at least 6 stages for this model (table 3), on the same GPUs.
    assert choice.best.p >= 3


def test_gpus_of_one_vm_share_its_network_when_all_reduce() -> None:
    def largest_us(gpus_per_vm: int) -> float:
        made = synthesise(GPT_2_5B, built_in(), "v100-16gb", "ethernet-10g", gpus_per_vm=gpus_per_vm)
        return max(measured.us for measured in made.all_reduce)

    assert largest_us(4) == pytest.approx(4 * largest_us(1), rel=0.01)


# ---------------------------------------------------------------- prediction


def shape_of(p: int, d: int, policy: Policy = Policy.WORK_CONSERVING) -> PipelineShape:
    return PipelineShape(
        p=p,
        d=d,
        micro_batch=4,
        global_batch=1024,
        stage_starts=even_starts(56, p, ends_ride=True),
        recompute=tuple(stage < p - 1 for stage in range(p)),
        policy=policy,
    )


def test_even_cuts_give_every_stage_as_many_layers() -> None:
    starts = even_starts(56, 9, ends_ride=True)
    assert starts == (0, 7, 13, 19, 25, 31, 37, 43, 49)
    assert even_starts(10, 2, ends_ride=False) == (0, 5)
    with pytest.raises(ValueError, match="54 layers make 1 to 54 stages"):
        even_starts(56, 55, ends_ride=True)


def test_replicas_share_the_work_and_pay_for_the_all_reduce() -> None:
    alone, shared = predict_s(profile(), shape_of(9, 1)), predict_s(profile(), shape_of(9, 4))
    assert alone / 4 < shared < alone / 2


def test_the_overhead_of_every_action_is_in_the_prediction() -> None:
    made = profile()
    without = made.model_copy(update={"stage_overhead_us": 0.0})
    N = 256
    added_s = predict_s(made, shape_of(9, 1)) - predict_s(without, shape_of(9, 1))
    # Each micro-batch costs the busiest stage two or three actions, and filling the pipeline some more.
    assert 2 * N * made.stage_overhead_us / 1e6 * 0.99 <= added_s <= 3 * (N + 2 * 9) * made.stage_overhead_us / 1e6


def test_gpipe_is_no_faster_than_work_conserving() -> None:
    gpipe = predict_s(profile(), shape_of(9, 1, Policy.GPIPE))
    assert gpipe >= predict_s(profile(), shape_of(9, 1)) * 0.999


def test_stages_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="only 56 sections"):
        predict_s(
            profile(),
            PipelineShape(p=2, d=1, micro_batch=4, global_batch=8, stage_starts=(0, 56), recompute=(True, False)),
        )
    with pytest.raises(ValueError, match="must ascend from 0"):
        PipelineShape(p=2, d=1, micro_batch=4, global_batch=8, stage_starts=(1, 2), recompute=(True, False))


@pytest.mark.parametrize(
    ("precision", "boundaries", "value_bytes"),
    [
        (NumberFormat.BF16, None, 4),
        (NumberFormat.BF16, NumberFormat.BF16, 2),
        (NumberFormat.FP16, None, 2),
        (NumberFormat.FP16, NumberFormat.FP32, 4),
        (NumberFormat.FP32, None, 4),
    ],
)
def test_what_crosses_between_stages_has_a_type_of_its_own(
    precision: NumberFormat, boundaries: NumberFormat | None, value_bytes: int
) -> None:
    shape = ModelShape(
        family=ModelFamily.GPT2, layers=2, hidden=128, seq=64, precision=precision, boundaries=boundaries
    )
    first, second, *_ = profile(shape, gpu="a100-40gb").measurements_at(2)
    assert first.output_bytes == second.input_bytes == 2 * 64 * 128 * value_bytes
    alone = profile(dataclasses.replace(shape, boundaries=None), gpu="a100-40gb").measurements_at(2)[1]
    assert (second.forward_us, second.activation_bytes) == (alone.forward_us, alone.activation_bytes)


def test_boundaries_that_no_run_has_are_refused() -> None:
    with pytest.raises(ValueError, match="boundaries=bf16, but the model computes in fp16: give fp16 or fp32"):
        ModelShape(family=ModelFamily.GPT2, layers=2, hidden=128, seq=64, boundaries=NumberFormat.BF16)
