"""What a transformer computes, moves and keeps, per section, from its shape alone: no weights, no torch, no GPU.

Letters: L layers, H hidden, S tokens of an example, V vocabulary, A attention heads, F width of the perceptron.
Sections are the embedding, each layer, and the head with the loss, so there are L + 2; in t5 L layers of the encoder
and L of the decoder, so 2 L + 2. "Values" are numbers of activations or weights; bytes follow from the precision. All
is for one example and the forward pass, unless noted otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from varuna_planner.profile.document import SharedParameter

__all__ = ["FAMILIES", "ModelFamily", "ModelShape", "NumberFormat", "Product", "SectionShape"]


class NumberFormat(StrEnum):
    """The type in which matrix products run. Parameters, gradients and Adam's state are fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self is NumberFormat.FP32 else 2

    @property
    def cast_bytes(self) -> int:
        """Bytes of the copy of a parameter that autocast keeps over all micro-batches of a step."""
        return 0 if self is NumberFormat.FP32 else 2


VALUE_BYTES = 4
"""Of a parameter, which is in fp32."""
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 8
"""Adam's two moments. With parameters and gradients some 16 bytes (paper, section 2)."""


class ModelFamily(StrEnum):
    """Kinds of transformers, by what differs in their sections."""

    GPT2 = "gpt2"
    BERT = "bert"
    LLAMA = "llama"
    T5 = "t5"


