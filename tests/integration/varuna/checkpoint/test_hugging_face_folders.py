"""Folders of Hugging Face transformers: training starts from them, and exports are such folders again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from varuna import CutPoint, Varuna
from varuna.checkpoint import CheckpointError
from varuna.checkpoint.export import export_model, main
from varuna.checkpoint.loading.pretrained import PretrainedWeights
from varuna.checkpoint.state.stage_state import state_dict_names
from varuna.partition import build_stage, trace

V, T = 61, 8
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
# Tied weights; tied weights and a tied bias; rotary tables that are in no file, and another name in files.
KINDS = ("gpt2", "bert", "gpt_neox")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No progress bars and no advice on the tiny configurations."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()


def kind_of(name: str) -> tuple[Any, Any]:
    """The class of models, and a configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(name, **SIZES, bos_token_id=0, eos_token_id=0)
    config.use_cache = False
    return (AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM), config


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(2 * T).reshape(2, T) % V
    return {"input_ids": tokens, "labels": tokens}


def on_meta(auto: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config)
    return model.eval()


@pytest.mark.parametrize("name", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_from_a_folder_to_a_folder(tmp_path: Path, name: str) -> None:
    auto, config = kind_of(name)
    torch.manual_seed(5)
    plain = auto.from_config(config).eval()
    plain.save_pretrained(tmp_path / "start", max_shard_size="8KB")
    assert len(list((tmp_path / "start").glob("*.safetensors"))) > 2

    hollow = on_meta(auto, config)
    model_map = trace(hollow, batch())
    weights = PretrainedWeights(tmp_path / "start", hollow, state_dict_names(hollow, model_map))
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for section in range(len(model_map.sections)):
        stage = build_stage(hollow, model_map, section, section + 1, device="cpu", values=weights)
        assert all(torch.equal(x, expected[name]) for name, x in {**stage.parameters, **stage.buffers}.items())

    model = Varuna(on_meta(auto, config), get_batch_fn=batch(), weights=tmp_path / "start")
    model.eval()
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        assert model.evaluate(batch()) == plain(**batch()).loss.item()
    model.step(batch())
    assert model.checkpoint(str(tmp_path / "store"))
    export_model(str(tmp_path / "store"), tmp_path / "out", hf=True)

    loaded, problems = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {what: names for what, names in problems.items() if names} == {}
    with torch.no_grad():
        assert loaded.eval()(**batch()).loss.item() == model.evaluate(batch())
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(dict(loaded.named_parameters()))


def test_names_of_the_model_and_of_its_base_are_understood(tmp_path: Path) -> None:
    auto, config = kind_of("gpt2")
    plain = auto.from_config(config)
    hollow = on_meta(auto, config)
    names = state_dict_names(hollow, trace(hollow, batch()))
    # As gpt2 is on the hub: without "transformer.".
    base = {name: x.contiguous() for name, x in plain.transformer.state_dict().items()}
    save_file(base, tmp_path / "model.safetensors", {"format": "pt"})
    weights = PretrainedWeights(tmp_path, hollow, names)
    assert all(name in weights for name, _ in hollow.named_parameters())


def test_several_tensors_of_which_the_model_has_one_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=2, num_key_value_heads=2)
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    names = {name: name for name in hollow.state_dict()}
    with pytest.raises(ValueError, match=r"several tensors that transformers makes .* save_original_format=False"):
        PretrainedWeights(tmp_path, hollow, names)


def test_a_new_model_on_meta_is_drawn_as_transformers_draws_it() -> None:
    auto, config = kind_of("gpt_neox")
    config.initializer_range = 0.5
    hollow = on_meta(auto, config)
    model_map = trace(hollow, batch())
    whole = build_stage(hollow, model_map, 0, len(model_map.sections), device="cpu")
    plain = auto.from_config(config)
    for name, parameter in plain.named_parameters():
        spread = parameter.std().item() if parameter.numel() > 200 else None
        if spread:
            assert whole.parameters[name].std().item() == pytest.approx(spread, rel=0.2), name
        else:
            assert whole.parameters[name].shape == parameter.shape
    buffers = dict(plain.named_buffers())
    assert whole.buffers
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in whole.buffers.items())
    last = build_stage(hollow, model_map, len(model_map.sections) - 1, len(model_map.sections), device="cpu")
    assert all(torch.equal(parameter, whole.parameters[name]) for name, parameter in last.parameters.items())


class Own(nn.Module):
    """No transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = nn.Linear(3, 3), CutPoint(), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.cut(self.first(x))).square().mean()


def test_what_cannot_be_such_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Varuna(Own(), get_batch_fn={"x": torch.ones(2, 3)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.checkpoint(str(tmp_path / "store"))
    out = tmp_path / "out"
    assert main([str(tmp_path / "store"), "--hf", "--out", str(out)]) == 1
    assert "is not of a Hugging Face transformers model" in capsys.readouterr().err
    with pytest.raises(ValueError, match="add --hf"):
        export_model(str(tmp_path / "store"), out, tokenizer=tmp_path)
    assert not out.exists()


def test_the_tokenizers_files_are_copied(tmp_path: Path) -> None:
    auto, config = kind_of("gpt2")
    model = Varuna(auto.from_config(config), get_batch_fn=batch())
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.checkpoint(str(tmp_path / "store"))
    with pytest.raises(CheckpointError, match="no tokenizer's files"):
        export_model(str(tmp_path / "store"), tmp_path / "out", hf=True, tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    export_model(str(tmp_path / "store"), tmp_path / "out", hf=True, tokenizer=tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
