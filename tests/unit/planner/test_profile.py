"""The profile document, micro-batches and memory."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_planner.memory import human, pass_bytes, stage_bytes
from varuna_planner.profile.document import Measurement, Profile, SectionProfile, interpolate
from varuna_planner.schedule.batching import micro_batch_sizes, micro_batches


def measurement(micro_batch: int, forward_us: float = 10.0) -> Measurement:
    return Measurement(
        micro_batch=micro_batch,
        forward_us=forward_us,
        backward_us=2 * forward_us,
        recompute_us=forward_us,
        output_bytes=100 * micro_batch,
        input_bytes=100 * micro_batch,
        activation_bytes=1000 * micro_batch,
    )


def section(index: int, *sizes: int) -> SectionProfile:
    return SectionProfile(
        index=index,
        name=f"block.{index}",
        parameter_bytes=400,
        optimizer_bytes=800,
        gradient_bytes=400,
        measurements=tuple(measurement(size) for size in sizes),
    )


def test_a_profile_survives_its_document() -> None:
    profile = Profile(environment={"torch": "2.13"}, sections=(section(0, 1, 2), section(1, 1, 2)))
    text = profile.to_json()
    assert json.loads(text)["schema"] == "varuna.profile/1"
    assert Profile.from_json(text) == profile


def test_a_profile_of_an_earlier_version_has_one_connection_for_each_link() -> None:
    document = json.loads(Profile(sections=(section(0, 1),)).to_json())
    for name in ("same_vm", "other_vm"):
        del document["links"][name]["connections"]
    assert Profile.from_json(json.dumps(document)).links.other_vm.connections == 1


def test_only_sizes_measured_everywhere_are_candidates() -> None:
    assert Profile(sections=(section(0, 1, 2, 8), section(1, 2, 4, 8))).micro_batches == (2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["sections"][1]["measurements"][0].update(forward_us=-1), r"sections.1.measurements.0.forward_us"),
        (lambda d: d.update(schema="varuna.profile/9"), r"varuna.profile/1"),
        (lambda d: d["sections"].reverse(), "numbered from 0 in order: number 0 is called 1"),
        (lambda d: d["sections"][0].pop("name"), r"sections.0.name: Field required"),
        (lambda d: d["sections"][0]["measurements"].reverse(), r"must ascend by micro_batch, got \[2, 1\]"),
        (lambda d: d["sections"][0].update(measurements=[]), r"sections.0.measurements"),
        (lambda d: d["sections"][0]["measurements"].pop(), None),
        (lambda d: d["links"]["other_vm"].update(connections=0), r"links.other_vm.connections"),
        (
            lambda d: d.update(shared_parameters=[{"name": "wte", "sections": [0, 7], "bytes": 4}]),
            r"shared parameter wte: no such sections \(0, 7\)",
        ),
    ],
)
def test_a_wrong_document_names_the_field(change, message) -> None:  # type: ignore[no-untyped-def]
    document = json.loads(Profile(sections=(section(0, 1, 2), section(1, 1, 2))).to_json())
    change(document)
    if message is None:  # still sound: one size is left
        assert Profile.from_json(json.dumps(document)).micro_batches == (1,)
        return
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(document))


def test_a_profile_of_another_model_is_told_by_its_sections() -> None:
    profile = Profile(sections=(section(0, 1), section(1, 1)))
    assert profile.describe_misfit(["block.0", "block.1"]) is None
    assert (
        profile.describe_misfit(["block.0", "head"]) == "section 1 is 'block.1' in this profile and 'head' in the model"
    )
    assert profile.describe_misfit(["block.0"]) == "this profile has 2 sections and the model has 1"


def test_the_schema_describes_every_field() -> None:
    schema = Profile.model_json_schema(by_alias=True)
    kinds = [schema, *schema["$defs"].values()]
    fields = {name: field for kind in kinds for name, field in kind["properties"].items()}
    assert {"schema", "sections", "forward_us", "jitter_us", "rings", "stage_overhead_us"} <= set(fields)
    assert [name for name, field in fields.items() if not field.get("description")] == []


def test_a_document_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="profile: document: Invalid JSON"):
        Profile.from_json("{")


def test_times_between_measured_sizes_lie_on_the_line() -> None:
    points = [measurement(2, 10.0), measurement(4, 14.0)]
    assert interpolate(points, 3).forward_us == 12
    assert interpolate(points, 4) is points[1]
    assert interpolate(points, 6).forward_us == 18
    assert interpolate(points, 1).forward_us == 8
    assert interpolate(points[:1], 4).forward_us == 20
    assert interpolate(points, 3).activation_bytes == 3000


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_replicas_share_all_micro_batches_evenly(global_batch: int, micro_batch: int, data: st.DataObject) -> None:
    sizes = micro_batch_sizes(global_batch, micro_batch)
    assert sum(sizes) == global_batch
    assert all(size == micro_batch for size in sizes[:-1])
    assert 1 <= sizes[-1] <= micro_batch
    d = data.draw(st.integers(1, len(sizes)))
    shares = micro_batches(global_batch, micro_batch, d)
    assert [index for share in shares for index in share] == list(range(len(sizes)))
    assert len(shares[0]) == -(-len(sizes) // d)
    assert {len(share) for share in shares} <= {len(sizes) // d, -(-len(sizes) // d)}


def test_more_replicas_than_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="d=4, but a global batch of 2 has at most 2 micro-batches of 1"):
        micro_batches(2, 1, 4)


def test_recompute_keeps_one_set_of_activations() -> None:
    assert pass_bytes(10, 20, 100, 50, 5, 3, 4) == 5 * 10 + 3 * 20 + 4 * 100 + 50
    assert pass_bytes(10, 20, 100, 50, 5, 3, 1) == 5 * 10 + 3 * 20 + 100 + 50


def test_passes_and_the_update_are_never_in_memory_together() -> None:
    assert [stage_bytes(1000, 300, update) for update in (0, 300, 400)] == [1300, 1300, 1400]


def test_bytes_are_written_for_people() -> None:
    assert [human(n) for n in (12, 2048, 5 << 20, 3 << 30)] == ["12 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]
