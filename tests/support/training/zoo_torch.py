"""The zoo's models of plain torch: written as people write them, lists in lists, skips and all.

Letters: V vocabulary, H hidden, L layers, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ConvolutionalClassifier", "EncoderModel", "ResNetModel", "Seq2SeqModel", "UNet"]

V, H, L = 32, 16, 4


class EncoderModel(nn.Module):
    """torch.nn.TransformerEncoder as people use it: a causal mask, an embedding before and a head behind."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(H, 2, 2 * H, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(V, H)
        self.encoder = nn.TransformerEncoder(layer, L, nn.LayerNorm(H), enable_nested_tensor=False)
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


class ConvolutionalClassifier(nn.Module):
    """As the first chapters of books have it: one nn.Sequential of convolutions, one of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(c, 2 * c, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)) for c in (3, 6, 12)]
        )
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(24 * 4, H), nn.ReLU(), nn.Dropout(), nn.Linear(H, 5))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(image).flatten(1)), label)


class UNet(nn.Module):
    """Each level of the way up takes what the level of the way down made: skips over all that lies between."""

    def __init__(self) -> None:
        super().__init__()
        channels = (4, 8, 16)
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.down = nn.ModuleList(self._level(c, 2 * c) for c in channels)
        self.up = nn.ModuleList(self._level(4 * c, c) for c in reversed(channels))
        self.head = nn.Conv2d(4, 5, 1)

    @staticmethod
    def _level(c_in: int, c_out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3, 1, 1), nn.GroupNorm(2, c_out), nn.SiLU(), nn.Dropout2d(0.1))

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        x, kept = self.stem(image), []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        for level in self.up:
            x = level(torch.cat((F.interpolate(x, scale_factor=2), kept.pop()), 1))
        return F.cross_entropy(self.head(x), mask)