FAMILIES = tuple(family.value for family in ModelFamily)
_VOCABULARY = {ModelFamily.GPT2: 50257, ModelFamily.BERT: 30522, ModelFamily.LLAMA: 32000, ModelFamily.T5: 32128}


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrix products [rows, inner] × [inner, columns], `count` of them."""

    rows: int
    inner: int
    columns: int
    count: int = 1
    weights: bool = True
    """The second factor is a parameter, the same for all examples of a micro-batch."""
    stored: bool = True
    """Factors and result pass through memory; not in fused attention, where scores never leave the chip."""

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.count

    def moved_values(self, micro_batch: int) -> int:
        """Values read and written for a whole micro-batch."""
        if not self.stored:
            return 0
        weights = self.inner * self.columns * (1 if self.weights else micro_batch)
        return self.count * (micro_batch * self.rows * (self.inner + self.columns) + weights)


@dataclass(frozen=True, kw_only=True)
class SectionShape:
    """One section."""

    name: str
    parameters: int
    """Tied ones count in each section that uses them."""
    products: tuple[Product, ...]
    streamed_values: int
    """Read and written by all that is not a matrix product: norms, activations, dropout, residuals, softmax."""
    kept_values: int
    """For the backward, when the section does not recompute."""
    output_values: int
    """Values that cross a cut after it."""
    is_head: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer. Raises ValueError at construction when its numbers cannot be one."""

    family: ModelFamily
    layers: int
    """In t5 of the encoder, and as many of the decoder."""
    hidden: int
    seq: int
    """Tokens of one example; in t5 of its input, and as many of its output."""
    vocab: int = 0
    """0: the family's own."""
    heads: int = 0
    """0: of width 64, and of 128 above a hidden width of 1600, where that divides it."""
    kv_heads: int = 0
    """Of keys and values; 0: as many as heads."""
    mlp: int = 0
    """F; 0: 4 H, in llama 8/3 H rounded up to a multiple of 256."""
    precision: NumberFormat = NumberFormat.FP16
    boundaries: NumberFormat | None = None
    """The type in which activations cross between stages; None: fp32 under bf16, where autocast leaves the sums of
    residual paths in fp32, and under fp16 the precision itself, as in the paper's code, which had no autocast."""
    fused_attention: bool = True
    """Scores stay on the chip (FlashAttention, PyTorch's scaled_dot_product_attention); not so in code of 2021."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: a model needs at least 1")
        defaults = {
            "vocab": _VOCABULARY[self.family],
            "heads": _default_heads(self.hidden),
            "mlp": -(-8 * self.hidden // 768) * 256 if self.family is ModelFamily.LLAMA else 4 * self.hidden,
        }
        for name, value in defaults.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        for name, least in (("vocab", 1), ("heads", 1), ("kv_heads", 0), ("mlp", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number, or leave it out")
        kv_heads = self.kv_heads or self.heads
        if self.hidden % self.heads or self.heads % kv_heads:
            raise ValueError(
                f"heads={self.heads} must divide hidden={self.hidden}, and kv_heads={kv_heads} must divide heads: "
                "give --heads"
            )
        if self.boundaries not in (None, self.precision, NumberFormat.FP32):
            raise ValueError(
                f"boundaries={self.boundaries}, but the model computes in {self.precision}: give {self.precision} "
                "or fp32, or leave it out"
            )

    @property
    def _kv_width(self) -> int:
        """Of a token's keys, and of its values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def boundary_value_bytes(self) -> int:
        """Bytes of a value that crosses between stages."""
        own = NumberFormat.FP32 if self.precision is NumberFormat.BF16 else self.precision
        return (self.boundaries or own).value_bytes

    @property
    def parameters(self) -> int:
        """Tied ones once."""
        again = sum(len(shared.sections) - 1 for shared in self.shared_parameters())
        return sum(section.parameters for section in self.list_sections()) - again * self.vocab * self.hidden

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's weights."""
        return self.family is not ModelFamily.LLAMA

    @property
    def flops(self) -> int:
        """Of one example's forward and backward, without recompute."""
        return 3 * sum(product.flops for section in self.list_sections() for product in section.products)

    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        if not self.tied:
            return ()
        size = self.vocab * self.hidden * GRADIENT_BYTES
        # The decoder begins with an embedding of its own tokens, in its first layer's section.
        uses = (0, self.layers + 1, 2 * self.layers + 1) if self.family is ModelFamily.T5 else (0, self.layers + 1)
        return (SharedParameter(name="token embedding", sections=uses, bytes=size),)

    def list_sections(self) -> tuple[SectionShape, ...]:
        """Embedding, layers, head."""
        if self.family is ModelFamily.T5:
            return (self._embedding(), *self._encoder_and_decoder(), self._head())
        layer = self._layer()
        layers = (replace(layer, name=f"layer {index}") for index in range(self.layers))
        return (self._embedding(), *layers, self._head())

    def _encoder_and_decoder(self) -> tuple[SectionShape, ...]:
        """All layers of the decoder read the encoder's output, which is relayed over the cuts between them."""
        L, values = self.layers, self.seq * self.hidden
        encoder, decoder, cross = self._layer(), self._layer(), self._cross_attention()
        decoder = replace(
            decoder,
            parameters=decoder.parameters + cross.parameters,
            products=decoder.products + cross.products,
            streamed_values=decoder.streamed_values + cross.streamed_values,
            kept_values=decoder.kept_values + cross.kept_values,
        )
        first = replace(
            decoder,
            parameters=decoder.parameters + self.vocab * self.hidden,
            streamed_values=decoder.streamed_values + 3 * values,
        )
        return (
            *(replace(encoder, name=f"encoder layer {index}") for index in range(L)),
            *(
                replace(
                    decoder if index else first,
                    name=f"decoder layer {index}",
                    output_values=values if index == L - 1 else 2 * values,
                )
                for index in range(L)
            ),
        )

    def _embedding(self) -> SectionShape:
        positions = 0 if self.family in (ModelFamily.LLAMA, ModelFamily.T5) else self.seq * self.hidden
        values = self.seq * self.hidden
        return SectionShape(
            name="embedding",
            parameters=self.vocab * self.hidden + positions,
            products=(),
            streamed_values=6 * values,  # two look-ups and their sum, dropout
            kept_values=values,
            output_values=values,
        )

    def _layer(self) -> SectionShape:
        """Values kept as in Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1): 34·S·H bytes of
        fp16 and its masks for a GPT, and 5·A·S² more where scores are kept."""
        H, S, A, F = self.hidden, self.seq, self.heads, self.mlp
        kv = self._kv_width
        gated = self.family is ModelFamily.LLAMA
        scores = Product(rows=S, inner=H // A, columns=S, count=A, weights=False, stored=not self.fused_attention)
        mixed = Product(rows=S, inner=S, columns=H // A, count=A, weights=False, stored=not self.fused_attention)
        products = (
            Product(rows=S, inner=H, columns=H + 2 * kv),
            scores,
            mixed,
            Product(rows=S, inner=H, columns=H),
            Product(rows=S, inner=H, columns=2 * F if gated else F),
            Product(rows=S, inner=F, columns=H),
        )
        norms_and_biases = 2 * H if self.family in (ModelFamily.LLAMA, ModelFamily.T5) else 9 * H + F
        weights = sum(product.inner * product.columns for product in products if product.weights)
        # Per token: two norms (4 H), two residuals with dropout (6 H), heads split and merged, the activation.
        streamed = 4 * H + 6 * H + 2 * (2 * H + 2 * kv) + (3 * F if gated else 2 * F)
        kept = 5 * H + H + 2 * kv + (3 * F if gated else 2 * F) + (0 if gated else H)
        if not self.fused_attention:
            streamed += 4 * A * S  # masked softmax and dropout, each read and written
            kept += 5 * A * S // 2
        return SectionShape(
            name="layer",
            parameters=weights + norms_and_biases,
            products=products,
            streamed_values=S * streamed,
            kept_values=S * kept,
            output_values=S * H,
        )

    def _cross_attention(self) -> SectionShape:
        """What a decoder's layer adds: norm, queries, keys and values of the encoder's output, residual."""
        H, S, A = self.hidden, self.seq, self.heads
        kv = self._kv_width
        products = (
            Product(rows=S, inner=H, columns=H),
            Product(rows=S, inner=H, columns=2 * kv),
            Product(rows=S, inner=H // A, columns=S, count=A, weights=False, stored=not self.fused_attention),
            Product(rows=S, inner=S, columns=H // A, count=A, weights=False, stored=not self.fused_attention),
            Product(rows=S, inner=H, columns=H),
        )
        scores = 0 if self.fused_attention else A * S
        return SectionShape(
            name="cross-attention",
            parameters=sum(p.inner * p.columns for p in products if p.weights) + H,
            products=products,
            streamed_values=S * (2 * H + 3 * H + 2 * (2 * H + 2 * kv) + 4 * scores),
            kept_values=S * (4 * H + 2 * kv + 5 * scores // 2),
            output_values=S * H,
        )

    def _head(self) -> SectionShape:
        H, S, V = self.hidden, self.seq, self.vocab
        transform = (Product(rows=S, inner=H, columns=H),) if self.family is ModelFamily.BERT else ()
        return SectionShape(
            name="head",
            parameters=V * H + 2 * H + sum(product.inner * product.columns for product in transform),
            products=(*transform, Product(rows=S, inner=H, columns=V)),
            # Logits to fp32, log-softmax, the loss: 14 bytes per logit in either direction, a third of both here.
            streamed_values=S * (4 * H + 5 * V),
            kept_values=S * (2 * H + 3 * V),
            output_values=1,
            is_head=True,
        )


def _default_heads(hidden: int) -> int:
    widths = (64, 32, 16) if hidden <= 1600 else (128, 96, 80, 64)
    return next((hidden // width for width in widths if hidden % width == 0), 1)
