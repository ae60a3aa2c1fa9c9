"""bfloat16 weights before and after one optimiser step of real fine-tuning, for deltas of weights.

A transformer of 17 M parameters is pretrained for 150 steps, once a folder. For each learning rate
it is then fine-tuned by policy gradients on continuations that it samples. After 200 steps its
weights are written, and again after each further step, to ``FOLDER/policy-0/LR/v0000.safetensors``,
``v0001.safetensors`` and so on. AdamW updates float32 masters, with which both passes compute; what
is written are the masters, rounded to bfloat16.

The text is WikiText's, where it is in ``shared/data``, else random tokens. The reward of a
continuation is the share of lower-case letters in its words; random tokens have random scores.
Files that are there are not made again, so each text needs a folder of its own.
"""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

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


Weights = dict[str, Tensor]

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"
LEARNING_RATES = (3e-7, 1e-6, 3e-6, 1e-5)
PRETRAINING, PRETRAINING_LR, RAMP = 150, 3e-4, 15
WARM_IN = 200
BATCH, LENGTH = 12, 64
PROMPTS, GROUP, PROMPT, SAMPLED = 8, 8, 16, 32
UPDATES = 4
"""The optimiser steps that share the continuations of one round, a quarter of them each."""
CLIP = 0.2


@dataclass(frozen=True)
class Text:
    """What a model learns from: token numbers, and a score in [0, 1] of each word."""

    tokens: Tensor
    scores: Tensor


def read(words: int) -> Text:
    """Return WikiText in its most frequent words, or random tokens as unevenly distributed."""
    if not WIKITEXT.exists():
        print("no text: the tokens are random", flush=True)
        own = torch.Generator().manual_seed(0)
        chances = 1 / torch.arange(1.0, words + 1)
        tokens = torch.multinomial(chances, 200_000, replacement=True, generator=own)
        return Text(tokens, torch.rand(words, generator=own))
    with lzma.open(WIKITEXT / "train.txt.xz", "rt", encoding="utf8") as lines:
        text = [word for line in lines for word in (*line.split(), "<eos>")]
    known = ["<unk>", *(word for word, _ in Counter(text).most_common(words) if word != "<unk>")]
    number = {word: place for place, word in enumerate(known[:words])}
    scores = [sum(map(str.islower, word)) / len(word) for word in known[:words]]
    return Text(torch.tensor([number.get(word, 0) for word in text]), torch.tensor(scores))


def _windows(text: Text, count: int, length: int, own: torch.Generator) -> Tensor:
    starts = torch.randint(len(text.tokens) - length, (count, 1), generator=own)
    return text.tokens[starts + torch.arange(length)]


def plain_losses(model: Model, text: Text, own: torch.Generator) -> Iterator[Tensor]:
    """Yield the loss of the next token, of a batch of the text for each."""
    while True:
        tokens = _windows(text, BATCH, LENGTH + 1, own)
        yield cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def policy_losses(model: Model, text: Text, own: torch.Generator) -> Iterator[Tensor]:
    """Yield losses of GRPO without a reference model.

    Each prompt is continued several times. The advantage of a continuation is its reward, less the
    mean of its group, over the group's standard deviation.
    """
    while True:
        prompts = _windows(text, PROMPTS, PROMPT, own).repeat_interleave(GROUP, 0)
        tokens = model.sample(prompts, SAMPLED, own)
        rewards = text.scores[tokens[:, PROMPT:]].mean(1).view(PROMPTS, GROUP)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        with torch.no_grad():
            old = _log_chances(model, tokens)
        for part in torch.randperm(len(tokens), generator=own).chunk(UPDATES):
            ratio = (_log_chances(model, tokens[part]) - old[part]).exp()
            gains = advantages[part, None] * torch.stack((ratio, ratio.clamp(1 - CLIP, 1 + CLIP)))
            yield -gains.amin(0).mean()


def _log_chances(model: Model, tokens: Tensor) -> Tensor:
    """Return the logarithm of the chance of each sampled token."""
    logits = model(tokens[:, :-1])[:, PROMPT - 1 :]
    return -cross_entropy(logits.transpose(1, 2), tokens[:, PROMPT:], reduction="none")


def train(
    model: Model, losses: Iterator[Tensor], lr_at: Callable[[int], float], steps: int
) -> Iterator[Tensor]:
    """Train with AdamW, and yield the loss after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        loss = next(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def pretrained(folder: Path, text: Text) -> Model:
    """Return a model that has been pretrained for a little, from the folder if it is there."""
    torch.manual_seed(0)
    model, file = Model(Config()), folder / "pretrained-0.safetensors"
    if file.exists():
        model.load_state_dict(load_file(file))
        return model
    losses = plain_losses(model, text, torch.Generator().manual_seed(0))
    ramp = [min(1, (step + 1) / RAMP) * PRETRAINING_LR for step in range(PRETRAINING)]
    for step, loss in enumerate(train(model, losses, ramp.__getitem__, PRETRAINING), 1):
        if step % 50 == 0 or step == 1:
            print(f"pretraining, step {step}: loss {loss:.3f}", flush=True)
    _save(model.state_dict(), file)
    return model


def _save(weights: Weights, file: Path) -> None:
    """Write weights; a file that is there is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    save_file(weights, unfinished)
    unfinished.replace(file)


def pairs(folder: Path, learning_rates: Sequence[float], versions: int) -> dict[float, list[Path]]:
    """Return files of consecutive versions by learning rate; those that are missing are made."""
    found = {
        lr: [
            folder / "policy-0" / f"{lr:g}" / f"v{version:04}.safetensors"
            for version in range(versions)
        ]
        for lr in learning_rates
    }
    missing = [lr for lr in found if not all(file.exists() for file in found[lr])]
    if missing:
        text = read(Config().words)
    for lr in missing:
        _tune(pretrained(folder, text), text, lr, found[lr])
    return found


def _tune(model: Model, text: Text, lr: float, files: Sequence[Path]) -> None:
    """Fine-tune a model, and write its last versions, one a file."""
    steps, started = WARM_IN + len(files) - 1, perf_counter()
    losses = policy_losses(model, text, torch.Generator().manual_seed(0))
    for step, _ in enumerate(train(model, losses, lambda _: lr, steps), 1):
        if step >= WARM_IN:
            rounded = {name: one.bfloat16() for name, one in model.state_dict().items()}
            _save(rounded, files[step - WARM_IN])
    seconds = (perf_counter() - started) / steps
    print(f"lr {lr:g}: {steps} steps of {seconds:.2f} s", flush=True)


def tiled(file: Path, elements: int) -> Weights:
    """Return weights, each repeated till its tensor is as large as one of a large model."""
    weights = load_file(file)
    copies = -(-elements // sum(tensor.numel() for tensor in weights.values()))
    return {name: torch.cat([tensor] * copies) for name, tensor in weights.items()}


def distances(before: Tensor, after: Tensor) -> Tensor:
    """Return how many bfloat16 numbers each weight has passed, with its sign."""
    first, second = (one.view(torch.int16).int() for one in (before, after))
    return _ordered(second) - _ordered(first)


def _ordered(bits: Tensor) -> Tensor:
    return torch.where(bits < 0, ~(bits & 0x7FFF), bits)
