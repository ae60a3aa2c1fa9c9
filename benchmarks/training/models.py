"""The models of the convergence suite, each small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def small_cnn() -> nn.Module:
    """Return a CNN for 28×28 images: 162,966 parameters."""
    layers = (
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 49, 100), nn.ReLU(), nn.Linear(100, 10)),
    )
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


Norm = Callable[[int], nn.Module]
"""``channels -> module``."""


def four_groups(channels: int) -> nn.Module:
    """Return a group norm, which has no running statistics."""
    return nn.GroupNorm(4, channels)


class Residual(nn.Module):
    """Two 3×3 convolutions with norms around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            *(norm(outside), nn.ReLU()),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            norm(outside),
        )
        same = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def residual_network(norm: Norm = four_groups) -> nn.Module:
    """Return a ResNet-8 for 32×32 colour images whose first convolution has stride 2."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1, bias=False), norm(16), nn.ReLU()),
        *(Residual(16, 16, 1, norm), Residual(16, 32, 2, norm), Residual(32, 64, 2, norm)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def spectrogram_cnn() -> nn.Module:
    """Return a CNN for spectrograms of 32 bands and 48 frames."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 8 * 12, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


class Characters(nn.Module):
    """A language model of characters: an LSTM of 128 units."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.output = nn.Linear(128, letters)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.lstm(self.embedding(x))[0])
        return logits


class Words(nn.Module):
    """A language model of words: transformer layers; embedding and output share weights."""

    def __init__(self, words: int, length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layers(self.embedding(x) + self.position, mask=self.hidden)
        return nn.functional.linear(states, self.embedding.weight)


def intents(words: int) -> nn.Module:
    """Return a classifier of utterances: embeddings, a convolution over words, its maximum."""

    class Swap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    return nn.Sequential(
        *(nn.Embedding(words, 32), Swap()),
        *(nn.Conv1d(32, 96, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(96, 7)),
    )
