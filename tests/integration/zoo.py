"""Models as they come from pip, small and with random weights, cut by themselves and compared with the uncut model.

Letters: B examples, T tokens, V vocabulary, H hidden, C channels, P stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from stages_by_hand import gradients, run_by_hand
from torch import Tensor, nn

from varuna.partition import ModelMap, PartitionError, Stage, build_stage, loss_of, trace
from varuna.topology import stage_sections

B, T, V, H = 3, 6, 32, 16
STEPS = 3
TOLERANCE = 2e-5
"""Largest difference that is rounding: sums of fp32 in another order, after three steps."""


@dataclass(frozen=True)
class Entry:
    """A model and a batch for it. Only what is called imports transformers, which takes seconds."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


class EncoderModel(nn.Module):
    """torch.nn.TransformerEncoder as people use it: a causal mask, an embedding before and a head behind."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(H, 2, 2 * H, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(V, H)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(H), enable_nested_tensor=False)
        self.head = nn.Linear(H, V)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.encoder(self.embedding(tokens), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Seq2SeqModel(nn.Module):
    """torch.nn.Transformer: the encoder's output goes into every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.transformer = nn.Transformer(H, 2, 2, 2, 2 * H, batch_first=True)
        self.head = nn.Linear(H, V)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.transformer(self.embedding(tokens), self.embedding(targets))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ResidualBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, c_out // c_in, 1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )
        self.shortcut = nn.Conv2d(c_in, c_out, 1, c_out // c_in) if c_in != c_out else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class ResNetModel(nn.Module):
    """Lists inside lists, batch norm, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.layer1 = nn.Sequential(ResidualBlock(4, 4), ResidualBlock(4, 4))
        self.layer2 = nn.Sequential(ResidualBlock(4, 8), ResidualBlock(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(image)))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


def _tokens() -> Tensor:
    return torch.randint(3, V, (B, T))


def _language() -> dict[str, Any]:
    attention = torch.ones(B, T, dtype=torch.long)
    attention[0, T - 1] = 0
    return {"input_ids": _tokens(), "attention_mask": attention, "labels": _tokens()}


def _unmasked() -> dict[str, Any]:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _targets() -> dict[str, Any]:
    return {"tokens": _tokens(), "targets": _tokens()}


def _hugging_face(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made.train()

    return build


_SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 2 * H,
    "max_position_embeddings": 2 * T,
}
_KEPT_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ = {
    "vocab_size": V,
    "d_model": H,
    **{f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    **{f"{part}_ffn_dim": 2 * H for part in ("encoder", "decoder")},
    **_KEPT_TOKENS,
    "decoder_start_token_id": 1,
}

ZOO: dict[str, Entry] = {
    "torch TransformerEncoder": Entry(EncoderModel, _targets),
    "ResNet-like": Entry(ResNetModel, lambda: {"image": torch.randn(B, 3, 16, 16), "label": torch.randint(0, 5, (B,))}),
    "BERT": Entry(_hugging_face("BertForMaskedLM", "BertConfig", **_SIZES), _language),
    "GPT-2": Entry(
        _hugging_face(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=V,
            n_embd=H,
            n_layer=3,
            n_head=2,
            n_positions=2 * T,
            **_KEPT_TOKENS,
        ),
        _language,
    ),
    "Llama": Entry(_hugging_face("LlamaForCausalLM", "LlamaConfig", **_SIZES, num_key_value_heads=1), _language),
    "T5": Entry(
        _hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=V,
            d_model=H,
            d_kv=8,
            d_ff=2 * H,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        _language,
    ),
    "ViT": Entry(
        _hugging_face("ViTForImageClassification", "ViTConfig", **_SIZES, image_size=8, patch_size=4, num_labels=5),
        lambda: {"pixel_values": torch.randn(B, 3, 8, 8), "labels": torch.randint(0, 5, (B,))},
    ),
}
"""What `make test` runs."""

FURTHER: dict[str, Entry] = {
    "torch Transformer": Entry(Seq2SeqModel, _targets),
    "RoBERTa": Entry(
        _hugging_face("RobertaForMaskedLM", "RobertaConfig", **{**_SIZES, "max_position_embeddings": 3 * T}), _language
    ),
    "GPT-NeoX": Entry(_hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SIZES), _language),
    "OPT": Entry(
        _hugging_face(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=V,
            hidden_size=H,
            word_embed_proj_dim=H,
            ffn_dim=2 * H,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=2 * T,
        ),
        _language,
    ),
    "Mistral": Entry(_hugging_face("MistralForCausalLM", "MistralConfig", **_SIZES, num_key_value_heads=1), _language),
    "Qwen2": Entry(_hugging_face("Qwen2ForCausalLM", "Qwen2Config", **_SIZES, num_key_value_heads=1), _language),
    "Gemma": Entry(
        _hugging_face("GemmaForCausalLM", "GemmaConfig", **_SIZES, num_key_value_heads=1, head_dim=8), _language
    ),
    "Phi": Entry(_hugging_face("PhiForCausalLM", "PhiConfig", **_SIZES, **_KEPT_TOKENS), _language),
    "BART": Entry(
        _hugging_face("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ, max_position_embeddings=2 * T),
        _language,
    ),
    "Whisper": Entry(
        _hugging_face(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **_SEQ2SEQ,
            num_mel_bins=4,
            max_source_positions=T,
            max_target_positions=2 * T,
        ),
        lambda: {"input_features": torch.randn(B, 4, 2 * T), "labels": _tokens()},
    ),
    "ResNet": Entry(
        _hugging_face(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 8, 16],
            depths=[1, 2, 1],
            layer_type="basic",
            num_labels=5,
        ),
        lambda: {"pixel_values": torch.randn(B, 3, 32, 32), "labels": torch.randint(0, 5, (B,))},
    ),
    "Mamba": Entry(
        _hugging_face(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=V,
            hidden_size=H,
            num_hidden_layers=3,
            state_size=4,
        ),
        _unmasked,
    ),
    "Mixtral": Entry(
        _hugging_face("MixtralForCausalLM", "MixtralConfig", **_SIZES, num_key_value_heads=1, num_local_experts=4),
        _language,
    ),
}
"""What `make soak-zoo` runs too."""


@dataclass(frozen=True)
class Row:
    """How a model did."""

    name: str
    p: int
    sections: int = 0
    crossing: int = 0
    """Tensors over all stage boundaries."""
    tied: int = 0
    difference: float = float("nan")
    """The largest one, of losses, gradients and parameters, relative to the largest element."""
    status: str = "equal"

    @property
    def well(self) -> bool:
        return self.status == "equal"


def train_cut_and_whole(name: str, stage_counts: Sequence[int]) -> list[Row]:
    """Trains a model of the zoo whole and in P stages, dropout on; one row for each P."""
    entry = {**ZOO, **FURTHER}[name]
    torch.manual_seed(7)
    model = entry.build()
    batches = [entry.inputs() for _ in range(STEPS)]
    try:
        model_map = trace(model, batches[0])
    except PartitionError as error:
        return [Row(name, p, status=f"refused: {error}") for p in stage_counts]
    return [_compare(name, model, model_map, batches, p) for p in stage_counts]


def _compare(name: str, model: nn.Module, model_map: ModelMap, batches: Sequence[dict[str, Any]], p: int) -> Row:
    K = len(model_map.sections)
    if p > K:
        return Row(name, p, K, status="too few sections")
    whole = copy.deepcopy(model)
    for section, place in enumerate(model_map.cut_places, start=1):  # random streams are the sections'
        whole.get_submodule(place.path).register_forward_hook(
            lambda *_, section=section: torch.manual_seed(section) and None
        )
    stages = [build_stage(model, model_map, run.start, run.stop, "cpu") for run in stage_sections((), p, K)]
    optimizers = [_optimizer(stage.parameters.values()) for stage in stages]
    plain = _optimizer(whole.parameters())
    difference = 0.0
    for batch in batches:
        torch.manual_seed(0)
        expected = loss_of(whole(**batch))
        whole.zero_grad()
        expected.backward()
        loss, summed = _backward(stages, batch)
        expected_gradients = {n: q.grad for n, q in whole.named_parameters() if q.grad is not None}
        difference = max(
            difference,
            _largest_difference({"loss": loss}, {"loss": expected.detach()}),
            _largest_difference(summed, expected_gradients),
        )
        for optimizer in (plain, *optimizers):
            optimizer.step()
        for stage in stages:
            held = dict(whole.named_parameters())
            held = {n: held[n].detach() for n in stage.parameters}
            difference = max(difference, _largest_difference(dict(stage.parameters), held))
    crossing = sum(len(stage.receives) for stage in stages)
    status = "equal" if difference <= TOLERANCE else "DIFFERENT"
    return Row(name, p, K, crossing, len(model_map.shared), difference, status)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Adam would blow up gradients that are nothing but rounding, as those of attention's key biases are.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _backward(stages: Sequence[Stage], batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients summed over the stages that share a parameter; they are left there, too."""
    for stage in stages:
        stage.on_section = lambda section: torch.manual_seed(section) and None
        for parameter in stage.parameters.values():
            parameter.grad = None
    loss, _ = run_by_hand(list(stages), batch)
    summed = gradients(stages)
    for stage in stages:
        for name, parameter in stage.parameters.items():
            parameter.grad = summed[name].clone() if name in summed else None
    return loss, summed


def _largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of each tensor relative to its largest element, but no less than a thousandth of the largest of all."""
    assert ours.keys() == theirs.keys()
    least = 1e-3 * max(float(tensor.detach().abs().max()) for tensor in theirs.values())
    return max(
        float((ours[name].detach() - tensor).abs().max()) / max(least, float(tensor.abs().max()))
        for name, tensor in theirs.items()
    )


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'model':26}{'P':>2}{'sections':>10}{'crossing':>10}{'tied':>6}{'difference':>12}  status"]
    lines += [
        f"{row.name:26}{row.p:2}{row.sections:10}{row.crossing:10}{row.tied:6}{row.difference:12.1e}  {row.status}"
        for row in rows
    ]
    return "\n".join(lines)
