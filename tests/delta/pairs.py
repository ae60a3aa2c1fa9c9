"""Old and new weights that are worth coding, and how tensors lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparcel.products.delta import Change
from sparcel.products.delta.prepared import whole_changes
from tests.strategies import same_bits

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
OTHERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
)
DTYPES = (*FLOATS, *OTHERS)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CODES = ("exponents", "steps", "values")

KINDS = ("normal", "any bits", "special", "zeros")
STEPS = ("next", "few", "wide", "any", "sign", "nibble", "rounded", "alike")
SHARES = (0.0, 0.002, 0.05, 0.5, 1.0)
LAYOUTS = ("contiguous", "transposed", "strided", "offset")
# Around 64 elements, which are looked at together, and longer than a block of 2048.
SIZES = (0, 1, 2, 63, 64, 65, 127, 128, 130, 255, 256, 257, 511, 513, 1000, 2048, 3000, 4160)
CHUNK_BYTES = (64, 256, 1000, 4096, 4 << 20)


@dataclass(frozen=True)
class Recipe:
    """How to make a tensor and what it becomes; Hypothesis prints it better than tensors."""

    dtype: torch.dtype
    size: int
    kind: str = "normal"
    step: str = "next"
    share: float = 0.05
    seed: int = 0
    layout: str = "contiguous"
    rank: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """As many elements, or a few less, in one dimension, two or three; one element in none."""
        if self.rank == 0:
            return ()
        if self.rank == 1:
            return (self.size,)
        rows = max(int(self.size**0.5), 1)
        return (rows, self.size // rows) if self.rank == 2 else (rows, 1, self.size // rows)

    def pair(self) -> tuple[Tensor, Tensor]:
        """Make the old and the new tensor."""
        generator = torch.Generator().manual_seed(self.seed)
        old = self._old(generator)
        if self.step == "rounded":
            half = 4 * self.dtype.itemsize
            old = (bits_of(old) >> half << half).view(self.dtype)
        new = self._changed(old, generator)
        if self.dtype == torch.bool:  # it has no other bits
            before, other = bits_of(old) & 1, bits_of(old) != bits_of(new)
            return before.view(self.dtype), (before ^ other).view(self.dtype)
        return old, new

    def _old(self, generator: torch.Generator) -> Tensor:
        integers = INTEGERS[self.dtype.itemsize]
        if self.kind == "zeros":
            return torch.zeros(self.shape, dtype=integers).view(self.dtype)
        if self.kind == "any bits" or self.dtype not in FLOATS:
            return _any_bits(self.shape, integers, generator).view(self.dtype)
        normal = torch.randn(self.shape, generator=generator) * 0.02
        if self.kind == "special":
            some = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40])
            normal = some[torch.randint(len(some), self.shape, generator=generator)]
        return normal.to(self.dtype)

    def _changed(self, old: Tensor, generator: torch.Generator) -> Tensor:
        bits = bits_of(old)
        width = 8 * self.dtype.itemsize
        any_bits = _any_bits(self.shape, bits.dtype, generator)
        match self.step:
            case "next":
                new = bits + (1 - 2 * (any_bits & 1))
            case "few":
                new = bits + (any_bits >> (width - 5))
            case "wide":
                shifts = torch.randint(1, width, self.shape, generator=generator)
                new = bits + (any_bits >> shifts.to(bits.dtype))
            case "sign":
                new = bits ^ torch.iinfo(bits.dtype).min
            case "nibble":
                new = bits ^ (1 << (any_bits & (width - 1) & ~3))
            case "rounded":
                new = bits + (1 - 2 * (any_bits & 1) << width // 2)
            case "alike":
                new = bits ^ 5
            case _:
                new = any_bits
        changed = torch.rand(self.shape, generator=generator) < self.share
        return torch.where(changed, new, bits).view(self.dtype)


def _any_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    least = torch.iinfo(torch.int64).min
    wide = torch.randint(least, -(least + 1), shape, generator=generator, dtype=torch.int64)
    return (wide >> (64 - 8 * dtype.itemsize)).to(dtype)


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, in the same memory."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Copy a tensor, bit by bit, to memory where its elements lie otherwise."""
    bits = bits_of(tensor)
    match layout:
        case "transposed" if bits.dim() > 1:
            copy = bits.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided" if bits.dim() > 0:
            copy = bits.new_full((*bits.shape[:-1], 2 * bits.shape[-1]), -1)[..., ::2]
        case "offset":
            copy = bits.new_full((bits.numel() + 1,), -1)[1:].view(bits.shape)
        case _:
            copy = torch.empty_like(bits, memory_format=torch.contiguous_format)
    return copy.copy_(bits).view(tensor.dtype)


recipes = st.builds(
    Recipe,
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from(SIZES),
    kind=st.sampled_from(KINDS),
    step=st.sampled_from(STEPS),
    share=st.sampled_from(SHARES),
    seed=st.integers(0, 99),
    layout=st.sampled_from(LAYOUTS),
    rank=st.integers(0, 3),
)
codes = st.sampled_from(CODES)
chunk_bytes = st.sampled_from(CHUNK_BYTES)

Model = dict[str, Tensor]


@st.composite
def models(draw: st.DrawFn, most: int = 4, alike: bool = False) -> tuple[Model, Model]:
    """Draw old and new weights; unless ``alike``, tensors may appear, vanish or be replaced."""
    old, new = Model(), Model()
    for i, recipe in enumerate(draw(st.lists(recipes, min_size=1, max_size=most))):
        name = f"layer.{i}.weight"
        before, after = recipe.pair()
        old[name], new[name] = laid_out(before, recipe.layout), after
        match "kept" if alike else draw(st.sampled_from(["kept"] * 6 + ["gone", "new", "other"])):
            case "gone":
                del new[name]
            case "new":
                del old[name]
            case "other":
                new[name] = draw(recipes).pair()[1]
    return old, new


def copied(model: Mapping[str, Tensor]) -> Model:
    """Copy tensors so that each lies in memory as before."""
    copies = Model()
    for name, tensor in model.items():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        bits_of(copy).copy_(bits_of(tensor))
        copies[name] = copy
    return copies


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Tell whether two sets of tensors have the same names and the same bits."""
    return set(a) == set(b) and all(same_bits(bits_of(a[k]), bits_of(b[k])) for k in a)


@contextmanager
def chunks_of(count: int) -> Iterator[None]:
    """Encode at most so many bytes of weights in a chunk."""
    with (
        patch("sparcel.products.delta.encoding.CHUNK_BYTES", count),
        patch("sparcel.products.delta.encoding._chunk_bytes", lambda *_: count),
    ):
        yield


def wholes(**tensors: Tensor) -> list[Change]:
    """Return the changes that make tensors."""
    return list(whole_changes(tensors, tensors))
