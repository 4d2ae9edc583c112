"""Weights from safetensors files, and models on `meta`: read and initialised per stage, never whole in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stages_by_hand import run_by_hand
from varuna import CutPoint, Varuna
from varuna.checkpoint.loading import pretrained
from varuna.checkpoint.loading.pretrained import PretrainedWeights
from varuna.checkpoint.state.stage_state import state_dict_names
from varuna.diagnostics.loading_progress import LOADING_PROGRESS
from varuna.partition import ModelMap, PartitionError, Stage, build_stage, trace
from varuna.partition.stages.initial_values import initialise

T, V, H, BLOCKS = 5, 11, 64, 4


class Positions(nn.Module):
    """A table that is computed, and not in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(T, H), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table = torch.arange(T * H).reshape(T, H) / (T * H)

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.table
        return x + table


class Model(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.positions = Positions()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(T)) for _ in range(BLOCKS))
        self.cuts = [CutPoint() for _ in range(BLOCKS)]
        self.head = nn.Linear(H, V)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.positions(self.embedding(x))
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            y = cut(y + block(y).tanh())
        return F.cross_entropy(self.head(y).flatten(0, 1), x.flatten())


def example(size: int = 4, device: Any = None) -> dict[str, Tensor]:
    return {"x": torch.arange(size * T).reshape(size, T) % V}


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def on_cpu(seed: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model()


def saved(folder: Path, model: nn.Module, files: int = 1) -> Path:
    """As transformers' `save_pretrained` writes it: tied tensors once; an index when there are several files."""
    tensors = {name: x.contiguous() for name, x in model.state_dict().items() if name != "head.weight"}
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({each: tensors[each] for each in names[number::files]}, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(names[number::files], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def weights_of(source: Path, model: nn.Module, model_map: ModelMap) -> PretrainedWeights:
    return PretrainedWeights(source, model, state_dict_names(model, model_map))


def split(model: nn.Module, model_map: ModelMap, starts: tuple[int, ...], values: Any = None) -> list[Stage]:
    ends = (*starts[1:], len(model_map.sections))
    return [build_stage(model, model_map, a, b, device="cpu", values=values) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("starts", [(0,), (0, 2), (0, 1, 2, 3, 4)])
def test_a_model_on_meta_with_weights_trains_as_the_model_that_they_are_of(
    tmp_path: Path, files: int, starts: tuple[int, ...]
) -> None:
    plain, hollow = on_cpu(), on_meta()
    model_map = trace(hollow, example())
    stages = split(hollow, model_map, starts, weights_of(saved(tmp_path, plain, files), hollow, model_map))
    loss, _ = run_by_hand(stages, example())
    expected = plain(**example())
    expected.backward()
    assert loss.item() == expected.item()
    for name, parameter in plain.named_parameters():
        held = [stage.parameters[name] for stage in stages if name in stage.parameters]
        assert all(torch.equal(each, parameter) for each in held)
        torch.testing.assert_close(sum(p.grad for p in held if p.grad is not None), parameter.grad)


def test_reading_weights_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hollow, signs = on_cpu(), on_meta(), list[None]()
    weights = weights_of(saved(tmp_path, plain), hollow, trace(hollow, example()))
    monkeypatch.setattr(LOADING_PROGRESS, "_report", lambda: signs.append(None))
    monkeypatch.setattr(pretrained, "_PIECE_BYTES", 64)
    weight = torch.empty(V, H)
    weights.read_into("embedding.weight", weight)
    assert torch.equal(weight, plain.state_dict()["embedding.weight"])
    assert len(signs) == -(-weight.nbytes // 64)


class Allocated(TorchDispatchMode):
    """Counts the bytes of all memory that tensors on the CPU have had while it was active."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                # Kept, so that no other gets its address.
                self._kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return result

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())


class Noted:
    """Values that record which of them were read."""

    def __init__(self, values: PretrainedWeights) -> None:
        self._values = values
        self.read: set[str] = set()

    def __contains__(self, name: object, /) -> bool:
        return name in self._values

    def read_into(self, name: str, tensor: Tensor) -> None:
        self.read.add(name)
        self._values.read_into(name, tensor)


def test_a_stage_reads_and_allocates_its_own_parameters_only(tmp_path: Path) -> None:
    hollow = on_meta()
    model_map = trace(hollow, example())
    weights = weights_of(saved(tmp_path, on_cpu(), 3), hollow, model_map)
    for section in range(BLOCKS + 1):
        noted = Noted(weights)
        with Allocated() as allocated:
            stage = build_stage(hollow, model_map, section, section + 1, device="cpu", values=noted)
        held = {**stage.parameters, **stage.buffers}
        assert set(stage.parameters) == set(model_map.sections[section].parameters)
        assert noted.read & set(model_map.parameter_bytes) == set(stage.parameters)
        assert noted.read >= set(held) - {"positions.table"}
        own = sum(tensor.nbytes for tensor in held.values())
        # Twice: the piece of the file and its tensor. And the small table, statistics that the forwards of other stages
        # write, and each type's one zero.
        little = 4 * hollow.positions.table.nbytes + sum(b.nbytes for b in hollow.buffers()) + 64
        assert own <= allocated.bytes <= 2 * own + little
        assert allocated.bytes < sum(p.nbytes for p in hollow.parameters())
    assert all(p.is_meta for p in hollow.parameters())


def test_what_the_weights_lack_keeps_the_value_that_it_has_on_the_cpu(tmp_path: Path) -> None:
    hollow = on_meta()
    hollow.head = nn.Linear(H, V)  # new, and on the CPU
    model_map = trace(hollow, example())
    stages = split(hollow, model_map, (0, 2), weights_of(saved(tmp_path, without_head(on_cpu())), hollow, model_map))
    assert torch.equal(stages[1].parameters["head.weight"], hollow.head.weight)
    assert torch.equal(stages[0].parameters["embedding.weight"], on_cpu().embedding.weight)


def without_head(model: Model) -> Model:
    del model.head
    return model


def test_a_type_of_less_precision_is_widened(tmp_path: Path) -> None:
    hollow, plain = on_meta(), on_cpu()
    model_map = trace(hollow, example())
    source = saved(tmp_path, on_cpu().to(torch.bfloat16))
    stage = split(hollow, model_map, (0,), weights_of(source / "model.safetensors", hollow, model_map))[0]
    for name, parameter in plain.named_parameters():
        assert stage.parameters[name].dtype is torch.float32
        assert torch.equal(stage.parameters[name], parameter.to(torch.bfloat16).float())


def test_varuna_takes_the_weights(tmp_path: Path) -> None:
    source = saved(tmp_path, on_cpu(), 2)
    losses = []
    for model in (Varuna(on_meta(), get_batch_fn=example, weights=source), Varuna(on_cpu(), get_batch_fn=example)):
        model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        losses.append([model.step(example())[0] for _ in range(3)])
    assert losses[0] == losses[1]


def _damage(folder: Path, kind: str) -> Path:
    file = folder / "model.safetensors"
    if kind == "missing":
        save_file({"embedding.weight": torch.zeros(V, H), "wte.weight": torch.zeros(V, H)}, file)
    elif kind == "shape":
        save_file({**on_cpu_tensors(), "embedding.weight": torch.zeros(V + 1, H)}, file)
    elif kind == "type":
        save_file({**on_cpu_tensors(), "embedding.weight": torch.zeros(V, H, dtype=torch.int8)}, file)
    elif kind == "short":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "no header":
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    elif kind == "pickle":
        file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif kind == "empty":
        file.unlink()
    elif kind == "no folder":
        return folder / "gpt2"
    elif kind == "bad index":
        file.unlink()
        (folder / "model.safetensors.index.json").write_text("{}")
    elif kind == "lost file":
        file.unlink()
        index = {"weight_map": dict.fromkeys(on_cpu_tensors(), "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def on_cpu_tensors() -> dict[str, Tensor]:
    return {name: x for name, x in on_cpu().state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", r"lack blocks\.0\.0\.weight, .* and \d+ more, .* on meta \(they hold.*wte\.weight\): .*on the CPU"),
        ("shape", r"embedding\.weight is \[12, 64\] there and \[11, 64\] in the model"),
        ("type", r"embedding\.weight is torch\.int8 there and torch\.float32 in the model"),
        ("short", r"model\.safetensors"),
        ("no header", r"model\.safetensors is no safetensors file"),
        ("pickle", r"pytorch_model\.bin is a pickle.*save_pretrained"),
        ("empty", r"no model\.safetensors and no model\.safetensors\.index\.json there"),
        ("no folder", r"gpt2: no such folder.*hf download"),
        ("bad index", r"index\.json is no index of files"),
        ("lost file", r"model-00001-of-00001\.safetensors"),
    ],
)
def test_bad_weights_are_refused_in_one_line(tmp_path: Path, kind: str, words: str) -> None:
    source = _damage(saved(tmp_path, on_cpu()), kind)
    with pytest.raises(ValueError, match=words) as refused:
        Varuna(on_meta(), get_batch_fn=example, weights=source)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


# Without weights


class Extra(nn.Module):
    """Initialises tensors of modules inside it after these have done so themselves, as nn.Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.attention = nn.MultiheadAttention(H, 2, batch_first=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02)


def test_initialisation_follows_the_modules_and_not_the_split() -> None:
    def initialised(names: set[str]) -> dict[str, Tensor]:
        model = Extra()
        tensors = {name: x for name, x in model.named_parameters() if name in names}
        torch.manual_seed(7)
        before = torch.get_rng_state()
        initialise(model, tensors)
        assert torch.equal(torch.get_rng_state(), before)
        return {name: x.detach().clone() for name, x in tensors.items()}

    names = {name for name, _ in Extra().named_parameters()}
    whole = initialised(names)
    assert all(x.std().item() == pytest.approx(0.02, rel=0.1) for x in whole.values() if x.dim() > 1)
    assert whole["attention.out_proj.bias"].abs().max() == 0  # the attention's own rule comes after its child's
    for part in ({"layers.1.weight", "attention.out_proj.weight"}, {"layers.2.bias"}, names - {"layers.0.weight"}):
        for name, value in initialised(part).items():
            assert torch.equal(value, whole[name]), name
    assert len({float(whole[f"layers.{i}.weight"].sum()) for i in range(3)}) == 3


def test_what_is_not_to_be_initialised_stays(tmp_path: Path) -> None:
    model = Extra()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    initialise(model, {"layers.1.weight": model.layers[1].weight})  # type: ignore[dict-item]
    changed = [name for name, x in model.named_parameters() if not torch.equal(x, before[name])]
    assert changed == ["layers.1.weight"]


def test_a_tensor_that_is_initialised_in_part_is_refused() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, H))
            self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

        def reset_parameters(self) -> None:
            self.weight.data[:2].normal_()

    model: Any = Half()
    with pytest.raises(PartitionError, match=r"flag, weight: on the meta device.*weights="):
        initialise(model, {"weight": model.weight, "flag": model.flag})
