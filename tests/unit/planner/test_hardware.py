"""The hardware table: what is built in, how a user's file adds to it, and what is wrong with a bad one."""

from __future__ import annotations

import pytest

from varuna_planner.hardware.table import GpuSpec, Hardware, NetworkSpec, assume_speed, built_in
from varuna_planner.profile.shapes import NumberFormat

MINE = GpuSpec(
    name="mine",
    peak_flop_per_s={NumberFormat.FP16: 50e12},
    memory_bytes=8 * 2**30,
    memory_bandwidth_bytes_per_s=400e9,
    compute_efficiency=0.5,
    head_efficiency=0.6,
    section_overhead_us=100,
    micro_batch_overhead_us=1000,
    inside_vm="pcie4",
)


@pytest.mark.parametrize(
    "name", ["v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "a10", "t4", "l4"]
)
def test_a_gpu_of_the_table_has_a_link_inside_vms(name: str) -> None:
    table = built_in()
    assert table.find_network(table.find_gpu(name).inside_vm).bandwidth_bytes_per_s > 1e9


@pytest.mark.parametrize("name", ["ethernet-1g", "ethernet-10g", "ethernet-25g", "ethernet-100g", "infiniband-hdr"])
def test_networks_between_vms_are_in_the_table(name: str) -> None:
    assert built_in().find_network(name).latency_us > 0


def test_faster_ethernet_is_faster() -> None:
    table = built_in()
    rates = [
        table.find_network(f"ethernet-{rate}").bandwidth_bytes_per_s
        * table.find_network(f"ethernet-{rate}").bandwidth_efficiency
        for rate in ("1g", "10g", "25g", "100g")
    ]
    assert rates == sorted(rates)


def test_a_file_adds_entries_and_replaces_those_of_the_same_name() -> None:
    slower = built_in().find_network("ethernet-10g").model_copy(update={"bandwidth_efficiency": 0.1})
    table = built_in().with_entries(Hardware(gpus=(MINE,), networks=(slower,)))
    assert table.find_gpu("mine") == MINE
    assert table.find_network("ethernet-10g").bandwidth_efficiency == 0.1
    assert len(table.gpus) == len(built_in().gpus) + 1
    assert len(table.networks) == len(built_in().networks)


def test_the_document_reads_back_as_it_was_written() -> None:
    assert Hardware.from_json(built_in().to_json()) == built_in()


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no GPU is called 'b100'.*v100-16gb.*--hardware"):
        built_in().find_gpu("b100")
    with pytest.raises(ValueError, match=r"no network is called 'token-ring'.*ethernet-10g"):
        built_in().find_network("token-ring")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "hardware: document"),
        ('{"schema": "varuna.hardware/2"}', "hardware: schema"),
        ('{"gpus": [{"name": "x"}]}', "hardware: gpus.0.peak_flop_per_s: Field required"),
        ('{"networks": [{"name": "Not A Name"}]}', "hardware: networks.0.name"),
        ('{"cpus": []}', "hardware: cpus"),
    ],
)
def test_a_bad_document_is_told_by_field(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Hardware.from_json(text)


def test_a_name_may_be_there_only_once() -> None:
    with pytest.raises(ValueError, match="mine occurs twice"):
        Hardware(gpus=(MINE, MINE))


def test_nothing_may_reach_more_than_the_data_sheet_says() -> None:
    with pytest.raises(ValueError, match="less than or equal to 1"):
        NetworkSpec(
            name="n",
            bandwidth_bytes_per_s=1e9,
            bandwidth_efficiency=1.1,
            latency_us=1,
            jitter_us=0,
            all_reduce_efficiency=1,
            all_reduce_hop_us=1,
        )


@pytest.mark.parametrize(
    ("own", "other", "precision", "speed"),
    [
        ("Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-40GB", "float16", 312e12 * 0.6 / (125e12 * 0.5)),
        ("NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB", "float16", 125e12 * 0.5 / (312e12 * 0.6)),
        # A V100 has no bf16: what it does in fp16 is the nearest.
        ("Tesla V100-PCIE-16GB", "NVIDIA A100-SXM4-80GB", "bfloat16", 312e12 * 0.6 / (125e12 * 0.5)),
        ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-16GB", "", 1.0),
        ("Tesla V100-PCIE-16GB", "AMD Instinct MI300X", "float32", 1.0),
        ("", "Tesla T4", "float32", 1.0),
    ],
)
def test_the_table_knows_gpus_by_the_names_of_their_drivers(own: str, other: str, precision: str, speed: float) -> None:
    assert assume_speed(own, other, precision) == pytest.approx(speed)
