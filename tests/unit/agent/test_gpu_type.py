"""The type of the GPUs, as the driver's files have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna_agent.identity.gpu_type import read_gpu_type

INFORMATION = "Model: \t\t {}\nIRQ:   \t\t 118\nGPU UUID: \t GPU-2b1f\nBus Type: \t PCIe\n"


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([], ""),
        (["NVIDIA A100 80GB PCIe"] * 2, "NVIDIA A100 80GB PCIe"),
        (["Tesla V100-PCIE-16GB", "NVIDIA A100-SXM4-40GB"], "NVIDIA A100-SXM4-40GB, Tesla V100-PCIE-16GB"),
    ],
)
def test_the_models_are_those_of_the_driver(tmp_path: Path, models: list[str], expected: str) -> None:
    for number, model in enumerate(models):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(INFORMATION.format(model))
    assert read_gpu_type(tmp_path) == expected


def test_a_machine_without_the_driver_and_files_that_say_nothing_are_not_known(tmp_path: Path) -> None:
    assert read_gpu_type(tmp_path / "nowhere") == ""
    (tmp_path / "0" / "information").mkdir(parents=True)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "information").write_bytes(b"\xff\x00")
    assert read_gpu_type(tmp_path) == ""
