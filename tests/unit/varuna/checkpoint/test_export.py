"""One plain safetensors file of a checkpoint, loadable into the plain model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from training_roles import training_role
from varuna import CutPoint, Varuna
from varuna.checkpoint import hugging_face
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.export import export_model, main
from waiting import DEADLINE_S


class Model(nn.Module):
    """Has what a plain state_dict may have: a tied weight, running statistics, a constant mask, an unsaved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 6).bfloat16()
        self.cut = CutPoint()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("mask", torch.tensor([True, False, True, True, True, True]))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = self.cut(self.narrow(x.bfloat16()).float() * self.mask)
        return self.head(x).square().mean() * self.scale


class Described:
    """A registered state, in the place of what describes a transformers model."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def trained(store: Path, *steps: int, description: dict[str, Any] | None = None) -> nn.Module:
    """A plain model with the state of the newest checkpoint in `store`."""
    torch.manual_seed(3)
    plain = Model()
    model = Varuna(plain, get_batch_fn=lambda size, device=None: {"tokens": torch.zeros(size, dtype=torch.long)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    role = training_role(model)
    if description is not None:
        role.checkpoints.registered.register_state(hugging_face.STATE, Described(description))
    for step in steps:
        model.step({"tokens": torch.arange(10)})
        assert model.checkpoint(str(store), step=step)
    values = {**dict(model.named_parameters()), **role.assembly.stage.buffers}
    plain.load_state_dict({name: values[role.checkpoints.held.state_dict[name]] for name in plain.state_dict()})
    return plain


def assert_equal(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name


def test_the_file_loads_strictly_into_the_plain_model(tmp_path: Path) -> None:
    expected = trained(tmp_path / "store", 1, 2)
    out = tmp_path / "model.safetensors"
    exported = export_model(str(tmp_path / "store"), out)

    assert (exported.step, exported.tensors, exported.bytes) == (2, 11, out.stat().st_size)
    fresh = Model()
    fresh.load_state_dict(load_file(out), strict=True)
    assert_equal(fresh.state_dict(), expected.state_dict())
    assert not torch.equal(fresh.norm.running_mean, Model().norm.running_mean)
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_checkpoint_is_named_by_its_folder_or_url(tmp_path: Path) -> None:
    trained(tmp_path / "store", 1, 2)
    folder = tmp_path / "store" / "varuna_ckpt_1"
    assert export_model(str(folder), tmp_path / "a").step == 1
    assert export_model(f"{folder.as_uri()}/", tmp_path / "b").step == 1
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def flip_last_bit(folder: Path) -> Path:
    victim = max(folder.glob("*.parameters.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    return victim


def test_a_corrupt_checkpoint_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    trained(tmp_path / "store", 1, 2)
    victim = flip_last_bit(tmp_path / "store" / "varuna_ckpt_2")
    with pytest.raises(CheckpointError, match=f"{victim.name} is corrupt: its checksum is not the manifest's"):
        export_model(str(victim.parent), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_of_a_store_the_newest_that_can_be_read_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "store", 1, 2)
    victim = flip_last_bit(tmp_path / "store" / "varuna_ckpt_2")
    capsys.readouterr()
    assert main([str(tmp_path / "store"), "--out", str(tmp_path / "out"), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["step"] == 1
    assert victim.name in output.err
    flip_last_bit(tmp_path / "store" / "varuna_ckpt_1")
    assert main([str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoint", "out", "says"),
    [
        ("store/varuna_ckpt_9", "model.safetensors", "varuna_ckpt_9 does not exist"),
        ("nowhere", "model.safetensors", "holds no complete checkpoint: is this the job's checkpoint URL?"),
        ("store", "no/such/folder/model.safetensors", "cannot write"),
        ("nonsense://store", "model.safetensors", "checkpoint URL 'nonsense://store'"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    out: str,
    says: str,
) -> None:
    trained(tmp_path / "store", 1)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main([checkpoint, "--out", out]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    check_line(printed.err, says)


@pytest.mark.processes
def test_the_command_explains_itself_in_one_line(tmp_path: Path) -> None:
    trained(tmp_path / "store", 1)
    result = subprocess.run(
        [sys.executable, "-m", "varuna_client.cli", "export", "store/varuna_ckpt_9", "--out", "model.safetensors"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    check_line(result.stderr, "varuna_ckpt_9 does not exist")


def check_line(text: str, says: str) -> None:
    [line] = text.splitlines()
    assert line.startswith("varuna: ")
    assert says in line


@pytest.mark.parametrize(
    "description",
    [
        {"files": {"config.json": "{}", "../evil": "x"}, "tied_to_others": []},
        {"files": {"{folder}/evil": "x"}, "tied_to_others": []},
        {"files": {"modeling_evil.py": "x"}, "tied_to_others": []},
        {"files": {"config.json": 1}, "tied_to_others": []},
        {"files": ["config.json"], "tied_to_others": []},
        {"files": {}, "tied_to_others": 1},
        {"files": {}},
    ],
    ids=str,
)
def test_a_folder_gets_no_other_files_whatever_the_checkpoint_names(
    description: dict[str, Any], tmp_path: Path
) -> None:
    """Who exports a model may not be who trained it."""
    if isinstance(description["files"], dict):
        named = {name.replace("{folder}", str(tmp_path)): text for name, text in description["files"].items()}
        description = {**description, "files": named}
    trained(tmp_path / "store", 1, description=description)
    with pytest.raises(CheckpointError, match="is not what Varuna writes there"):
        export_model(str(tmp_path / "store"), tmp_path / "out", hf=True)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_gets_the_files_of_its_model(tmp_path: Path) -> None:
    files = {"config.json": "{}", "generation_config.json": "{}"}
    trained(tmp_path / "store", 1, description={"files": files, "tied_to_others": ["head.weight"]})
    export_model(str(tmp_path / "store"), tmp_path / "out", hf=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*files, hugging_face.WEIGHTS_FILE}
