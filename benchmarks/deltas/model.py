"""The language model whose weights `pairs.py` writes, plain enough for two cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

Past = list[Tensor]
"""The keys and values that a layer has seen; empty before the first."""


@dataclass(frozen=True)
class Config:
    """The sizes of a model: with these, 17,308,032 parameters."""

    words: int = 8192
    width: int = 384
    layers: int = 8
    heads: int = 6
    inner: int = 1024
    deviation: float = 0.02


class Layer(nn.Module):
    """Causal attention with rotary positions and a SwiGLU network, each after an RMS norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm, self.norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.mix = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, past: Past | None) -> Tensor:
        """Return the states after this layer, and extend its past if there is one."""
        parts = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, angles), _rotated(k, angles)
        if past:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        if past is not None:
            past[:] = k, v
        seen = scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        after: Tensor = x + self.down(silu(gate) * up)
        return after


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(nn.Module):
    """A decoder-only language model; embedding and output share weights."""

    rates: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.words, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        half = config.width // config.heads // 2
        rates = 10_000 ** -(torch.arange(half) / half)
        self.register_buffer("rates", rates, persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.deviation)

    def forward(self, tokens: Tensor, pasts: list[Past] | None = None) -> Tensor:
        """Return the logits of the tokens, which follow those in ``pasts``, one past a layer."""
        start = pasts[0][0].shape[2] if pasts and pasts[0] else 0
        places = torch.arange(start, start + tokens.shape[1])
        angles, x = places[:, None] * self.rates, self.embedding(tokens)
        for place, layer in enumerate(self.layers):
            x = layer(x, angles, pasts[place] if pasts else None)
        return linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def sample(self, tokens: Tensor, count: int, own: torch.Generator) -> Tensor:
        """Return sequences, each continued by some sampled tokens."""
        pasts: list[Past] = [[] for _ in self.layers]
        new = tokens
        for _ in range(count):
            chances = self(new, pasts)[:, -1].softmax(-1)
            new = torch.multinomial(chances, 1, generator=own)
            tokens = torch.cat((tokens, new), 1)
        return tokens
